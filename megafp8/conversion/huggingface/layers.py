"""Layers that differ: lists of config.json with a value for each layer <-> kinds of layers and their pattern.

A trait that reads keys of a layer's parts gives a list with the value of each layer under the name of the key with its
part, or with "layer": {"mixer.sliding_window": [4096, None], "ffn.kind": ["mlp", "moe"]}. `pattern_of` makes kinds of
layers of all such lists. When a model is written, `flat.flat_keys` gives these lists of all keys. So a family says what
its lists mean, and nothing of kinds and patterns; `flat.flattened` turns patterns that other keys can say into these
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.keys import MOST_LAYERS, Fields, HfConfig, Keys, Trait

FULL, SLIDING = "full_attention", "sliding_attention"
"""The usual values of layer_types."""


def pattern_of(lists: Mapping[str, Sequence[Any]]) -> Fields:
    """`layer_kinds` and `pattern` of these lists, with names made of what differs, or of parts' kinds if they do."""
    layers = [*zip(*lists.values(), strict=True)]
    differing = [i for i, values in enumerate(lists.values()) if any(x != values[0] for x in values)]
    parts = [i for i in differing if [*lists][i].endswith(".kind")]
    if len({tuple(values[i] for i in parts) for values in layers}) == len({*map(repr, layers)}):
        differing = parts
    kinds: list[tuple[Any, ...]] = []
    names: list[str] = []
    for values in layers:
        if values not in kinds:
            kinds.append(values)
            words = [_word([*lists][i].partition(".")[2], values[i]) for i in differing]
            name = "-".join(filter(None, words)) or "other" if differing else "all"
            names.append(name if name not in names else f"{name}-{len(names)}")
    records: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, values in zip(names, kinds, strict=True):
        for field, value in zip(lists, values, strict=True):
            part, _, key = field.partition(".")
            if value is not None:
                (records[name] if part == "layer" else records[name].setdefault(part, {}))[key] = value
    return {"layer_kinds": records, "pattern": [*_counted([names[kinds.index(values)] for values in layers])]}


def _word(key: str, value: Any) -> str:
    """What a name of a kind says of a key: the value if it is a word, else that the key is there."""
    if isinstance(value, str):
        return value if value != "none" else "" if key == "kind" else f"no-{key}"
    return "" if value is None or value is False else key


def _counted(names: Sequence[str]) -> Iterator[str]:
    """The names, those that follow each other as one with a count; of a pattern that repeats, once."""
    period = next(n for n in range(1, len(names) + 1) if all(name == names[i % n] for i, name in enumerate(names)))
    start = 0
    for i in range(1, period + 1):
        if i == period or names[i] != names[start]:
            yield names[start] if i - start == 1 else f"{names[start]} * {i - start}"
            start = i


def num_layers(hf: HfConfig) -> int:
    """The number of layers. Raises ValueError where it is none."""
    layers = hf.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        refuse("num_hidden_layers", layers, "a number of layers")
    return layers


def layer_list(hf: HfConfig, key: str, of: Sequence[Any], *, longer: bool = False) -> list[Any] | None:
    """The value of a key with an entry `of` these for each layer; None where there is no such key.

    `longer`: more entries are ignored.
    """
    values, layers = hf.get(key), num_layers(hf)
    if values is None:
        return None
    if not isinstance(values, list) or not (len(values) == layers or (longer and len(values) > layers)):
        refuse(key, values, f"one entry for each of num_hidden_layers ({layers})")
    if any(x not in of for x in values[:layers]):
        refuse(key, sorted({*map(str, values[:layers])}), " and ".join(map(str, of)))
    return values[:layers]


def layer_types(hf: HfConfig, of: Sequence[str] = (FULL, SLIDING)) -> list[str] | None:
    """The kind of each layer; None where there is no such key."""
    return layer_list(hf, "layer_types", of)


def windows(default: int | None, kinds: Callable[[HfConfig], list[str]], *keys: str) -> Trait:
    """Layers with a sliding window, and some without, as layer_types says, and without it `kinds`, which reads `keys`.

    `default`: that of the window.
    """

    def read(hf: HfConfig) -> Fields:
        window, types = hf.get("sliding_window", default), layer_types(hf) or kinds(hf)
        return {"mixer.sliding_window": [window if kind == SLIDING else None for kind in types]}

    def write(ours: Fields) -> Keys:
        by_layer = ours["mixer.sliding_window"]
        window = max((x for x in by_layer if x is not None), default=default)
        return {"sliding_window": window, "layer_types": [FULL if x is None else SLIDING for x in by_layer]}

    return Trait(("sliding_window", "layer_types", *keys), read, write)


def full_every(every: int, *keys: str) -> Callable[[HfConfig], list[str]]:
    """Kinds of layers of which the last of each `every`, or of the number under the first of `keys`, is full."""

    def kinds(hf: HfConfig) -> list[str]:
        interval = hf.get(keys[0], every) if keys else every
        return [SLIDING if (i + 1) % interval else FULL for i in range(num_layers(hf))]

    return kinds


def kv_sources(hf: HfConfig, types: Sequence[str]) -> list[int | None]:
    """The layer whose keys and values each of the last num_kv_shared_layers reads: the last of its kind before them."""
    shared = hf.get("num_kv_shared_layers", 0)
    with_keys = types[: len(types) - shared] if isinstance(shared, int) and 0 <= shared < len(types) else []
    if {*with_keys} != {*types}:
        refuse("num_kv_shared_layers", shared, "fewer layers, so that one of each of layer_types has its own keys")
    last = {kind: i for i, kind in enumerate(with_keys)}
    return [None if i < len(with_keys) else last[kind] for i, kind in enumerate(types)]


def without_rotary(default_interval: int) -> Trait:
    """Layers without rotary embedding: those with a 0 in no_rope_layers, by default the last of each interval."""
    key, interval_key = "no_rope_layers", "no_rope_layer_interval"

    def read(hf: HfConfig) -> Fields:
        return {"mixer.position_embedding": ["rope" if x else "none" for x in rotates(hf)]}

    def rotates(hf: HfConfig) -> list[int]:
        if (flags := layer_list(hf, key, (0, 1), longer=True)) is not None:
            return flags
        interval = hf.get(interval_key, default_interval)
        return [int((i + 1) % interval != 0) for i in range(num_layers(hf))]

    return Trait(
        (key, interval_key), read, lambda ours: {key: [int(x == "rope") for x in ours["mixer.position_embedding"]]}
    )
