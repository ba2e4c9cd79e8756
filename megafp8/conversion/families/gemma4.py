"""Gemma 4's language model."""

from collections.abc import Mapping
from typing import Any

from megafp8.conversion import hf_traits as traits
from megafp8.conversion.base import refuse
from megafp8.conversion.families import Family
from megafp8.conversion.families.gemma import EMBEDDING_MULTIPLIER
from megafp8.conversion.hf_layers import FULL, SLIDING, full_every, kv_sources, layer_types, windows
from megafp8.conversion.hf_names import LLAMA, OUTPUT_NORMS, TensorNames, in_layers
from megafp8.conversion.keys import Fields, HfConfig, Key, Keys, Trait, always, check, flag, only, same

_HEADS = {"head_dim": "head_dim", "num_key_value_heads": "num_query_groups"}
_PARTIAL = "partial_rotary_factor"
_OLD_HEADS = ("global_head_dim", "num_global_key_value_heads")
_PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_ROPES: Mapping[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", _PARTIAL: 0.25, "rope_theta": 1e6},
}


def _types(hf: HfConfig) -> list[str]:
    types = layer_types(hf)
    if types is None:
        return [*full_every(6)(hf)[:-1], FULL]
    if types[-1] != FULL:
        refuse("layer_types", types[-1], f"{FULL} for the last layer, as transformers takes it")
    return types


def _read_heads(hf: HfConfig) -> Fields:
    """Widths and numbers of heads: those of layers with a window, and others of the rest."""
    types, equal = _types(hf), flag(hf, "attention_k_eq_v")
    sources = kv_sources(hf, types)
    usual = {"head_dim": hf.get("head_dim", 256), "num_key_value_heads": hf.get("num_key_value_heads", 4)}
    of_full = {"head_dim": hf.get("global_head_dim", 512)}
    if equal and hf.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    overrides = {str(i): of_full for i, kind in enumerate(types) if kind == FULL}
    if (given := hf.get("per_layer_config")) is not None:
        if old := [key for key in _OLD_HEADS if key in hf]:
            refuse(old[0], hf[old[0]], "per_layer_config without it, which says the same")
        overrides = {str(i): x for i, x in given.items()}
        if unknown := sorted({key for x in overrides.values() for key in x} - {*usual}):
            refuse("per_layer_config", unknown[0], f"{' and '.join(usual)} of layers")
    layers = [usual | overrides.get(str(i), {}) for i in range(len(types))]
    return {f"mixer.{ours}": [x[theirs] for x in layers] for theirs, ours in _HEADS.items()} | {
        "mixer.keys_as_values": [equal and x == FULL and y is None for x, y in zip(types, sources, strict=True)],
        "mixer.kv_layer": sources,
    }


def _write_heads(ours: Fields) -> Keys:
    sources, of_windows = ours["mixer.kv_layer"], ours["mixer.sliding_window"]
    layers = [{theirs: ours[f"mixer.{key}"][i] for theirs, key in _HEADS.items()} for i in range(len(sources))]
    usual = layers[next((i for i, window in enumerate(of_windows) if window is not None), 0)]
    of_layers = {str(i): x for i, x in enumerate(layers) if x != usual}
    keys = {"attention_k_eq_v": any(ours["mixer.keys_as_values"]), "per_layer_config": of_layers}
    return {**usual, **keys, "num_kv_shared_layers": sum(x is not None for x in sources)}


def _read_ropes(hf: HfConfig) -> Fields:
    """Rotary embeddings by kind of layer."""
    ropes = hf.get("rope_parameters") or _ROPES
    of_layers = [_read_rope(kind, ropes.get(kind)) for kind in _types(hf)]
    return {f"mixer.{key}": [x[key] for x in of_layers] for key in of_layers[0]}


def _read_rope(kind: str, rope: Any) -> Fields:
    where, known = f"rope_parameters.{kind}", {"rope_type", "rope_theta", _PARTIAL}
    if not isinstance(rope, dict) or "rope_theta" not in rope or not rope.keys() <= known:
        refuse(where, rope, "a dictionary of rope_type, rope_theta and partial_rotary_factor")
    proportional, partial = rope.get("rope_type") == "proportional", rope.get(_PARTIAL, 1.0)
    if not proportional and (rope.get("rope_type", "default"), partial) != ("default", 1):
        refuse(where, rope, "rope_type default for whole heads, or proportional")
    return {"rope_theta": rope["rope_theta"], _PARTIAL: partial, "proportional_rope": proportional}


