"""Models with latent attention: DeepSeek-V2 to V3.2, Youtu-LLM, A.X-K1, MiniCPM3, GLM-5 and GLM-5.2."""

import math
from collections.abc import Mapping

from megafp8.config import LatentMixerConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import layer_list, num_layers, sparse_layers
from megafp8.conversion.huggingface.names import (
    MULTI_TOKEN_PREDICTION,
    Entries,
    HfPlace,
    like_llama,
    rotated_last,
    usual,
)
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import REQUIRED, Fields, HfConfig, Keys, Trait, always, check, expect, only, same, unread
from megafp8.layers.sparse_attention.record import SparseLatentMixerConfig
from megafp8.spec import ModelSpec

_DERIVED_WIDTHS = {
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    "head_dim": ("qk_rope_head_dim",),  # width of the rotary embedding
    "num_key_value_heads": ("num_attention_heads",),
}
_GROUP_METHODS = ("greedy", "group_limited_greedy")


def check_derived_widths(hf: HfConfig, derived: Mapping[str, tuple[str, ...]] = _DERIVED_WIDTHS) -> None:
    """Raise ValueError if a key that follows from other keys has another value; transformers would use that value."""
    for key, parts in derived.items():
        values = [x for part in parts if isinstance(x := hf.get(part), int)]  # others are refused elsewhere
        if len(values) == len(parts):
            expect(hf, key, sum(values), f"{' + '.join(parts)} ({sum(values)})")


def _read_group_method(hf: HfConfig) -> Fields:
    """Read the expert groups of deepseek_v2, which uses them with one method and ignores them with the other."""
    method = hf.get("topk_method", "greedy")
    if method not in _GROUP_METHODS:
        refuse("topk_method", method, ", ".join(_GROUP_METHODS))
    if method == "greedy":
        return {}
    return {"moe.num_groups": hf.get("n_group"), "moe.top_groups": hf.get("topk_group")}


def _write_group_method(ours: Fields) -> Keys:
    groups = traits.write_expert_groups(ours)
    return {**groups, "topk_method": _GROUP_METHODS[groups["n_group"] > 1]}


def latent_norms(eps: float) -> tuple[Trait, ...]:
    """Return traits for the epsilon of norms, by default `eps`, which is always 1e-6 for the norms of the latents."""
    return same(norm_eps=("rms_norm_eps", eps)), always("latent_attention", norm_eps=1e-6)


def _read_init(hf: HfConfig) -> Fields:
    """Read the standard deviation of youtu's weights, which by default follows from hidden_size."""
    return {"init_std": hf.get("initializer_range") or 2 / (5 * hf["hidden_size"]) ** 0.5}


_WIDTHS = {
    "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim", "value_head_dim": "v_head_dim",
}  # fmt: skip


def latent_widths(**defaults: int | None) -> Trait:
    """Return a trait for the widths of latents and heads. `defaults` has the keys that may be missing."""
    keys = {ours: (key, defaults.get(key, REQUIRED), None, ours == "q_rank") for ours, key in _WIDTHS.items()}
    return same("latent_attention", **keys)


LATENT_LAYERS = (
    *traits.RMSNORM_MODEL, traits.POSITIONS, traits.activation(), traits.UNTIED, only(attention_bias=False),
)  # fmt: skip
LATENT_ATTENTION = (*LATENT_LAYERS, latent_widths())
LATENT_KEYS = (*LATENT_ATTENTION, same("moe", top_k="num_experts_per_tok", ffn_hidden_size="moe_intermediate_size"))
LATENT_MODEL = (
    *LATENT_KEYS, always(norm_eps=1e-6),
    only(rms_norm_eps=1e-6, why="which transformers always uses for the norms of the latents"),
)  # fmt: skip
# The default of num_key_value_heads in transformers does not depend on the number of heads.
LATENT_HEADS = check(
    check_derived_widths, *_DERIVED_WIDTHS, num_key_value_heads=lambda ours: ours["num_attention_heads"]
)  # fmt: skip
LATENT_ROPE = (rope(1e4), LATENT_HEADS)
DEEPSEEK_KEYS = (
    *LATENT_ROPE,
    only(moe_layer_freq=1),  # this key and the next ones are read by engines other than transformers
    unread("aux_loss_alpha", "seq_aux"),  # like router_aux_loss_coef, for losses that we do not have
)  # fmt: skip
_DEEPSEEK = *LATENT_MODEL, *DEEPSEEK_KEYS
_NAMES = like_llama(usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION)


_AXK1_LAYERS = sparse_layers(1, "first_k_dense_replace")


def _read_axk1_layers(hf: HfConfig) -> Fields:
    kinds = _AXK1_LAYERS.read(hf)["ffn.kind"]
    return {"ffn.kind": kinds, "layer.norm_position": ["mlp_both" if kind == "moe" else "pre" for kind in kinds]}


