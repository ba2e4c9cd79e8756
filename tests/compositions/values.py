"""Random values of the keys of a config, drawn from the types of its sections.

Nothing here knows a key: a new key, kind of layer or recipe is drawn as soon as the schema has it. A value may break a
rule of the config; who draws it asks the config's checks (`draw`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megafp8.config.reader import members, takes_none
from megafp8.section import Quantity

NUMBERS = {
    Quantity.CHANNELS: (8, 12, 16, 24, 32, 48, 64, 96),
    Quantity.HEADS: (1, 2, 3, 4, 6, 8),
    Quantity.EXPERTS: (1, 2, 3, 4, 6, 8),
    Quantity.TOKENS: (4, 8, 16, 24, 32, 64),
    Quantity.CHOSEN: (1, 2, 3, 8),
    Quantity.STEPS: (0, 1, 2, 4, 8),
    Quantity.LAYER: (0, 1, 2, 3),
}
"""Integers by what they count. `megafp8.prove` makes them smaller, in proportion."""
INTEGERS = (0, 1, 2, 3, 4, 8)
"""Those that count something else."""
NAMES = ("a", "b", "c")
"""Items of lists and keys of mappings that are free text."""
NONE = 0.3
"""Probability of null, where a key takes it."""


class Type(NamedTuple):
    """A type without `Annotated`, and what that said: bounds, a quantity, examples."""

    bare: Any
    metadata: tuple[Any, ...]


def type_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Type:
    """`annotation` with all that is said about it."""
    found = [*metadata]
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        found += more
    return Type(annotation, tuple(_flat(found)))


def _flat(metadata: list[Any]) -> Iterator[Any]:
    for item in metadata:
        yield item
        if isinstance(item, FieldInfo):
            yield from item.metadata


def examples_of(type_: Type) -> list[Any]:
    """What the schema gives as examples."""
    given = [x.examples for x in type_.metadata if isinstance(x, FieldInfo) and x.examples]
    return given[0] if given else []


def value(random: Random, field: FieldInfo, given: Any = None) -> Any:
    """A value of a key as YAML has it; `given`: one that a small network trains with, if it is not the default."""
    near = field.default if given is None else given
    return _value(random, type_of(field.annotation, (field, *field.metadata)), near)


def _value(random: Random, type_: Type, near: Any = None) -> Any:
    """`near`: a value that numbers are around."""
    if takes_none(type_.bare) and random.random() < NONE:
        return None
    inner = [type_of(member, type_.metadata) for member in _members(type_.bare)]
    return _of_one(random, random.choice(inner), near)


def choices_of(annotation: Any) -> list[Any]:
    """Values and sections that a key chooses among: those of literals, truth values, and sections."""
    found = []
    for bare in (type_of(member).bare for member in _members(annotation)):
        if get_origin(bare) is Literal:
            found += get_args(bare)
        elif bare is bool:
            found += [True, False]
        elif isinstance(bare, type) and issubclass(bare, BaseModel):
            found.append(bare)
    return found


def _members(annotation: Any) -> list[Any]:
    """Members of a union with what is said about each; None left out."""
    if get_origin(annotation) is Literal or not members(annotation):
        return [annotation]
    if len(members(annotation)) == 1 and not get_args(annotation):
        return [annotation]
    if get_origin(annotation) in (list, tuple, dict):
        return [annotation]
    return [member for member in get_args(annotation) if member is not NoneType] or [annotation]


def _of_one(random: Random, type_: Type, near: Any) -> Any:
    bare, origin = type_.bare, get_origin(type_.bare)
    if examples := examples_of(type_):
        return random.choice(examples)
    if origin is Literal:
        return random.choice(get_args(bare))
    if origin is list:
        return [_value(random, type_of(get_args(bare)[0])) for _ in range(random.randint(1, 3))]
    if origin is tuple:
        return [_value(random, type_of(item)) for item in get_args(bare)]
    if origin is dict:
        key, inner = get_args(bare)
        names = examples_of(type_of(key)) or NAMES
        chosen = sorted(random.sample(names, random.randint(1, len(names))))
        return {name: _value(random, type_of(inner)) for name in chosen}
    if bare is bool:
        return random.random() < 0.5
    if bare is int:
        return random.choice(_integers(type_, near))
    if bare is float:
        return random.choice(_floats(type_, near))
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return section(random, bare)
    if len(_members(bare)) > 1:
        return _value(random, type_, near)
    assert bare is str, f"values of {bare} are not drawn"
    return random.choice(NAMES)


def section(random: Random, cls: type[BaseModel]) -> dict[str, Any]:
    """A section with the keys that it needs, and up to three others."""
    fields = drawable(cls)
    needed = [name for name, field in fields.items() if field.is_required() or name == "kind"]
    others = [name for name in fields if name not in needed]
    chosen = random.sample(others, random.randint(0, min(3, len(others))))
    return {name: value(random, fields[name]) for name in needed + chosen}


@cache
def drawable(cls: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The keys of a section that are more than free text."""
    return {name: field for name, field in cls.model_fields.items() if not _is_text(field)}


def _is_text(field: FieldInfo) -> bool:
    of = type_of(field.annotation, (field, *field.metadata))
    return members(of.bare) == [str] and not examples_of(of)


def _within(numbers: set[Any], metadata: tuple[Any, ...]) -> list[Any]:
    for bound in metadata:
        if isinstance(bound, Ge):
            numbers = {x for x in numbers if x >= bound.ge}
        elif isinstance(bound, Gt):
            numbers = {x for x in numbers if x > bound.gt}
        elif isinstance(bound, Le):
            numbers = {x for x in numbers if x <= bound.le}
        elif isinstance(bound, Lt):
            numbers = {x for x in numbers if x < bound.lt}
    return sorted(numbers)


def _integers(type_: Type, near: Any) -> list[int]:
    quantity = next((x for x in type_.metadata if isinstance(x, Quantity)), None)
    numbers = {*(INTEGERS if quantity is None else NUMBERS[quantity])}
    return _within(numbers | ({near} if type(near) is int else set()), type_.metadata)


def _floats(type_: Type, near: Any) -> list[float]:
    if isinstance(near, (int, float)) and near:
        return _within({near, near / 2, near * 1.5}, type_.metadata)
    return _within({0.0, 0.1, 0.5, 2.0}, type_.metadata)
