"""Keys of rotary embeddings in config.json.

transformers 4 reads rope_theta and rope_scaling, and transformers 5 keeps everything in rope_parameters. Programs
differ in the copy that they read, so all copies must agree. We write the keys of transformers 4, which transformers 5
and other engines read, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megafp8.config import RopeScaling
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, expect
from megafp8.layers.attention.record import RotaryKeys

_DICTIONARIES = ("rope_scaling", "rope_parameters")
_PARTIAL, ORIGINAL_LENGTH = "partial_rotary_factor", "original_max_position_embeddings"
ROPE_KEYS = (*_DICTIONARIES, "rope_theta", _PARTIAL, ORIGINAL_LENGTH)
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (tuple(RopeScaling.model_fields), ()),
    "yarn": (("factor", ORIGINAL_LENGTH), _YARN),
    "longrope": (("short_factor", "long_factor", ORIGINAL_LENGTH), ("factor", "attention_factor")),
}
"""Supported values of rope_type, each with its required and its optional keys."""


def rope(default_theta: float, partial: float | None = None) -> Trait:
    """Return a trait for a rotary embedding that all layers share. The arguments are the defaults in transformers.

    `partial` is the default of partial_rotary_factor, or None if the family always rotates whole heads.
    """
    return Trait(
        ROPE_KEYS,
        lambda hf: read_rope(hf, default_theta, partial),
        lambda ours: write_rope(ours) | ({} if partial is None else {_PARTIAL: ours[_PARTIAL]}),
    )


def stated_rope(default_theta: float) -> Trait:
    """Return a trait like `rope` for a family in which config.json must have a dictionary."""

    def read(hf: HfConfig) -> Fields:
        if not any(hf.get(key) for key in _DICTIONARIES):
            refuse("rope_scaling", None, "a dictionary, because releases of transformers differ in its default")
        return read_rope(hf, default_theta)

    def write(ours: Fields) -> Keys:
        keys = write_rope(ours)
        plain = {"rope_type": "default", "rope_theta": ours["rope_theta"]}
        return keys if keys["rope_scaling"] else keys | {"rope_parameters": plain}

    return Trait(ROPE_KEYS, read, write)


def read_rope(hf: HfConfig, default_theta: float, partial: float | None = None) -> Fields:
    """Return the fields of one rotary embedding, after checking that all copies agree. See `rope` for the arguments."""
    present = [key for key in _DICTIONARIES if hf.get(key)]
    ropes = [_read_dictionary(key, hf[key], hf, default_theta) for key in present]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        refuse("rope_parameters", hf["rope_parameters"], "the same as rope_scaling, or only one of the two")
    factors = [x for source in (hf, *(hf[key] for key in present)) if (x := source.get(_PARTIAL)) is not None]
    if any(x != (factors[0] if partial is not None else 1) for x in factors):
        copy = "1.0" if partial is None else f"the value of its other copy ({factors[0]!r})"
        refuse(_PARTIAL, factors[-1], copy)
    fields = ropes[0] if ropes else {"rope_theta": hf.get("rope_theta", default_theta)}
    fields |= {} if partial is None else {_PARTIAL: factors[0] if factors else partial}
    return fields | {"position_embedding": "rope"}


def _read_dictionary(key: str, rope: Any, hf: HfConfig, default_theta: float) -> Fields:
    """Return the fields of one of the two dictionaries, compared with the keys at the top level of config.json."""
    if not isinstance(rope, dict):
        refuse(key, rope, "a dictionary, or null")
    if any(isinstance(value, dict) for value in rope.values()):
        refuse(key, rope, "one rotary embedding for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        same = "; dynamic equals default for up to max_position_embeddings tokens" if kind == "dynamic" else ""
        refuse(f"{key}.rope_type", kind, ", ".join(_ROPE_TYPES) + same)
    if rope.get("type", kind) != kind:
        refuse(f"{key}.type", rope["type"], f"the value of {key}.rope_type ({kind!r}), its new name")
    theta = rope.get("rope_theta", hf.get("rope_theta", default_theta))
    expect(hf, "rope_theta", theta, f"the value of {key}.rope_theta ({theta!r}), or no second copy")
    required, optional = _ROPE_TYPES[kind]
    if missing := [name for name in required if name not in rope]:
        raise ValueError(f"{key} has no key {missing[0]}")
    known = required + optional
    if unknown := sorted(rope.keys() - {*known, "rope_type", "type", "rope_theta", _PARTIAL}):
        supported = f"with rope_type {kind!r} only {', '.join(known) or 'none'}"
        refuse(f"{key}.{unknown[0]}", rope[unknown[0]], supported)
    if kind == "default":
        return {"rope_theta": theta}
    if kind == "linear":
        return {"rope_theta": theta, "rope_interpolation_factor": rope["factor"]}
    original = rope[ORIGINAL_LENGTH]
    copy = f"the value of {key}.{ORIGINAL_LENGTH} ({original!r}), or no second copy"
    expect(hf, ORIGINAL_LENGTH, original, copy)
    if kind == "yarn":
        return {"rope_theta": theta, "yarn": _read_yarn(key, rope)}
    if kind == "longrope":
        return {"rope_theta": theta, "longrope": _read_longrope(key, rope, hf)}
    return {"rope_theta": theta, "rope_scaling": {name: rope[name] for name in required}}


def _read_longrope(key: str, rope: Mapping[str, Any], hf: HfConfig) -> Fields:
    """Return the section model.longrope.

    transformers 4 computes the factor from two lengths. transformers 5 reads it from the key factor if present.
    """
    lengths = {"max_position_embeddings": hf.get("max_position_embeddings"), ORIGINAL_LENGTH: rope[ORIGINAL_LENGTH]}
    for name, length in lengths.items():
        if not isinstance(length, int) or length < 1:
            refuse(name, length, "a number of tokens, from which longrope computes its factor")
    if rope.get("attention_factor") is not None:
        refuse(f"{key}.attention_factor", rope["attention_factor"], "null, because it follows from the factor")
    longest, original = lengths.values()
    if rope.get("factor") not in (None, longest / original):
        refuse(f"{key}.factor", rope["factor"], f"max_position_embeddings / {ORIGINAL_LENGTH} ({longest / original})")
    return {name: rope[name] for name in _ROPE_TYPES["longrope"][0]} | {"factor": longest / original}


def _read_yarn(key: str, rope: Mapping[str, Any]) -> Fields:
    """Return the section model.yarn. Missing keys and null stand for the defaults."""
    required, optional = _ROPE_TYPES["yarn"]
    yarn = {name: rope[name] for name in required + optional if rope.get(name) is not None}
    if (factor := yarn.pop("attention_factor", None)) is not None:
        usual = 0.1 * math.log(yarn["factor"]) + 1
        if yarn.keys() & {"mscale", "mscale_all_dim"} or not math.isclose(factor, usual):
            refuse(f"{key}.attention_factor", factor, f"null or {usual}, or mscale and mscale_all_dim")
    if yarn.get("mscale", 1) != 1 and not yarn.get("mscale_all_dim"):
        refuse(f"{key}.mscale", yarn["mscale"], "1 without mscale_all_dim, because transformers then ignores it")
    if yarn.get("mscale_all_dim") and not yarn.get("mscale"):
        refuse(f"{key}.mscale", rope.get("mscale"), "a number with mscale_all_dim: programs differ in its default")
    return yarn


def write_rope(ours: Fields) -> Keys:
    """Return the foreign keys of one rotary embedding of whole heads."""
    scaling, lengths = None, {}
    if (longrope := ours["longrope"]) is not None:
        scaling = {"rope_type": "longrope", **longrope.model_dump(exclude={"factor"})}
        lengths = {"max_position_embeddings": longrope.extended_length, ORIGINAL_LENGTH: scaling[ORIGINAL_LENGTH]}
    elif (yarn := ours["yarn"]) is not None:
        unwritten = {"mscale", "mscale_all_dim"} if yarn.mscale == 1 and not yarn.mscale_all_dim else set()
        unwritten |= {"truncate"} if yarn.truncate else set()
        scaling = {"rope_type": "yarn", **yarn.model_dump(exclude=unwritten)}
    elif ours["rope_scaling"] is not None:
        scaling = {"rope_type": "llama3", **ours["rope_scaling"].model_dump()}
    elif ours["rope_interpolation_factor"] > 1:
        scaling = {"rope_type": "linear", "factor": ours["rope_interpolation_factor"]}
    return {"rope_theta": ours["rope_theta"], "rope_scaling": scaling, **lengths}


def rotary_fraction(rotated: int, width: int) -> float:
    """Return the partial_rotary_factor of heads of `width` channels, of which `rotated` are rotated."""
    fraction = rotated / width
    return fraction if int(width * fraction) == rotated else math.nextafter(fraction, 1)  # 49 · (2 / 49) < 2


def ropes_by_type(
    kinds: Callable[[HfConfig], list[str]], default_theta: float, local_key: str | None, *, nested: bool
) -> Trait:
    """Return a trait for two rotary embeddings: for layers with a sliding window, and for layers with full attention.

    In transformers 4, rope_theta and rope_scaling belong to layers with full attention, and `local_key` is the base for
    layers with a window. transformers 5 has two dictionaries in rope_parameters.

    Args:
        kinds: Function that returns the kind of each layer if layer_types is missing.
        default_theta: Default of rope_theta.
        local_key: Key of the base for layers with a window, or None if the family has no such key.
        nested: Whether to write the two dictionaries of transformers 5, too.
    """

    def read(hf: HfConfig) -> Fields:
        by_type = _read_two(hf, default_theta, local_key)
        types = layer_types(hf) or kinds(hf)
        keys = dict.fromkeys(key for fields in by_type.values() for key in fields)
        return {f"mixer.{key}": [by_type[kind].get(key) for kind in types] for key in keys}

    def write(ours: Fields) -> Keys:
        windows = ours["mixer.sliding_window"]
        if None in ours["mixer.rope_theta"]:
            return {}  # a model of another family
        full, local = (
            next((i for i, window in enumerate(windows) if (window is None) == is_full), 0) for is_full in (True, False)
        )
        full_rope, windowed_rope = (
            {key: ours[f"mixer.{key}"][layer] for key in RotaryKeys.model_fields} for layer in (full, local)
        )
        written = write_rope(full_rope) | ({} if local_key is None else {local_key: windowed_rope["rope_theta"]})
        if nested:
            plain = {"rope_type": "default"}
            scaling, theta = written["rope_scaling"] or plain, {"rope_theta": full_rope["rope_theta"]}
            local_rope = plain | {"rope_theta": windowed_rope["rope_theta"]}
            written["rope_parameters"] = {FULL: scaling | theta, SLIDING: local_rope}
        return written

    return Trait((*ROPE_KEYS, *([] if local_key is None else [local_key])), read, write)


def _read_two(hf: HfConfig, default_theta: float, local_key: str | None) -> dict[str, Fields]:
    """Return the fields of the rotary embedding of each kind of layer."""
    nested = hf.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not nested.keys() <= {FULL, SLIDING}:
        refuse("rope_parameters", nested, f"a dictionary with the keys {SLIDING} and {FULL}")
    fields = read_rope({**hf, "rope_parameters": nested.get(FULL)}, default_theta)
    sliding = nested.get(SLIDING, {})
    if local_key is not None:
        local_theta = hf.get(local_key, 1e4)
    else:
        local_theta = hf.get("rope_theta", default_theta)
        if local_theta != default_theta and "rope_theta" not in sliding:
            known = (
                f"{default_theta:g}, or rope_parameters.{SLIDING}, because releases of transformers differ in its base"
            )
            refuse("rope_theta", local_theta, known)
    local = _read_dictionary(f"rope_parameters.{SLIDING}", sliding, {}, local_theta)
    if local.keys() != {"rope_theta"}:
        refuse("rope_parameters", nested, "no scaling of layers with a window")
    if local_key is not None:
        theta = local["rope_theta"]
        expect(hf, local_key, theta, f"the value in rope_parameters ({theta!r}), or no second copy")
    del fields["position_embedding"]
    return {FULL: fields, SLIDING: local}


def ropes_of_types(
    kinds: Callable[[HfConfig], list[str]], default: Mapping[str, Mapping[str, Any]], partial: float | None = None
) -> Trait:
    """Return a trait for rope_parameters with a rotary embedding of any rope_type for each kind of attention layer.

    Args:
        kinds: Function that returns the kind of each layer. Kinds other than full and sliding attention have no rotary
            embedding.
        default: Default of rope_parameters.
        partial: Default of partial_rotary_factor in each of them, as in `rope`.
    """

    def read(hf: HfConfig) -> Fields:
        ropes = hf.get("rope_parameters") or default
        by_layer = [
            _read_of_type(kind, ropes.get(kind), partial) if kind in (FULL, SLIDING) else {} for kind in kinds(hf)
        ]
        keys = dict.fromkeys(key for fields in by_layer for key in fields)
        return {f"mixer.{key}": [fields.get(key) for fields in by_layer] for key in keys}

    def write(ours: Fields) -> Keys:
        ropes = dict(default)
        for i, window in enumerate(ours["mixer.sliding_window"]):
            if ours["mixer.rope_theta"][i] is not None:
                fields = {key: ours[f"mixer.{key}"][i] for key in RotaryKeys.model_fields}
                ropes[FULL if window is None else SLIDING] = _write_of_type(fields, partial)
        return {"rope_parameters": ropes}

    return Trait(("rope_parameters",), read, write)


def _read_of_type(kind: str, rope: Any, partial: float | None) -> Fields:
    where = f"rope_parameters.{kind}"
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        refuse(where, rope, "a dictionary with rope_type and rope_theta")
    if rope.get("rope_type") != "proportional":
        fields = read_rope({"rope_parameters": dict(rope)}, rope["rope_theta"], partial)
        return {key: value for key, value in fields.items() if key != "position_embedding"}
    if not rope.keys() <= {"rope_type", "rope_theta", _PARTIAL}:
        refuse(where, rope, "only rope_theta and partial_rotary_factor with rope_type 'proportional'")
    return {"rope_theta": rope["rope_theta"], _PARTIAL: rope.get(_PARTIAL, 1.0), "proportional_rope": True}


def _write_of_type(fields: Fields, partial: float | None) -> Keys:
    theta = {"rope_theta": fields["rope_theta"]}
    if fields["proportional_rope"]:
        return {"rope_type": "proportional", **theta, _PARTIAL: fields[_PARTIAL]}
    fraction = {} if partial is None else {_PARTIAL: fields[_PARTIAL]}
    return (write_rope(fields)["rope_scaling"] or {"rope_type": "default"}) | theta | fraction
