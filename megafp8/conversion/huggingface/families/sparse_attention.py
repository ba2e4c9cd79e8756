"""DeepSeek-V3.2, GLM-5 and GLM-5.2, with latent attention to tokens that an indexer selects."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import DEEPSEEK_KEYS, LATENT_KEYS, latent_norms
from megafp8.conversion.huggingface.layers import layer_list, num_layers
from megafp8.conversion.huggingface.names import MULTI_TOKEN_PREDICTION, like_llama, usual
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, check, only, same
from megafp8.layers.sparse_attention.record import SparseLatentMixerConfig


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
_NAMES = like_llama(usual(SparseLatentMixerConfig), MULTI_TOKEN_PREDICTION)


def _index(heads: int, rope: str) -> tuple[Trait, ...]:
    """Return the traits for the indexer. `heads` is the default number of heads, and `rope` the rotated pairs."""
    keys = {"index_heads": ("index_n_heads", heads), "index_head_dim": ("index_head_dim", 128)}
    return same("sparse_attention", top_k=("index_topk", 2048), **keys), always("sparse_attention", index_rope=rope)


FAMILIES = (
    Family("deepseek_v32", "DeepseekV32ForCausalLM", (*_SPARSE, *_index(64, "halves"), traits.expert_groups(8, 4)),
           _NAMES, moe=True, latent=True, sparse=True,
        about="DeepSeek-V3.2; any `rms_norm_eps`",
    ),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", (
        *_SPARSE, *_index(32, "neighbors"), traits.expert_groups(1, 1),
        Trait(("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"), _read_indexers,
              _write_indexers),
        only(written=False, rope_interleave=True, indexer_rope_interleave=True),
    ), _NAMES, moe=True, latent=True, sparse=True,
        about="GLM-5, 5.2",
    ),
)  # fmt: skip
