"""DeepSeek-V3.2 and GLM-5, with latent attention to tokens that an indexer selects."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import DEEPSEEK_KEYS, LATENT_KEYS, latent_norms
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
    """Raise ValueError unless all layers have an indexer. Some releases allow layers to reuse an earlier selection."""
    for key, kind in (("layer_types", "indexed_attention"), ("indexer_types", "full")):
        kinds = hf.get(key)
        if kinds is not None and kinds != [kind] * len(kinds):
            refuse(key, kinds, f"{kind} for all layers")


_SPARSE = (
    *LATENT_KEYS, *DEEPSEEK_KEYS, *latent_norms(1e-6),
    traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
    same("moe", normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 2.5)),
    Trait(("first_k_dense_replace", "mlp_layer_types"), _read_dense_layers, _write_dense_layers),
    always("moe", score="sigmoid", selection_bias=True), only(scoring_func="sigmoid", topk_method="noaux_tc"),
    check(_check_layers, "layer_types", "indexer_types"), only(written=False, mlp_bias=False), traits.NO_PADDING,
    traits.MULTI_TOKEN_PREDICTION,
)  # fmt: skip
_NAMES = like_llama(usual(SparseLatentMixerConfig), MULTI_TOKEN_PREDICTION)


def _index(heads: int, rope: str) -> tuple[Trait, ...]:
    """Return the traits for the indexer. `heads` is the default number of heads, and `rope` the rotated pairs."""
    keys = {"index_heads": ("index_n_heads", heads), "index_head_dim": ("index_head_dim", 128)}
    return same("sparse_attention", top_k=("index_topk", 2048), **keys), always("sparse_attention", index_rope=rope)


FAMILIES = (
    Family("deepseek_v32", "DeepseekV32ForCausalLM", (*_SPARSE, *_index(64, "halves"), traits.expert_groups(8, 4)),
           _NAMES, moe=True, latent=True, sparse=True),
    Family("glm_moe_dsa", "GlmMoeDsaForCausalLM", (
        *_SPARSE, *_index(32, "neighbors"), traits.expert_groups(1, 1),
        only(written=False, rope_interleave=True, indexer_rope_interleave=True, index_topk_freq=1),
    ), _NAMES, moe=True, latent=True, sparse=True),
)  # fmt: skip
