"""Granite, also with windows and sinks (granite_swa), with experts, or with Mamba-2 (Granite 4, granitemoehybrid).

Bamba has Mamba-2 or attention, and an MLP, in each layer.
"""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, num_layers, windows
from megafp8.conversion.huggingface.mamba import LINEAR, MAMBA_NAMES, bamba_like, kinds_of, mixers
from megafp8.conversion.huggingface.names import LLAMA, HfPlace, TensorNames, equal_parts, fused, in_layers, like_llama
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only, same, unread

_MULTIPLIERS = same(
    embedding_multiplier=("embedding_multiplier", 1.0), residual_multiplier=("residual_multiplier", 1.0),
    logits_scaling=("logits_scaling", 1.0), attention_scale=("attention_multiplier", 1.0),
)  # fmt: skip
_MODEL = (*traits.llama_like(None), _MULTIPLIERS)
_GRANITE = (*_MODEL, *traits.NO_WINDOW)
_BASES = "layer_rope_theta"
_NUM_EXPERTS = ("num_local_experts", "num_experts")
_GRANITE_MOE = (
    *_GRANITE, *traits.ROUTER, traits.EXPERTS_ONLY, traits.num_experts(*_NUM_EXPERTS),
    only(written=False, attention_bias=False),
)  # fmt: skip
_GATE_UP = ("mlp.experts.*.gate", "mlp.experts.*.up")
_EXPERTS = {
    "mlp.router": "block_sparse_moe.router.layer",
    **fused("block_sparse_moe.input_linear", equal_parts(2), _GATE_UP, stacked=True),
    "mlp.experts.*.down": HfPlace("block_sparse_moe.output_linear", stacked=True),
}
_SHARED = {
    **fused("shared_mlp.input_linear", equal_parts(2), ("mlp.shared.gate", "mlp.shared.up")),
    **fused("shared_mlp.input_linear", equal_parts(2), ("mlp.gate", "mlp.up")),
    **dict.fromkeys(("mlp.shared.down", "mlp.down"), "shared_mlp.output_linear"),
}
"""Names of the shared expert, which is the only MLP in models without experts."""


def _kinds(hf: HfConfig) -> list[str]:
    layers = num_layers(hf)
    kinds = kinds_of(hf.get("layer_types", [LINEAR] * layers), "layer_types", (LINEAR, FULL))
    if len(kinds) != layers:
        refuse("layer_types", hf["layer_types"], f"one entry for each of num_hidden_layers ({layers})")
    return kinds


def _window_kinds(hf: HfConfig) -> list[str]:
    return [SLIDING if i % 4 else FULL for i in range(num_layers(hf))]


def _read_bases(hf: HfConfig) -> Fields:
    """Read a base of the rotary embedding for each layer; 0 means that the layer has none."""
    fields, layers = read_rope(hf, 1e4), num_layers(hf)
    bases = hf.get(_BASES)
    bases = [fields["rope_theta"]] * layers if bases is None else bases
    if not isinstance(bases, list) or len(bases) != layers:
        refuse(_BASES, bases, f"one number for each of num_hidden_layers ({layers}), or null")
    kinds = {"mixer.position_embedding": ["rope" if x else "none" for x in bases]}
    return fields | kinds | {"mixer.rope_theta": [x or None for x in bases]}


def _write_bases(ours: Fields) -> Keys:
    return {**write_rope(ours), _BASES: [x or 0 for x in ours["mixer.rope_theta"]]}


def _is_sparse(hf: HfConfig) -> bool:
    return bool(hf.get("num_local_experts", 8))


def _read_shared(hf: HfConfig) -> Fields:
    width = hf.get("shared_intermediate_size", 1024)
    return {"moe.shared_ffn_hidden_size" if _is_sparse(hf) else "ffn_hidden_size": width}


def _write_shared(ours: Fields) -> Keys:
    if ours["moe"] is None:
        return {"num_local_experts": 0, "shared_intermediate_size": ours["ffn_hidden_size"]}
    width = ours["moe.shared_ffn_hidden_size"]
    return {} if width is None else {"shared_intermediate_size": width}  # by default there is a shared expert of 1024


