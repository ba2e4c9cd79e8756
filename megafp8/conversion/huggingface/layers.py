"""Translate between lists in config.json, with a value for each layer, and layer kinds with a pattern.

A trait that reads keys of a layer's parts returns a list with the value for each layer. The list's name is the key with
the name of its part or "layer": {"mixer.sliding_window": [4096, None], "ffn.kind": ["mlp", "moe"]}. `pattern_of` turns
all these lists into layer kinds and a pattern. When a model is written, `flat.flat_keys` returns these lists for all
keys. So a family only defines the meaning of its lists, not kinds and patterns. `flat.flattened` replaces a pattern by
other keys if these can express it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.keys import MOST_LAYERS, Fields, HfConfig, Keys, Trait

FULL, SLIDING = "full_attention", "sliding_attention"
"""Usual values of layer_types."""
_MLP_TYPES = "mlp_layer_types"


def pattern_of(lists: Mapping[str, Sequence[Any]]) -> Fields:
    """Return `layer_kinds` and `pattern` for these lists.

    The names of the kinds consist of the kinds of parts if these distinguish the layers, otherwise of all values that
    differ.
    """
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
    """Return the word for a key in the name of a layer kind: the value if it is a word, otherwise the key if set."""
    if isinstance(value, str):
        return value if value != "none" else "" if key == "kind" else f"no-{key}"
    return "" if value is None or value is False else key


def _counted(names: Sequence[str]) -> Iterator[str]:
    """Yield one period of the repeating pattern `names`, with equal successive names as one name with a count."""
    period = next(n for n in range(1, len(names) + 1) if all(name == names[i % n] for i, name in enumerate(names)))
    start = 0
    for i in range(1, period + 1):
        if i == period or names[i] != names[start]:
            yield names[start] if i - start == 1 else f"{names[start]} * {i - start}"
            start = i


def num_layers(hf: HfConfig) -> int:
    """Return the number of layers. Raises ValueError if it is not a valid number."""
    layers = hf.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        refuse("num_hidden_layers", layers, f"numbers from 1 to {MOST_LAYERS:,}")
    return layers


def layer_list(hf: HfConfig, key: str, of: Sequence[Any], *, longer: bool = False) -> list[Any] | None:
    """Return the value of a key that is a list with an entry for each layer, or None if the key is missing.

    Raises ValueError for entries that are not in `of`. If `longer` is True, the list may have more entries, which are
    ignored.
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
    """Return the kind of each layer in layer_types, or None if the key is missing."""
    return layer_list(hf, "layer_types", of)


def windows(default: int | None, kinds: Callable[[HfConfig], list[str]], *keys: str) -> Trait:
    """Return a trait for a sliding window in some layers.

    Args:
        default: Default size of the window.
        kinds: Function that returns the kind of each layer if layer_types is missing.
        *keys: Keys that `kinds` reads.
    """

    def read(hf: HfConfig) -> Fields:
        window, types = hf.get("sliding_window", default), layer_types(hf) or kinds(hf)
        return {"mixer.sliding_window": [window if kind == SLIDING else None for kind in types]}

    def write(ours: Fields) -> Keys:
        by_layer = ours["mixer.sliding_window"]
        window = max((x for x in by_layer if x is not None), default=default)
        return {"sliding_window": window, "layer_types": [FULL if x is None else SLIDING for x in by_layer]}

    return Trait(("sliding_window", "layer_types", *keys), read, write)


def rotated_windows(default: int, kinds: Callable[[HfConfig], list[str]], *keys: str) -> Trait:
    """Return a trait like `windows` for a model in which only layers with a window have a rotary embedding."""
    trait = windows(default, kinds, *keys)

    def read(hf: HfConfig) -> Fields:
        fields = trait.read(hf)
        if hf.get("sliding_window", default) is None:
            refuse("sliding_window", None, "a number of tokens")
        positions = ["none" if window is None else "rope" for window in fields["mixer.sliding_window"]]
        return fields | {"mixer.position_embedding": positions}

    return Trait(trait.keys, read, trait.write)


def full_every(every: int, *keys: str) -> Callable[[HfConfig], list[str]]:
    """Return a function that returns layer kinds in which the last layer of each interval has full attention.

    The interval is `every`, or the value of the first of `keys` in the config.
    """

    def kinds(hf: HfConfig) -> list[str]:
        interval = hf.get(keys[0], every) if keys else every
        return [SLIDING if (i + 1) % interval else FULL for i in range(num_layers(hf))]

    return kinds


def kv_sources(hf: HfConfig, types: Sequence[str]) -> list[int | None]:
    """Return, for each layer, the layer whose keys and values it reads, or None if it computes its own.

    Each of the last num_kv_shared_layers layers reads from the last earlier layer of the same kind that has its own.
    """
    shared = hf.get("num_kv_shared_layers", 0)
    with_keys = types[: len(types) - shared] if isinstance(shared, int) and 0 <= shared < len(types) else []
    if {*with_keys} != {*types}:
        refuse("num_kv_shared_layers", shared, "fewer layers, so that a layer of each type has its own keys")
    last = {kind: i for i, kind in enumerate(with_keys)}
    return [None if i < len(with_keys) else last[kind] for i, kind in enumerate(types)]


def without_rotary(default_interval: int) -> Trait:
    """Return a trait for layers without rotary embedding.

    These layers have a 0 in no_rope_layers. By default, they are the last layer of each interval.
    """
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


def sparse_layers(dense: int, key: str | None, *, listed: bool = True) -> Trait:
    """Return a trait for which layers have experts (sparse) and which have an MLP (dense).

    Args:
        dense: Default number of dense layers, which are the first layers.
        key: Key for the number of dense layers, or None if the family has no such key.
        listed: Whether mlp_layer_types, if present, has the kind of each layer.
    """

    def read(hf: HfConfig) -> Fields:
        kinds = layer_list(hf, _MLP_TYPES, ("dense", "sparse")) if listed else None
        if kinds is None:
            first = dense if key is None else hf.get(key, dense)
            kinds = ["dense" if i < first else "sparse" for i in range(num_layers(hf))]
        return {"ffn.kind": ["mlp" if kind == "dense" else "moe" for kind in kinds]}

    def write(ours: Fields) -> Keys:
        kinds = ["sparse" if kind == "moe" else "dense" for kind in ours["ffn.kind"]]
        written: Keys = {} if key is None else {key: [*kinds, "sparse"].index("sparse")}
        return written | ({_MLP_TYPES: kinds} if listed else {})

    return Trait((*([] if key is None else [key]), *([_MLP_TYPES] if listed else [])), read, write)
