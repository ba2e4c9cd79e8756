"""Gemma 4's language model."""

from collections.abc import Mapping
from typing import Any

from megafp8.conversion import hf_traits as traits
from megafp8.conversion.base import refuse
from megafp8.conversion.families import Family
from megafp8.conversion.families.gemma import EMBEDDING_MULTIPLIER
from megafp8.conversion.hf_layers import FULL, SLIDING, full_every, layer_types, windows
from megafp8.conversion.hf_names import LLAMA, OUTPUT_NORMS, TensorNames, in_layers
from megafp8.conversion.keys import Fields, HfConfig, Key, Keys, Trait, always, check, flag, only, same

_HEADS = {"head_dim": "mixer.head_dim", "num_key_value_heads": "mixer.num_query_groups"}
_OLD_HEADS = ("global_head_dim", "num_global_key_value_heads")
_PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_ROPES: Mapping[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}


def _types(hf: HfConfig) -> list[str]:
    types = layer_types(hf)
    if types is None:
        return [*full_every(6)(hf)[:-1], FULL]
    if types[-1] != FULL:
        refuse("layer_types", types[-1], f"{FULL} for the last layer, as transformers takes it")
    return types


def _sources(hf: HfConfig) -> list[int | None]:
    """The layer whose keys and values each layer reads: the last one of its kind that has its own."""
    types, shared = _types(hf), hf.get("num_kv_shared_layers", 0)
    own = types[: len(types) - shared] if isinstance(shared, int) and 0 <= shared < len(types) else []
    if {*own} != {*types}:
        refuse("num_kv_shared_layers", shared, "fewer layers, so that one of each of layer_types has its own keys")
    last = {kind: i for i, kind in enumerate(own)}
    return [None if i < len(own) else last[kind] for i, kind in enumerate(types)]


def _read_heads(hf: HfConfig) -> Fields:
    """Widths and numbers of heads: those of layers with a window, and others of the rest."""
    types, sources = _types(hf), _sources(hf)
    equal = flag(hf, "attention_k_eq_v")
    values = {"head_dim": hf.get("head_dim", 256), "num_key_value_heads": hf.get("num_key_value_heads", 4)}
    of_full = {"head_dim": hf.get("global_head_dim", 512)}
    if equal and hf.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    overrides = {str(i): of_full for i, kind in enumerate(types) if kind == FULL}
    if (given := hf.get("per_layer_config")) is not None:
        if old := [key for key in _OLD_HEADS if key in hf]:
            refuse(old[0], hf[old[0]], "per_layer_config without it, which says the same")
        overrides = {str(i): x for i, x in given.items()}
        if unknown := sorted({key for x in overrides.values() for key in x} - {*values}):
            refuse("per_layer_config", unknown[0], f"{' and '.join(values)} of layers")
    layers = [values | overrides.get(str(i), {}) for i in range(len(types))]
    return {
        **{ours: [x[theirs] for x in layers] for theirs, ours in _HEADS.items()},
        "mixer.keys_as_values": [equal and x == FULL and y is None for x, y in zip(types, sources, strict=True)],
        "mixer.kv_layer": sources,
    }


def _write_heads(ours: Fields) -> Keys:
    layers = [{theirs: ours[key][i] for theirs, key in _HEADS.items()} for i in range(len(ours["mixer.kv_layer"]))]
    windows = ours["mixer.sliding_window"]
    usual = layers[next((i for i, window in enumerate(windows) if window is not None), 0)]
    shared = sum(source is not None for source in ours["mixer.kv_layer"])
    of_layers = {str(i): x for i, x in enumerate(layers) if x != usual}
    keys = {"attention_k_eq_v": any(ours["mixer.keys_as_values"]), "num_kv_shared_layers": shared}
    return {**usual, "per_layer_config": of_layers, **keys}


def _read_ropes(hf: HfConfig) -> Fields:
    """Rotary embeddings by kind of layer."""
    ropes, types = hf.get("rope_parameters") or _ROPES, _types(hf)
    for kind in {*types}:
        rope = ropes.get(kind)
        known = isinstance(rope, dict) and rope.keys() <= _ROPE_KEYS and "rope_theta" in rope
        if not known or rope.get("rope_type") not in ("default", "proportional"):
            refuse(f"rope_parameters.{kind}", rope, "a rope_type, default or proportional, and rope_theta")
        if rope["rope_type"] == "default" and (rope.get("partial_rotary_factor", 1), rope.get("factor", 1)) != (1, 1):
            refuse(f"rope_parameters.{kind}", rope, "rope_type proportional for a part of a head, or a factor")
    return {
        "mixer.rope_theta": [ropes[kind]["rope_theta"] for kind in types],
        "mixer.partial_rotary_factor": [ropes[kind].get("partial_rotary_factor", 1.0) for kind in types],
        "mixer.rope_interpolation_factor": [ropes[kind].get("factor", 1.0) for kind in types],
        "mixer.proportional_rope": [ropes[kind]["rope_type"] == "proportional" for kind in types],
    }


def _write_ropes(ours: Fields) -> Keys:
    ropes = dict(_ROPES)
    for i, window in enumerate(ours["mixer.sliding_window"]):
        of = {key: ours[f"mixer.{key}"][i] for key in ("rope_theta", "partial_rotary_factor")}
        rope = {"rope_type": "default", "rope_theta": of["rope_theta"]}
        if ours["mixer.proportional_rope"][i]:
            factor = ours["mixer.rope_interpolation_factor"][i]
            rope = of | {"rope_type": "proportional"} | ({} if factor == 1 else {"factor": factor})
        ropes[FULL if window is None else SLIDING] = rope
    return {"rope_parameters": ropes}


def _read_widths(hf: HfConfig) -> Fields:
    """MLPs of layers without keys of their own may be twice as wide."""
    width, double = hf.get("intermediate_size", 9216), flag(hf, "use_double_wide_mlp")
    return {"ffn.ffn_hidden_size": [width * 2 if double and x is not None else width for x in _sources(hf)]}


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
