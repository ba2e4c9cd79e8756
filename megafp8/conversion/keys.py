"""Translate between a foreign config (Hugging Face's config.json, Megatron-LM's arguments) and flat keys (`flat`).

A trait covers some of the foreign keys: it reads them into our fields, and writes them. Most traits are tables that
work in both directions: `same` renames fields, `always` sets fields that the foreign config does not have, `only`
accepts a single value, and `unread` accepts every value. A few traits are functions that cover several keys at once
(`check`; rotary embedding, sliding windows). Fields of a section such as model.moe have names such as `moe.top_k`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megafp8.conversion.base import refuse

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of our model. When a foreign config is written, all fields with defaults resolved (`flat.flat_keys`)."""
Keys = dict[str, Any]
"""Keys to write to a foreign config."""
MOST_LAYERS = 10_000
REQUIRED: Any = object()


class Trait(NamedTuple):
    """Translation between foreign keys and our fields, for one property.

    Attributes:
        keys: Foreign keys that the trait covers.
        read: Returns our fields for a foreign config, or raises ValueError.
        write: Returns the foreign keys for our fields.
    """

    keys: tuple[str, ...]
    read: Callable[[HfConfig], Fields] = lambda hf: {}
    write: Callable[[Fields], Keys] = lambda ours: {}


class ConfigKey(NamedTuple):
    """Key of a foreign config.

    Attributes:
        name: Name of the key.
        default: Value of a missing key; `REQUIRED` if the key must be present.
        values: Our words by the foreign words, or None if values are the same in both configs.
        nullable: Whether null is accepted, and means None, although the default is not None.
    """

    name: str
    default: Any = REQUIRED
    values: Mapping[str, str] | None = None
    nullable: bool = False

    def read(self, hf: HfConfig) -> Any:
        """Return our value of the key in a foreign config. Raises ValueError if it is missing or not supported."""
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
        """Return the foreign key for our `value`. None is left out, unless it is written as null."""
        if self.values is not None:
            value = next((theirs for theirs, ours in self.values.items() if ours == value), next(iter(self.values)))
        return {} if value is None and not self.nullable else {self.name: value}


def in_section(section: str, fields: Mapping[str, Any]) -> Fields:
    """Return `fields` with the prefix of model.<section>; unchanged if `section` is empty."""
    return {f"{section}.{field}" if section else field: value for field, value in fields.items()}


def same(section: str = "", /, **fields: str | tuple[Any, ...]) -> Trait:
    """Return a trait that renames fields of `section`.

    `fields` maps each of our fields to the foreign key: its name, or the arguments of `ConfigKey`. If the model does
    not have this section, nothing is written.
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
    """Return a trait for fields of `section` that have the same value in a whole family and are not in config.json."""
    return Trait((), lambda hf: in_section(section, fields))


def expect(hf: HfConfig, key: str, value: Any, supported: str) -> None:
    """Raise ValueError, which states `supported`, if the key is present and has a value other than `value`."""
    if hf.get(key, value) != value:
        refuse(key, hf[key], supported)


def only(written: bool = True, why: str = "", **values: Any) -> Trait:
    """Return a trait for keys of which megafp8 supports a single value, which is also the default.

    Args:
        written: Whether to write the keys.
        why: Explanation for the error message.
        **values: Supported value of each key.
    """

    def read(hf: HfConfig) -> Fields:
        for key, value in values.items():
            expect(hf, key, value, f"{value!r}{why and ', '}{why}")
        return {}

    return Trait(tuple(values), read, lambda ours: values if written else {})


def unread(*keys: str, **written: Any) -> Trait:
    """Return a trait for keys that do not affect the model's results. `written` holds the values to write for some."""
    return Trait((*keys, *written), write=lambda ours: written)


def check(function: Callable[[HfConfig], object], *keys: str, **written: Callable[[Fields], Any]) -> Trait:
    """Return a trait for keys that `function` checks; it raises ValueError if it refuses them.

    `written` holds, for some of the keys, a function that returns the value to write.
    """

    def read(hf: HfConfig) -> Fields:
        function(hf)
        return {}

    return Trait((*keys, *written), read, lambda ours: {key: value(ours) for key, value in written.items()})


def aliases(**names: str) -> Trait:
    """Return a trait for second names of keys. `names` maps each second name to the first name.

    If both names are present, their values must agree, because transformers uses the second one.
    """

    def agree(hf: HfConfig) -> None:
        for key, first in names.items():
            expect(hf, key, hf.get(first), f"the value of {first} ({hf.get(first)!r}), which is the same key")

    return check(agree, *names)


def with_second_names(names: Mapping[str, str], *traits: Trait) -> tuple[Trait, ...]:
    """Return traits that also read second names of their keys. `names` maps each second name to the first name.

    If both names are present, their values must agree. First names are written.
    """

    def first_names(hf: HfConfig) -> HfConfig:
        aliases(**{second: first for second, first in names.items() if first in hf}).read(hf)
        return {names.get(key, key): value for key, value in hf.items()}

    def accepting(trait: Trait) -> Trait:
        seconds = tuple(second for second, first in names.items() if first in trait.keys)
        return trait._replace(keys=trait.keys + seconds, read=lambda hf: trait.read(first_names(hf)))

    return tuple(map(accepting, traits))


def either(field: str, key: str, other: str) -> Trait:
    """Return a trait for a field with two names, `key` and `other`, in transformers. `key` is written."""
    return with_second_names({other: key}, same(**{field: key}))[0]


def switch(field: str, key: str, on: Any = True, off: Any = False, *, default: bool = False) -> Trait:
    """Return a trait for a boolean key: true stands for the value `on` of a field, and false for `off`."""
    return Trait(
        (key,),
        lambda hf: {field: on if flag(hf, key, default) else off},
        lambda ours: {key: ours[field] == on},
    )


def flag(hf: HfConfig, key: str, default: bool = False) -> bool:
    """Return the value of a boolean key. Raises ValueError if it is not a boolean."""
    value = hf.get(key, default)
    if not isinstance(value, bool):
        refuse(key, value, "true, false")
    return value
