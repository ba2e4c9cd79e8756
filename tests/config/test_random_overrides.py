"""Random overrides of every field: each is what a user means by it, or one ConfigError, and never a traceback."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from megafp8.config import Config, ConfigError, check_layout, load_config
from megafp8.config.reader import members, section_of, takes_none
from tests.config.test_config import write

TEXTS = [
    "off", "123", "1e3", "2024-01-01", "a: b", "yes", "1:30", "010", "[x", "@a", "ünï", "'q'", "null", "a b", "*", "-",
]  # fmt: skip
NUMBERS = [
    "0", "1", "-1", "2", "3", "64", "1e3", "1.5", "-0.5", "1e-5", "010", "1_000", "0x10", ".nan", ".inf", "1e300",
    "9e18", "1e400", "9" * 5000, "2.0",
]  # fmt: skip
FOREIGN = [
    "", "true", "off", "[]", "{}", "[1, 2]", "{a: 1}", "{a: 1, a: 2}", "[[[", "&a [*a]", "!!python/name:os.system ''",
    "!!binary aGk=", "nul", "ten", "{steps: 1}", "- a", "\t", "? x", "<<: 1", "\U0001f600",
]  # fmt: skip


def fields(section: type[BaseModel] = Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and type of every field, sections too."""
    for name, field in section.model_fields.items():
        yield f"{path}{name}", field.annotation
        inner = section_of(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from fields(inner, f"{path}{name}.")


def meant(text: str, annotation: Any) -> list[Any]:
    """Every value that a user can mean by `text` for a field of this type, found apart from the loader."""
    found: list[Any] = []
    if takes_none(annotation) and text in ("null", "~", ""):
        return [None]
    for member in members(annotation):
        if member is str:
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            found.append(text[1:-1] if quoted else text)
        elif get_origin(member) is Literal:
            found += [value for value in get_args(member) if str(value) == text]
            found += [value for value in get_args(member) if value == {"true": 1, "off": 0, "1e0": 1}.get(text)]
        elif member is bool:
            found += {"true": [True], "yes": [True], "1": [True], "off": [False], "0": [False]}.get(text, [])
        elif member in (int, float):
            with contextlib.suppress(ValueError, OverflowError):
                number = int(text, 16) if text.startswith("0x") else float(text.replace("_", ""))
                if math.isfinite(number) and (member is float or number == int(number)):
                    found.append(member(number))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_overrides(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), write(tmp_path)
    every = list(fields())
    assert len(every) > 100
    accepted = refused = 0
    for trial in range(2 * len(every)):
        key, annotation = every[trial % len(every)]
        literals = [str(v) for m in members(annotation) if get_origin(m) is Literal for v in get_args(m)]
        own = TEXTS if str in members(annotation) else [*NUMBERS, *literals]
        text = rng.choice(rng.choice([own, own, literals or own, TEXTS, NUMBERS, FOREIGN]))
        said = ""
        try:
            config = load_config(path, [f"{key}={text}"])
        except ConfigError as error:
            said = str(error)
        if said:
            refused += 1
            assert key.split(".")[0] in said, (key, text)
            assert len(said) < 4000
            for part in ("list[", "dict[", "constrained", "function-", "[key]", "Traceback"):
                assert part not in said.replace(text, ""), (key, text, said)
            continue
        accepted += 1
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, (str, bool, int, float, NoneType)):
            possible = [v for v in meant(text, annotation) if isinstance(v, bool) == isinstance(value, bool)]
            assert value in possible, (key, text, value)
        with contextlib.suppress(ConfigError):
            check_layout(config, 1)
    print(f"seed {seed}: {len(every)} fields, {accepted} accepted as meant, {refused} refused by one ConfigError")
    assert min(accepted, refused) > 50
