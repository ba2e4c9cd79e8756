"""Gemma 4's language model."""

from collections.abc import Mapping
from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.gemma import EMBEDDING_MULTIPLIER
from megafp8.conversion.huggingface.layers import FULL, SLIDING, full_every, kv_sources, layer_types, windows
from megafp8.conversion.huggingface.names import LLAMA, OUTPUT_NORMS, TensorNames, in_layers, stacked_experts
from megafp8.conversion.huggingface.rope import ropes_of_types
from megafp8.conversion.keys import ConfigKey, Fields, HfConfig, Keys, Trait, always, check, expect, flag, only, same

_EXPERTS = {"num_experts": "num_experts", "top_k": "top_k_experts", "ffn_hidden_size": "moe_intermediate_size"}
_HEADS = {"head_dim": "head_dim", "num_key_value_heads": "num_query_groups"}
_OLD_HEADS = ("global_head_dim", "num_global_key_value_heads")
_PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_ROPES: Mapping[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _types(hf: HfConfig) -> list[str]:
    if (types := layer_types(hf)) is None:
        return [*full_every(6)(hf)[:-1], FULL]
    if types[-1] != FULL:
        refuse("layer_types", types[-1], f"{FULL} for the last layer, because transformers always uses that")
    return types


def _read_heads(hf: HfConfig) -> Fields:
    """Read the widths and numbers of heads, which differ between layers with and without a window."""
    types, equal = _types(hf), flag(hf, "attention_k_eq_v")
    sources = kv_sources(hf, types)
    usual = {"head_dim": hf.get("head_dim", 256), "num_key_value_heads": hf.get("num_key_value_heads", 4)}
    full = {"head_dim": hf.get("global_head_dim", 512)}
    if equal and hf.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    overrides = {str(i): full for i, kind in enumerate(types) if kind == FULL}
    if (per_layer := hf.get("per_layer_config")) is not None:
        if old := [key for key in _OLD_HEADS if key in hf]:
            refuse(old[0], hf[old[0]], "per_layer_config without it, because both have the same meaning")
        overrides = {str(i): x for i, x in per_layer.items()}
        if unknown := sorted({key for x in overrides.values() for key in x} - {*usual}):
            refuse("per_layer_config", unknown[0], f"{' and '.join(usual)} for each layer")
    layers = [usual | overrides.get(str(i), {}) for i in range(len(types))]
    return {f"mixer.{ours}": [x[theirs] for x in layers] for theirs, ours in _HEADS.items()} | {
        "mixer.keys_as_values": [equal and x == FULL and y is None for x, y in zip(types, sources, strict=True)],
        "mixer.kv_layer": sources,
    }


def _write_heads(ours: Fields) -> Keys:
    sources, windows = ours["mixer.kv_layer"], ours["mixer.sliding_window"]
    layers = [{theirs: ours[f"mixer.{key}"][i] for theirs, key in _HEADS.items()} for i in range(len(sources))]
    usual = layers[next((i for i, window in enumerate(windows) if window is not None), 0)]
    by_layer = {str(i): x for i, x in enumerate(layers) if x != usual}
    keys = {"attention_k_eq_v": any(ours["mixer.keys_as_values"]), "per_layer_config": by_layer}
    return {**usual, **keys, "num_kv_shared_layers": sum(x is not None for x in sources)}


def _read_widths(hf: HfConfig) -> Fields:
    """Read the widths of MLPs, perhaps doubled in layers without their own keys, or of experts and shared expert."""
    width, sources = hf.get("intermediate_size", 9216), kv_sources(hf, _types(hf))
    double = flag(hf, "use_double_wide_mlp") and any(source is not None for source in sources)
    if not flag(hf, "enable_moe_block"):
        expect(hf, "num_experts", None, "null without enable_moe_block")
        return {"ffn.ffn_hidden_size": [width * 2 if double and x is not None else width for x in sources]}
    if double:
        refuse("use_double_wide_mlp", True, "false with enable_moe_block")
    experts = {f"moe.{ours}": hf.get(theirs) for ours, theirs in _EXPERTS.items()}
    return {**experts, "moe.shared_ffn_hidden_size": width, "moe.separate_norms": True}


def _write_widths(ours: Fields) -> Keys:
    widths = ours["ffn.ffn_hidden_size"]
    if ours["moe"] is None:
        wide = widths[-1] != widths[0]
        return {"intermediate_size": widths[0], "use_double_wide_mlp": wide, "enable_moe_block": False}
    experts = {theirs: ours[f"moe.{key}"] for key, theirs in _EXPERTS.items()}
    width = ours["moe.shared_ffn_hidden_size"] or ours["ffn_hidden_size"]
    return {**experts, "intermediate_size": width, "enable_moe_block": True}


def _check(hf: HfConfig) -> None:
    if (attention := hf.get("use_bidirectional_attention")) not in (None, "vision"):  # these only differ for images
        refuse("use_bidirectional_attention", attention, "null, vision")


def _read_per_layer(hf: HfConfig) -> Fields:
    """Read the per-layer embeddings. Their table must have the tokens of the main embedding."""
    width, rows = hf.get("hidden_size_per_layer_input", 256), hf.get("vocab_size_per_layer_input", 262_144)
    if width and rows != hf.get("vocab_size", 262_144):
        refuse("vocab_size_per_layer_input", rows, "vocab_size")
    return {"per_layer_embedding.width": width} if width else {}


def _write_per_layer(ours: Fields) -> Keys:
    values = (0,) if ours["per_layer_embedding"] is None else (ours["per_layer_embedding.width"], ours["vocab_size"])
    return dict(zip(_PER_LAYER, values, strict=False))


_NAMES = {
    "per_layer_embedding.word": "model.embed_tokens_per_layer",
    "per_layer_embedding.projection": "model.per_layer_model_projection",
    "per_layer_embedding.norm": "model.per_layer_projection_norm",
    **in_layers("model.layers.*", OUTPUT_NORMS, {
        "mlp_norm": "pre_feedforward_layernorm", "layer_scalar": "layer_scalar",
        **{f"mlp.shared.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
        **stacked_experts("experts"),
        "mlp.shared_norm": "pre_feedforward_layernorm", "mlp.experts_norm": "pre_feedforward_layernorm_2",
        "mlp.shared_output_norm": "post_feedforward_layernorm_1",
        "mlp.experts_output_norm": "post_feedforward_layernorm_2", "mlp.router": "router.proj",
        "mlp.router.scale": "router.scale", "mlp.router.expert_scale": "router.per_expert_scale",
        "per_layer_gate": "per_layer_input_gate", "per_layer_projection": "per_layer_projection",
        "per_layer_norm": "post_per_layer_input_norm",
    }),
}  # fmt: skip


FAMILIES = (
    Family("gemma4_text", "Gemma4ForCausalLM", (
        *traits.RMSNORM_MODEL, traits.POSITIONS, traits.TIED, traits.NO_PADDING, EMBEDDING_MULTIPLIER,
        traits.activation("hidden_activation", "gelu_pytorch_tanh"),
        same(norm_eps=("rms_norm_eps", 1e-6), logit_softcap=ConfigKey("final_logit_softcapping", None, nullable=True)),
        always(norm_position="both", qk_norm=True, value_norm=True, attention_scale=1.0, layer_scalar=True),
        always(position_embedding="rope"),
        Trait(_PER_LAYER, _read_per_layer, _write_per_layer),
        windows(512, _types),
        Trait((*_HEADS, *_OLD_HEADS, "per_layer_config", "attention_k_eq_v", "num_kv_shared_layers"), _read_heads,
              _write_heads),
        ropes_of_types(_types, _ROPES),
        Trait(("intermediate_size", "use_double_wide_mlp", "enable_moe_block", *_EXPERTS.values()), _read_widths,
              _write_widths),
        only(attention_bias=False),
        check(_check, "use_bidirectional_attention"),
    ), TensorNames({**LLAMA, **_NAMES}), moe=None, rank=4,
        about="Gemma 4; `gemma4`, with images, is refused",
    ),
)  # fmt: skip