def _write_ropes(ours: Fields) -> Keys:
    ropes = dict(_ROPES)
    for i, window in enumerate(ours["mixer.sliding_window"]):
        rope = {"rope_type": "default", "rope_theta": ours["mixer.rope_theta"][i]}
        if ours["mixer.proportional_rope"][i]:
            rope |= {"rope_type": "proportional", _PARTIAL: ours[f"mixer.{_PARTIAL}"][i]}
        ropes[FULL if window is None else SLIDING] = rope
    return {"rope_parameters": ropes}


def _read_widths(hf: HfConfig) -> Fields:
    """MLPs of layers without keys of their own may be twice as wide."""
    width, double = hf.get("intermediate_size", 9216), flag(hf, "use_double_wide_mlp")
    return {
        "ffn.ffn_hidden_size": [width * 2 if double and x is not None else width for x in kv_sources(hf, _types(hf))]
    }


def _write_widths(ours: Fields) -> Keys:
    widths = ours["ffn.ffn_hidden_size"]
    return {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0]}


def _check(hf: HfConfig) -> None:
    if (attention := hf.get("use_bidirectional_attention")) not in (None, "vision"):  # which differ for images only
        refuse("use_bidirectional_attention", attention, "null, vision")


def _read_per_layer(hf: HfConfig) -> Fields:
    """Per-layer embeddings, whose table has the tokens of the other one."""
    width, rows = hf.get("hidden_size_per_layer_input", 256), hf.get("vocab_size_per_layer_input", 262_144)
    if width and rows != hf.get("vocab_size", 262_144):
        refuse("vocab_size_per_layer_input", rows, "vocab_size")
    return {"per_layer_embedding.width": width} if width else {}


def _write_per_layer(ours: Fields) -> Keys:
    width = 0 if ours["per_layer_embedding"] is None else ours["per_layer_embedding"].width
    return dict(zip(_PER_LAYER, (width, ours["vocab_size"]), strict=True))


_NAMES = {
    "per_layer_embedding.word": "model.embed_tokens_per_layer",
    "per_layer_embedding.projection": "model.per_layer_model_projection",
    "per_layer_embedding.norm": "model.per_layer_projection_norm",
    **in_layers("model.layers.*", OUTPUT_NORMS, {
        "mlp_norm": "pre_feedforward_layernorm", "layer_scalar": "layer_scalar",
        "per_layer_gate": "per_layer_input_gate", "per_layer_projection": "per_layer_projection",
        "per_layer_norm": "post_per_layer_input_norm",
    }),
}  # fmt: skip


FAMILIES = (
    Family("gemma4_text", "Gemma4ForCausalLM", (
        *traits.RMSNORM_MODEL, traits.POSITIONS, traits.TIED, traits.NO_PADDING, EMBEDDING_MULTIPLIER,
        traits.activation("hidden_activation", "gelu_pytorch_tanh"),
        same(norm_eps=("rms_norm_eps", 1e-6), logit_softcap=Key("final_logit_softcapping", None, nullable=True)),
        always(norm_position="both", qk_norm=True, value_norm=True, attention_scale=1.0, layer_scalar=True),
        always(position_embedding="rope"),
        Trait(_PER_LAYER, _read_per_layer, _write_per_layer),
        windows(512, _types),
        Trait((*_HEADS, *_OLD_HEADS, "per_layer_config", "attention_k_eq_v", "num_kv_shared_layers"), _read_heads,
              _write_heads),
        Trait(("rope_parameters",), _read_ropes, _write_ropes),
        Trait(("intermediate_size", "use_double_wide_mlp"), _read_widths, _write_widths),
        only(attention_bias=False, enable_moe_block=False),
        only(written=False, num_experts=None, top_k_experts=None, moe_intermediate_size=None),
        check(_check, "use_bidirectional_attention"),
    ), TensorNames({**LLAMA, **_NAMES}), rank=4),
)  # fmt: skip
