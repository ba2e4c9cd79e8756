"""Keys of a config of others <-> flat keys of a model (`flat`): Hugging Face's config.json, Megatron-LM's arguments.

A trait covers some of their keys: it reads them into fields of ours, and writes them. Most are tables that are read in
both directions: `same` renames fields, `always` sets what their config does not say, `only` accepts one value, `unread`
accepts all. A few are functions that cover several keys at once (`check`; rotary embedding, sliding windows). Fields of
a section such as model.moe are called `moe.top_k`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megafp8.conversion.base import refuse

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of a model; where they are written all of them, with defaults resolved: `flat.flat_keys`."""
Keys = dict[str, Any]
"""Keys of theirs that are written."""
MOST_LAYERS = 10_000
REQUIRED: Any = object()


class Trait(NamedTuple):
    """One property of a family: all its `keys` to fields of ours (raises ValueError), and back."""

    keys: tuple[str, ...]
    read: Callable[[HfConfig], Fields] = lambda hf: {}
    write: Callable[[Fields], Keys] = lambda ours: {}


class ConfigKey(NamedTuple):
    """A key of theirs. `values`: their words to ours; `nullable`: null is None, though the default is not."""

    name: str
    default: Any = REQUIRED
    values: Mapping[str, str] | None = None
    nullable: bool = False

    def read(self, hf: HfConfig) -> Any:
        value = hf.get(self.name, self.default)
        if value is REQUIRED:
            raise ValueError(f"has no key {self.name}")
        if value is None and self.default is not None and not self.nullable:
            refuse(self.name, value, ", ".join(self.values) if self.values else "a value that is not null")
        if self.values is None:
            return value
        if not isinstance(value, str) or value not in self.values:
            refuse(self.name, value, ", ".join(self.values))
        return self.values[value]

    def write(self, value: Any) -> Keys:
        if self.values is not None:
            value = next((theirs for theirs, ours in self.values.items() if ours == value), next(iter(self.values)))
        return {} if value is None and not self.nullable else {self.name: value}


def in_section(section: str, fields: Mapping[str, Any]) -> Fields:
    """`fields` of model.<section>, or of the model where that is empty."""
    return {f"{section}.{field}" if section else field: value for field, value in fields.items()}


def same(section: str = "", /, **fields: str | tuple[Any, ...]) -> Trait:
    """Fields of ours, of `section`, and the key of theirs that each is: its name, or the arguments of `ConfigKey`.

    Of a model without that section nothing is written.
    """
    named = {field: ConfigKey(key) if isinstance(key, str) else ConfigKey(*key) for field, key in fields.items()}
    table = in_section(section, named)
    return Trait(
        tuple(key.name for key in table.values()),
        lambda hf: {field: key.read(hf) for field, key in table.items()},
        lambda ours: {
            name: x
            for field, key in (table.items() if ours.get(section, section) is not None else ())
            for name, x in key.write(ours[field]).items()
        },
    )


def always(section: str = "", /, **fields: Any) -> Trait:
    """Fields of ours, of `section`, that are the same in the whole family, and not in config.json."""
    return Trait((), lambda hf: in_section(section, fields))


def expect(hf: HfConfig, key: str, value: Any, supported: str) -> None:
    """Raise ValueError, which says what is `supported`, where the key is there and has another value."""
    if hf.get(key, value) != value:
        refuse(key, hf[key], supported)


def only(written: bool = True, why: str = "", **values: Any) -> Trait:
    """Keys of which megafp8 supports one value, which is their default too, and `why`.

    `written`: stated in what we write.
    """

    def read(hf: HfConfig) -> Fields:
        for key, value in values.items():
            expect(hf, key, value, f"{value!r}{why and ', '}{why}")
        return {}

    return Trait(tuple(values), read, lambda ours: values if written else {})


def unread(*keys: str, **written: Any) -> Trait:
    """Keys that do not change what the model computes, and values that are written for some."""
    return Trait((*keys, *written), write=lambda ours: written)


def check(function: Callable[[HfConfig], object], *keys: str, **written: Callable[[Fields], Any]) -> Trait:
    """Keys that `function` accepts or raises ValueError for, and what is written for some."""

    def read(hf: HfConfig) -> Fields:
        function(hf)
        return {}

    return Trait((*keys, *written), read, lambda ours: {key: value(ours) for key, value in written.items()})


def aliases(**names: str) -> Trait:
    """Second names of keys, which transformers uses instead of these where both are there: they must agree."""

    def agree(hf: HfConfig) -> None:
        for key, first in names.items():
            expect(hf, key, hf.get(first), f"the value of {first} ({hf.get(first)!r}), of which it is another name")

    return check(agree, *names)


def either(field: str, key: str, other: str) -> Trait:
    """Our `field` under either name, which transformers takes for the same; `key` is what we write."""

    def read(hf: HfConfig) -> Fields:
        present = [name for name in (key, other) if name in hf]
        if not present:
            raise ValueError(f"has no key {key}")
        if hf[present[0]] != hf[present[-1]]:
            refuse(other, hf[other], f"the value of {key} ({hf[key]!r}), of which it is another name")
        return {field: hf[present[0]]}

    return Trait((key, other), read, lambda ours: {key: ours[field]})


def flag(hf: HfConfig, key: str, default: bool = False) -> bool:
    """The value of a boolean key."""
    value = hf.get(key, default)
    if not isinstance(value, bool):
        refuse(key, value, "true, false")
    return value
