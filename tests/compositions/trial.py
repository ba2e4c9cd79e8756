"""A composition, proven, and the smallest one that fails alike."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from megafp8.config import ConfigError
from megafp8.prove.local_ranks import LocalRanks
from megafp8.prove.proof import checks
from megafp8.prove.runs import Context
from tests.compositions.draw import Composition

TIMEOUT = 60.0
"""Seconds of a run of the ranks."""
PASSED = ""
"""Failure of a trial without one."""


@dataclass(frozen=True)
class Trial:
    """What came of a composition. `failure`: the check that failed, and how; empty if none did. `rows`: by check, the
    largest difference, or the status of a check that compares nothing."""

    composition: Composition
    failure: str
    where: str
    rows: Mapping[str, float | str]
    seconds: float
    cpu_seconds: float


def trial(composition: Composition, ranks: LocalRanks, *, whole: bool, around: Context = nullcontext) -> Trial:
    """Prove a composition; `whole`: with checkpoints and export. `around`: as in `proof.checks`."""
    begin, cpu, rows = time.monotonic(), ranks.cpu_seconds, dict[str, float | str]()
    failure, where = PASSED, ""
    try:
        found = checks(
            composition.config, composition.ranks, local_ranks=ranks, timeout=TIMEOUT, around=around, checkpoints=whole
        )
        for row in found:
            rows[row.check] = row.status if row.difference is None else row.difference
            if not row.passed:
                failure, where = f"{row.check}: {row.status}", f"{row.where}\n{row.details}".strip()
                break
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        failure, where = f"{type(error).__name__} in {lines[-3].strip()}", "\n".join(lines[-12:])
    return Trial(composition, failure, where, rows, time.monotonic() - begin, ranks.cpu_seconds - cpu)


def smallest(
    composition: Composition, fails: Callable[[Composition], bool], most: int = 80, seconds: float = 300.0
) -> Composition:
    """A composition of as few keys, items and ranks as are found for which `fails` still holds, in `most` trials and
    about so many `seconds`."""
    tried, end = 0, time.monotonic() + seconds
    again = True
    while again:
        again = False
        for smaller in _smaller(composition):
            try:
                _ = smaller.config
            except ConfigError:
                continue
            tried += 1
            if fails(smaller):
                composition, again = smaller, True
                break
            if tried >= most or time.monotonic() > end:
                return composition
    return composition


def _smaller(composition: Composition) -> Iterator[Composition]:
    """Compositions without some of the keys, many first; on fewer ranks; with simpler values."""
    paths = [*composition.overrides]
    size = len(paths) // 2
    while size:
        for begin in range(0, len(paths), size):
            kept = {p: v for p, v in composition.overrides.items() if p not in paths[begin : begin + size]}
            yield replace(composition, overrides=kept)
        size //= 2
    for ranks in range(1, composition.ranks):
        yield replace(composition, ranks=ranks)
    for path, value in composition.overrides.items():
        for simpler in _simpler(value):
            yield replace(composition, overrides={**composition.overrides, path: simpler})


def _simpler(value: Any) -> Iterator[Any]:
    """`value` without one of its keys or items, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "kind":
                yield {key: x for key, x in value.items() if key != name}
                for simpler in _simpler(inner):
                    yield {**value, name: simpler}
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield value[:i] + value[i + 1 :]
            for simpler in _simpler(inner):
                yield [*value[:i], simpler, *value[i + 1 :]]