def _axk1_stored(model: ModelSpec, entries: Entries) -> Entries:
    """Return the tensors without the norms after MLPs, which published folders have and transformers does not use."""
    dense = {f"model.layers.{i}.post_mlp_layernorm.weight" for i, x in enumerate(model.layers) if not x.has_experts}
    return {name: entry for name, entry in entries.items() if name not in dense}


def _read_scales(hf: HfConfig) -> Fields:
    width, depth, base = hf["hidden_size"], hf.get("scale_depth", 1.4), hf.get("dim_model_base", 256)
    return {
        "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(num_layers(hf)),
        "logits_scaling": 1.0 if base is None else width / base,
        "latent_attention.value_head_dim": hf.get("v_head_dim") or width // hf["num_attention_heads"],
    }


def _write_scales(ours: Fields) -> Keys:
    root, factor = math.sqrt(ours["num_layers"]), ours["residual_multiplier"]
    depths = (float(f"{factor * root:.12g}"), factor * root, math.nextafter(factor * root, 0))
    return {
        "scale_depth": next((depth for depth in depths if depth / root == factor), depths[1]),
        "dim_model_base": round(ours["hidden_size"] / ours["logits_scaling"]),
    }


_ROTATED_HEADS, _ROTATED_LATENT = rotated_last(lambda mixer, n: mixer.channels), rotated_last(lambda mixer, n: n)


def _read_dense_layers(hf: HfConfig) -> Fields:
    kinds, layers = hf.get("mlp_layer_types"), hf.get("num_hidden_layers")
    if kinds is None:
        return {"moe.first_dense_layers": hf.get("first_k_dense_replace", 3)}
    dense = [*kinds, "sparse"].index("sparse") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense if isinstance(layers, int) else 0):
        refuse("mlp_layer_types", kinds, f"dense layers before sparse ones, num_hidden_layers ({layers}) in all")
    return {"moe.first_dense_layers": dense}


def _write_dense_layers(ours: Fields) -> Keys:
    layers = ours["num_layers"]
    dense = min(ours["moe.first_dense_layers"], layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    return {"first_k_dense_replace": dense, "mlp_layer_types": kinds}


def _check_layers(hf: HfConfig) -> None:
    """Raise ValueError for layers with other attention."""
    layer_list(hf, "layer_types", ("indexed_attention",), longer=True)


def _indexer_types(hf: HfConfig) -> list[str]:
    """Return for each layer whether it has an indexer (full) or reuses the choice of an earlier layer (shared)."""
    if (types := layer_list(hf, "indexer_types", _INDEXER_TYPES, longer=True)) is not None:
        return types
    if (pattern := hf.get("index_topk_pattern")) is not None:
        words = [{"F": "full", "S": "shared"}.get(x, x) for x in pattern] if isinstance(pattern, str) else pattern
        return layer_list({**hf, "index_topk_pattern": words}, "index_topk_pattern", _INDEXER_TYPES, longer=True) or []
    every, offset = max(hf.get("index_topk_freq", 1), 1), hf.get("index_skip_topk_offset", 2)
    return [_INDEXER_TYPES[max(i - offset + 1, 0) % every > 0] for i in range(num_layers(hf))]


def _read_indexers(hf: HfConfig) -> Fields:
    """Read which layers have an indexer. If some have none, a list also says which layers have experts."""
    shared = [x == "shared" for x in _indexer_types(hf)]
    if not any(shared):
        return {}
    dense = _read_dense_layers(hf)["moe.first_dense_layers"]
    ffns = ["mlp" if i < dense else "moe" for i in range(len(shared))]
    mixers = {"mixer.kind": [SparseLatentMixerConfig().kind] * len(shared), "mixer.shared_indexer": shared}
    return {**mixers, "ffn.kind": ffns, "moe.first_dense_layers": 0}


def _write_indexers(ours: Fields) -> Keys:
    return {"indexer_types": [_INDEXER_TYPES[bool(x)] for x in ours["mixer.shared_indexer"]]}


_SPARSE = (
    *LATENT_KEYS, *DEEPSEEK_KEYS, *latent_norms(1e-6),
    traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
    same("moe", normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 2.5)),
    Trait(("first_k_dense_replace", "mlp_layer_types"), _read_dense_layers, _write_dense_layers),
    always("moe", score="sigmoid", selection_bias=True), only(scoring_func="sigmoid", topk_method="noaux_tc"),
    check(_check_layers, "layer_types"), only(written=False, mlp_bias=False), traits.NO_PADDING,
    traits.MULTI_TOKEN_PREDICTION,
)  # fmt: skip
_INDEXER_TYPES = ("full", "shared")
_SPARSE_NAMES = like_llama(usual(SparseLatentMixerConfig), MULTI_TOKEN_PREDICTION)