_HYBRID = (
    *_MODEL,
    Trait(
        ("layer_types",),
        lambda hf: mixers(_kinds(hf)),
        lambda ours: {"layer_types": [LINEAR if kind == "mamba2" else FULL for kind in ours["mixer.kind"]]},
    ),
    Trait(
        ("position_embedding_type",),
        lambda hf: {"position_embedding": "rope" if hf.get("position_embedding_type") == "rope" else "none"},
        lambda ours: {"position_embedding_type": "rope" if ours["position_embedding"] == "rope" else None},
    ),
    *bamba_like(_kinds),
    *traits.if_sparse(_is_sparse, *traits.ROUTER, traits.EXPERTS_ONLY, traits.num_experts(*_NUM_EXPERTS)),
    Trait(("shared_intermediate_size", "num_local_experts"), _read_shared, _write_shared),
    only(written=False, attention_bias=False),
)


def _bamba_kinds(hf: HfConfig) -> list[str]:
    full = hf.get("attn_layer_indices") or []
    return [FULL if i in full else LINEAR for i in range(num_layers(hf))]


def _read_bamba_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding. It always rotates half of a head; partial_rotary_factor is ignored."""
    return read_rope({key: x for key, x in hf.items() if key != "partial_rotary_factor"}, 1e4, 0.5)


_BAMBA_LAYERS = Trait(
    ("attn_layer_indices",),
    lambda hf: mixers(_bamba_kinds(hf)),
    lambda ours: {"attn_layer_indices": [i for i, kind in enumerate(ours["mixer.kind"]) if kind == "attention"]},
)
_BAMBA_NAMES = {f"mlp.{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")} | {"mlp_norm": "pre_ff_layernorm"}

FAMILIES = (
    Family("bamba", "BambaForCausalLM", (
        *traits.llama_like(8, norm_eps=1e-5, rope=Trait(ROPE_KEYS, _read_bamba_rope, write_rope)), _BAMBA_LAYERS,
        *bamba_like(_bamba_kinds), only(attention_bias=False, mlp_bias=False), traits.HEADS_DIVIDE, traits.NO_PADDING,
        unread("num_logits_to_keep", "z_loss_coefficient"),
    ), TensorNames({
        **LLAMA, **in_layers("model.layers.*", MAMBA_NAMES, _BAMBA_NAMES), "final_norm": "model.final_layernorm",
    }), rank=5,
        about="Bamba",
    ),
    Family("granite", "GraniteForCausalLM", (*_GRANITE, traits.LINEAR_BIASES),
        about="Granite 3; biases as in `llama`",
    ),
    Family("granite_swa", "GraniteSWAForCausalLM", (
        *traits.llama_like(4, norm_eps=1e-5, rope=Trait((*ROPE_KEYS, _BASES), _read_bases, _write_bases)),
        _MULTIPLIERS, traits.LINEAR_BIASES, traits.TIED, windows(128, _window_kinds), always(attention_sinks=True),
    ), rank=4,
        about="Granite with windows and sinks",
    ),
    Family("granitemoe", "GraniteMoeForCausalLM", _GRANITE_MOE, like_llama(_EXPERTS), moe=True,
        about="Granite 3 MoE, without biases",
    ),
    Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", _HYBRID,
           like_llama(_EXPERTS, _SHARED, MAMBA_NAMES), moe=None, rank=5,
        about="Granite 4, without positions or with rope",
    ),
    Family("granitemoeshared", "GraniteMoeSharedForCausalLM", (
        *_GRANITE_MOE, Trait(
            ("shared_intermediate_size",),
            lambda hf: {"moe.shared_ffn_hidden_size": hf.get("shared_intermediate_size", 0) or None},
            lambda ours: {"shared_intermediate_size": ours["moe.shared_ffn_hidden_size"] or 0},
        ),
    ), like_llama(_EXPERTS, _SHARED), moe=True, rank=5,
        about="Granite MoE with a shared expert",
    ),
)  # fmt: skip
