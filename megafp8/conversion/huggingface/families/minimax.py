"""MiniMax-M2, and MiniMax-M3's language model with attention to blocks of tokens that an indexer chooses."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.llama import MIXTRAL_EXPERTS, MIXTRAL_ROUTER
from megafp8.conversion.huggingface.layers import FULL, layer_types, num_layers, sparse_layers
from megafp8.conversion.huggingface.names import FUSED_GATE_UP, HfPlace, equal_parts, fused, like_llama, usual
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, rope, rotary_fraction, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, check, only, same, unread
from megafp8.layers.block_sparse_attention.record import BlockSparseAttentionConfig


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding.

    The first folders state the number of rotated channels as rotary_dim. If partial_rotary_factor is also present,
    transformers prefers it, so the two must agree.
    """
    fields, width, dim = read_rope(hf, 5e6, 1.0), hf.get("head_dim", 128), hf.get("rotary_dim")
    if dim is None:
        return fields
    sources = [x for x in (hf, hf.get("rope_parameters"), hf.get("rope_scaling")) if x and "partial_rotary_factor" in x]
    if sources and dim != fields["partial_rotary_factor"] * width:
        refuse("rotary_dim", dim, f"partial_rotary_factor × head_dim ({fields['partial_rotary_factor'] * width:g})")
    return fields | {"partial_rotary_factor": rotary_fraction(dim, width)}


def _write_rope(ours: Fields) -> Keys:
    return write_rope(ours) | {"partial_rotary_factor": ours["partial_rotary_factor"]}


_SPARSE, _KIND = "minimax_m3_sparse", BlockSparseAttentionConfig().kind
_INDEXER = {
    "top_k": ("index_topk_blocks", 16), "block_size": ("index_block_size", 128),
    "local_blocks": ("index_local_blocks", 1),
}  # fmt: skip


def _check_widths(hf: HfConfig) -> None:
    """Raise ValueError for a rotary_dim that transformers ignores, and for an indexer with other heads than keys."""
    width, groups = hf.get("head_dim", 128), hf.get("num_key_value_heads", 4)
    rotated = int(read_rope(hf, 5e6, 1.0)["partial_rotary_factor"] * width)
    for key, default, value, name in (
        ("rotary_dim", rotated, rotated, "partial_rotary_factor × head_dim"),
        ("index_n_heads", 4, groups, "num_key_value_heads"), ("index_head_dim", 128, width, "head_dim"),
    ):  # fmt: skip
        if hf.get(key, default) != value:
            refuse(key, hf.get(key, default), f"{name} ({value})")


def _read_mixers(hf: HfConfig) -> Fields:
    types = layer_types(hf, (FULL, _SPARSE)) or [FULL] * num_layers(hf)
    lists = {ours: [hf.get(*key) if kind == _SPARSE else None for kind in types] for ours, key in _INDEXER.items()}
    lists["kind"] = [_KIND if kind == _SPARSE else "attention" for kind in types]
    return {f"mixer.{ours}": values for ours, values in lists.items()}


def _write_mixers(ours: Fields) -> Keys:
    kinds = ours["mixer.kind"]
    written: Keys = {"layer_types": [_SPARSE if kind == _KIND else FULL for kind in kinds]}
    if _KIND in kinds:
        written |= {key: ours[f"mixer.{name}"][kinds.index(_KIND)] for name, (key, _) in _INDEXER.items()}
    return written


FAMILIES = (
    Family("minimax_m2", "MiniMaxM2ForCausalLM", (
        *traits.llama_like(8, 128, rope=Trait((*ROPE_KEYS, "rotary_dim"), _read_rope, _write_rope)),
        *traits.NO_WINDOW, always(qk_norm="projection"), *traits.ROUTER, traits.EXPERTS_ONLY,
        traits.num_experts("num_local_experts", "num_experts"), always("moe", score="sigmoid", selection_bias=True),
        # The code in the first folders reads these keys; transformers always uses this value.
        only(written=False, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
             shared_intermediate_size=0, attention_bias=False),
        unread("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ), like_llama(MIXTRAL_ROUTER, MIXTRAL_EXPERTS, {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"}),
        moe=True, rank=4,
        about="MiniMax-M2",
    ),
    Family("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", (
        *traits.llama_like(4, 128, rope=rope(5e6, 1.0), activation=same(
            activation=("hidden_act", "silu", dict.fromkeys(("silu", "swigluoai"), "clamped_swiglu"))
        )),
        always(zero_centered_gamma=True, qk_norm=True), only(swiglu_alpha=1.702, swiglu_limit=7.0),
        same(ffn_hidden_size=("dense_intermediate_size", 12288)),
        Trait(("layer_types", *(key for key, _ in _INDEXER.values())), _read_mixers, _write_mixers),
        check(_check_widths, rotary_dim=lambda ours: int(ours["head_dim"] * ours["partial_rotary_factor"]),
              index_n_heads=lambda ours: ours["num_query_groups"], index_head_dim=lambda ours: ours["head_dim"]),
        sparse_layers(0, None), traits.AUX_LOSS, traits.num_experts("num_local_experts", "num_experts"),
        same(
            "moe", top_k=("num_experts_per_tok", 4), ffn_hidden_size=("intermediate_size", 3072),
            shared_ffn_hidden_size=("shared_intermediate_size", 3072),
            scaling_factor=("routed_scaling_factor", 2.0),
        ),
        always("moe", score="sigmoid", selection_bias=True), only(written=False, attention_bias=False),
    ), like_llama(usual(BlockSparseAttentionConfig), FUSED_GATE_UP, {
        **fused("mlp.shared_experts.gate_up_proj", equal_parts(2), ("mlp.shared.gate", "mlp.shared.up")),
        **fused("mlp.experts.gate_up_proj", equal_parts(2), ("mlp.experts.*.gate.weight", "mlp.experts.*.up.weight"),
                stacked=True),
        "mlp.experts.*.down.weight": HfPlace("mlp.experts.down_proj", stacked=True),
    }), moe=True, rank=5,
        about="MiniMax-M3's language model",
    ),
)  # fmt: skip