def _index(heads: int, rope: str) -> tuple[Trait, ...]:
    """Return the traits for the indexer. `heads` is the default number of heads, and `rope` the rotated pairs."""
    keys = {"index_heads": ("index_n_heads", heads), "index_head_dim": ("index_head_dim", 128)}
    return same("sparse_attention", top_k=("index_topk", 2048), **keys), always("sparse_attention", index_rope=rope)


FAMILIES = (
    Family("deepseek_v2", "DeepseekV2ForCausalLM", (
        *_DEEPSEEK, traits.num_experts("n_routed_experts", "num_experts"), traits.shared_experts(2),
        same("moe", first_dense_layers=("first_k_dense_replace", 0), scaling_factor=("routed_scaling_factor", 1.0)),
        Trait(("topk_method", "n_group", "topk_group"), _read_group_method, _write_group_method),
        # transformers never normalizes; other engines do if the key says so.
        always("moe", normalize=False), only(norm_topk_prob=False, scoring_func="softmax"),
        only(written=False, mlp_bias=False), traits.HEADS_DIVIDE,
    ), _NAMES, moe=True, latent=True,
        about="DeepSeek-V2, V2-Lite; `greedy` and `group_limited_greedy`",
    ),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", (
        *_DEEPSEEK, only(rope_interleave=True), traits.num_experts("n_routed_experts", "num_local_experts"),
        traits.shared_experts(1),
        same(
            "moe", first_dense_layers=("first_k_dense_replace", 3), normalize=("norm_topk_prob", True),
            scaling_factor=("routed_scaling_factor", 2.5),
        ),
        traits.expert_groups(8, 4), always("moe", score="sigmoid", selection_bias=True),
        only(scoring_func="sigmoid", topk_method="noaux_tc"), traits.MULTI_TOKEN_PREDICTION,
    ), _NAMES, moe=True, latent=True,
        about="DeepSeek-V3, R1",
    ),
    Family("youtu", "YoutuForCausalLM", (
        *LATENT_ATTENTION, *LATENT_ROPE, *latent_norms(1e-6), traits.TIED,
        Trait(("initializer_range", "embedding_initializer_range"), _read_init),
        only(rope_interleave=True), only(written=False, mlp_bias=False),
    ), like_llama(usual(LatentMixerConfig)), latent=True, rank=5,
        about="Youtu-LLM",
    ),
    Family("axk1", "AXK1ForCausalLM", (
        *LATENT_LAYERS, LATENT_HEADS, rope(1e4), only(rope_interleave=True),
        latent_widths(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        *latent_norms(1e-6), Trait(_AXK1_LAYERS.keys, _read_axk1_layers, _AXK1_LAYERS.write),
        only(written=False, moe_layer_freq=1, scoring_func="sigmoid"),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        same(
            "moe", top_k=("num_experts_per_tok", 8), ffn_hidden_size=("moe_intermediate_size", 2048),
            normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 2.5),
        ),
        traits.expert_groups(8, 4), always("moe", score="sigmoid", selection_bias=True), traits.MULTI_TOKEN_PREDICTION,
        unread("topk_method", "aux_loss_alpha", "seq_aux"),
    ), like_llama(
        usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION, {"mlp_output_norm": "post_mlp_layernorm"},
        zeros=r"model\.layers\.\d+\.mlp\.gate\.e_score_correction_bias", stored=_axk1_stored,
    ), moe=True, latent=True, rank=4,
        about="A.X-K1",
    ),
    Family("minicpm3", "MiniCPM3ForCausalLM", (
        *LATENT_LAYERS, traits.TIED, rope(1e4), only(mlp_bias=False), traits.HEADS_DIVIDE,
        same(embedding_multiplier=("scale_emb", 12)), *latent_norms(1e-5),
        latent_widths(q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=None),
        Trait(("scale_depth", "dim_model_base", "v_head_dim"), _read_scales, _write_scales),
        LATENT_HEADS,
    ), like_llama(usual(LatentMixerConfig), {
        "attention.q": HfPlace("self_attn.q_proj", _ROTATED_HEADS),
        "attention.q_up": HfPlace("self_attn.q_b_proj", _ROTATED_HEADS),
        "attention.kv_down": HfPlace("self_attn.kv_a_proj_with_mqa", _ROTATED_LATENT),
    }), latent=True, rank=6,
        about="MiniCPM3",
    ),
    Family("deepseek_v32", "DeepseekV32ForCausalLM", (*_SPARSE, *_index(64, "halves"), traits.expert_groups(8, 4)),
           _SPARSE_NAMES, moe=True, latent=True, sparse=True,
        about="DeepSeek-V3.2; any `rms_norm_eps`",
    ),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", (
        *_SPARSE, *_index(32, "neighbors"), traits.expert_groups(1, 1),
        Trait(("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"), _read_indexers,
              _write_indexers),
        only(written=False, rope_interleave=True, indexer_rope_interleave=True),
    ), _SPARSE_NAMES, moe=True, latent=True, sparse=True,
        about="GLM-5, 5.2",
    ),
)  # fmt: skip
