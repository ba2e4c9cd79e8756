"""Kimi Linear, with Kimi Delta Attention, and latent attention without rotary embedding in some layers."""

from megafp8.config import LatentMixerConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import check_derived_widths, latent_widths
from megafp8.conversion.huggingface.families.llama import MIXTRAL_EXPERTS, MIXTRAL_ROUTER
from megafp8.conversion.huggingface.layers import FULL, layer_list, num_layers, sparse_layers
from megafp8.conversion.huggingface.names import HfPlace, like_llama, usual
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, aliases, always, check, either, only, same, unread
from megafp8.layers.kimi_delta_attention.record import KimiDeltaAttentionConfig

_LINEAR, _KDA, _LATENT = "linear_attention", "kimi_delta_attention", "latent_attention"
_KEYS = {
    "num_heads": ("num_heads", "linear_num_heads", 32), "head_dim": ("head_dim", "linear_head_dim", 128),
    "conv_kernel_size": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}  # fmt: skip
"""Table of our keys: the HF key in linear_attn_config, which has priority, the HF key outside, and the default."""
_NESTED, _LISTS = "linear_attn_config", {"kda_layers": _LINEAR, "full_attn_layers": FULL}


def _types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer.

    It comes from layer_types, or from two lists of layer numbers that count from 1. By default, layers 4, 8, ...
    (counted from 0) have full attention.
    """
    layer_types, layers, nested = layer_list(hf, "layer_types", (FULL, _LINEAR)), num_layers(hf), hf.get(_NESTED) or {}
    if layer_types is not None:
        return layer_types
    if not all(key in nested for key in _LISTS):
        return [FULL if i and i % 4 == 0 else _LINEAR for i in range(layers)]
    kinds = {layer: kind for key, kind in _LISTS.items() for layer in nested[key]}
    if sorted(kinds) != [*range(1, layers + 1)]:
        refuse(_NESTED, nested, f"each of the layers 1 to {layers} in {' or '.join(_LISTS)}")
    return [kinds[layer] for layer in range(1, layers + 1)]


def _read_mixers(hf: HfConfig) -> Fields:
    types, nested = _types(hf), hf.get(_NESTED) or {}
    fields: Fields = {"mixer.kind": [_KDA if kind == _LINEAR else _LATENT for kind in types]}
    for ours, (inner, outer, default) in _KEYS.items():
        value = nested.get(inner, hf.get(outer, default))
        fields[f"mixer.{ours}"] = [value if kind == _LINEAR else None for kind in types]
    return fields


def _write_mixers(ours: Fields) -> Keys:
    kinds = ours["mixer.kind"]
    written: Keys = {"layer_types": [_LINEAR if kind == _KDA else FULL for kind in kinds]}
    if _KDA in kinds:
        written |= {outer: ours[f"mixer.{key}"][kinds.index(_KDA)] for key, (_, outer, _) in _KEYS.items()}
    return written


def _write_groups(ours: Fields) -> Keys:
    groups = traits.write_expert_groups(ours)
    return {"num_expert_group": groups["n_group"], "topk_group": groups["topk_group"]}


FAMILIES = (
    Family("kimi_linear", "KimiLinearForCausalLM", (
        *traits.RMSNORM_MODEL, traits.activation(), traits.UNTIED, same(norm_eps=("rms_norm_eps", 1e-5)),
        same(max_position_embeddings=("model_max_length", None)), aliases(max_position_embeddings="model_max_length"),
        latent_widths(q_lora_rank=None),
        always("latent_attention", norm_eps=1e-6), always(position_embedding="none"),
        Trait(("layer_types", _NESTED, *(outer for _, outer, _ in _KEYS.values())), _read_mixers, _write_mixers),
        sparse_layers(1, "first_k_dense_replace"),
        either("moe.num_experts", "num_experts", "num_local_experts"),
        either("moe.top_k", "num_experts_per_token", "num_experts_per_tok"),
        same(
            "moe", ffn_hidden_size="moe_intermediate_size", normalize=("moe_renormalize", True),
            scaling_factor=("routed_scaling_factor", 2.446),
        ),
        traits.shared_experts(1, "num_shared_experts"), always("moe", score="sigmoid", selection_bias=True),
        Trait(
            ("num_expert_group", "topk_group"),
            lambda hf: {"moe.num_groups": hf.get("num_expert_group", 1), "moe.top_groups": hf.get("topk_group", 1)},
            _write_groups,
        ),
        check(
            lambda hf: check_derived_widths(hf, {"num_key_value_heads": ("num_attention_heads",)}),
            num_key_value_heads=lambda ours: ours["num_attention_heads"],
        ),
        # The code in the published folder reads these keys; transformers always uses this value.
        only(attention_bias=False), only(written=False, moe_layer_freq=1, moe_router_activation_func="sigmoid",
             mla_use_nope=True, num_nextn_predict_layers=0),
        unread("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters", "use_grouped_topk",
               pad_token_id=None),
    ), like_llama(
        usual(LatentMixerConfig, KimiDeltaAttentionConfig), MIXTRAL_ROUTER, MIXTRAL_EXPERTS,
        {
            "kimi_delta_attention.log_rate.weight": HfPlace("self_attn.A_log", shape=(1, 1, -1, 1)),
            "mlp.router.bias": "block_sparse_moe.gate.e_score_correction_bias",
            **{f"mlp.shared.{x}": f"block_sparse_moe.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
        },
    ), moe=True, latent=True, rank=4,
        about="Kimi Linear; `linear_attn_config` of the published folder",
    ),
)  # fmt: skip
