"""Nemotron-H and Nemotron 3. Each layer is one of Mamba-2, attention, MLP and experts, and has one norm."""

import re

from megafp8.config import AttentionConfig, MlpConfig, MoeFfnConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL
from megafp8.conversion.huggingface.mamba import LINEAR, MAMBA_NAMES, NO_LIMIT, kinds_of, mamba, mixers
from megafp8.conversion.huggingface.names import HfPlace, TensorNames, in_layers, usual, without_prediction
from megafp8.conversion.keys import ConfigKey, Fields, HfConfig, Keys, Trait, always, check, expect, only, same, unread

_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def _kinds(hf: HfConfig) -> list[str]:
    """Return the kind of each layer, from a list of words, or in the first folders from `hybrid_override_pattern`."""
    key, letters = "layers_block_type", hf.get("hybrid_override_pattern")
    if letters is None:
        return kinds_of(hf.get(key), key, [*_LETTERS.values()])
    if not isinstance(letters, str) or not letters or not set(letters) <= _LETTERS.keys():
        refuse("hybrid_override_pattern", letters, f"letters of {' '.join(_LETTERS)}")
    kinds = [_LETTERS[letter] for letter in letters]
    if key in hf and kinds_of(hf[key], key, [*_LETTERS.values()]) != kinds:
        refuse(key, hf[key], "the kinds in hybrid_override_pattern")
    return kinds


def _read_layers(hf: HfConfig) -> Fields:
    kinds = _kinds(hf)
    expect(hf, "num_hidden_layers", len(kinds), f"the number of kinds of layers ({len(kinds)})")
    return {
        "num_layers": len(kinds), **mixers(kinds), "ffn.kind": [x if x in ("mlp", "moe") else "none" for x in kinds],
    }  # fmt: skip


def _write_layers(ours: Fields) -> Keys:
    names = {"mamba2": LINEAR, "none": None}
    pairs = zip(ours["mixer.kind"], ours["ffn.kind"], strict=True)
    return {"layers_block_type": [names.get(mixer, FULL) or ffn for mixer, ffn in pairs]}


def _check_limit(hf: HfConfig) -> None:
    """Raise ValueError for a time_step_limit. transformers ignores it, and uses time_step_min as the lower limit."""
    least, most = hf.get("time_step_limit") or (0.0, NO_LIMIT[0])
    if least or most not in NO_LIMIT:
        refuse("time_step_limit", [least, most], "0 and infinity, because transformers does not read it")


_LAYERS = Trait(("layers_block_type", "hybrid_override_pattern", "num_hidden_layers"), _read_layers, _write_layers)
_NAMES = {
    name: HfPlace(place) if isinstance(place, str) else place
    for name, place in {**MAMBA_NAMES, **usual(AttentionConfig, MlpConfig, MoeFfnConfig)}.items()
}
_IN_LAYERS = {name: place._replace(name=re.sub(r"^\w+", "mixer", place.name)) for name, place in _NAMES.items()}
FAMILIES = (
    Family("nemotron_h", "NemotronHForCausalLM", (
        same(
            hidden_size="hidden_size", vocab_size="vocab_size", num_attention_heads=("num_attention_heads", 32),
            num_query_groups=ConfigKey("num_key_value_heads", 8, nullable=True), head_dim=("head_dim", 128),
            ffn_hidden_size=("intermediate_size", 21504), norm_eps=("layer_norm_epsilon", 1e-5),
            attention_dropout=("attention_dropout", 0.0),
        ),
        traits.POSITIONS, traits.INIT_STD, traits.activation("mlp_hidden_act", "relu2", gated=False),
        always(normalization="rmsnorm", position_embedding="none"), _LAYERS,
        mamba(
            _kinds, num_heads=("mamba_num_heads", 128), head_dim=("mamba_head_dim", 64), num_groups=("n_groups", 8),
            state_size=("ssm_state_size", 128), conv_kernel_size=("conv_kernel", 4), conv_bias=("use_conv_bias", True),
            min_step=("time_step_min", 0.001),
        ),
        *traits.if_sparse(
            lambda hf: "moe" in _kinds(hf),
            same(
                "moe", num_experts=("n_routed_experts", 8), top_k=("num_experts_per_tok", 2),
                ffn_hidden_size=("moe_intermediate_size", 7688), normalize=("norm_topk_prob", True),
                shared_ffn_hidden_size=("moe_shared_expert_intermediate_size", 7688),
                scaling_factor=("routed_scaling_factor", 1.0), latent_size=("moe_latent_size", None),
            ),
            traits.expert_groups(1, 1), always("moe", score="sigmoid", selection_bias=True),
        ),
        check(_check_limit, "time_step_limit"), traits.NO_PADDING,
        only(
            attention_bias=False, mlp_bias=False, use_bias=False, mamba_proj_bias=False, mamba_hidden_act="silu",
            n_shared_experts=1, residual_in_fp32=False,
            sliding_window=None, tie_word_embeddings=False,
        ),
        unread("mtp_hybrid_override_pattern", num_nextn_predict_layers=0),
        unread(
            "chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type",
            "num_logits_to_keep", "rescale_prenorm_residual", "time_step_floor", "time_step_max", "use_mamba_kernels",
        ),
    ), TensorNames({
        "embedding.word": "backbone.embeddings", "final_norm": "backbone.norm_f", "output": "lm_head",
        **in_layers("backbone.layers.*", _IN_LAYERS, {"attention_norm": "norm", "mlp_norm": "norm"}),
    }, stored=without_prediction), moe=None, rank=5,
        about="Nemotron-H, Nemotron 3, without multi-token prediction; latent experts, or not",
    ),
)  # fmt: skip
