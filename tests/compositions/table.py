"""What cases of random compositions had, how often, and what failed: a table in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, Literal, get_args, get_origin

from megafp8.config import Config, ConfigError
from megafp8.config.reader import members
from tests.compositions.draw import BASES, NOT_PROVEN, Composition, axes, keys


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """`lines`: of `python -m tests.compositions`."""
    count, failures, values, pairs = 0, Counter[str](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    ranks, checks, seconds, cpu = Counter[int](), Counter[str](), 0.0, 0.0
    for line in lines:
        composition = Composition(**line["composition"])
        count += 1
        ranks[composition.ranks] += 1
        failures[line["failure"]] += 1
        checks.update(name.split(",")[0] for name in line["rows"])
        seconds, cpu = seconds + line["seconds"], cpu + line["cpu_seconds"]
        try:
            config = composition.unchecked
        except ConfigError:  # the schema has changed since
            continue
        values.update({("config file", composition.base), *_choices(config.model_dump(mode="json"))})
        pairs.update(combinations(sorted(_axes(config, composition.ranks)), 2))
    failed = count - failures.pop("", 0)
    rows = [f"{count} cases, {failed} failed; {seconds:.0f} s, {cpu:.0f} CPU seconds of ranks", ""]
    rows += [f"- {number} × {failure}" for failure, number in failures.most_common()]
    rows += _table(("ranks", "cases"), sorted(ranks.items()))
    rows += _table(("check", "cases"), checks.most_common())
    rows += _table(("pair of axes", "cases"), [(" × ".join(pair), n) for pair, n in sorted(pairs.items())])
    by_key: dict[str, list[str]] = {}
    for (key, chosen), number in sorted(values.items()):
        by_key.setdefault(key, []).append(f"{chosen} {number}")
    rows += _table(("key", "values and how many cases have them"), [(k, ", ".join(v)) for k, v in by_key.items()])
    missing = [f"{key} {chosen}" for key, chosen in all_choices() if not values[key, chosen]]
    rows += ["", f"Values of choices that no case has: {', '.join(missing) or 'none'}"]
    return "\n".join(rows)


def _table(header: tuple[str, str], rows: Iterable[tuple[Any, Any]]) -> list[str]:
    return ["", f"| {header[0]} | {header[1]} |", "|:--|:--|", *(f"| {a} | {b} |" for a, b in rows)]


def _choices(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys that are drawn and whose values are words or truth values, with these."""
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in NOT_PROVEN:
            continue
        if name == "layer_kinds":
            for kind in value.values():
                yield from _choices({k: v for k, v in kind.items() if v is not None}, f"{prefix}layer_kinds.*.")
        elif isinstance(value, dict):
            yield from _choices(value, f"{path}.")
        elif isinstance(value, (bool, str)):
            yield path, str(value)


def _axes(config: Config, ranks: int) -> Iterator[str]:
    """Axes of the layout with more than one rank or stage, and the kinds of data parallelism."""
    p = config.parallel
    for key in axes():
        name = key.path.removeprefix("parallel.")
        if getattr(p, name) > 1:
            yield name
    if ranks > p.tensor * p.pipeline * p.context:
        yield "data"
    if p.zero:
        yield "zero 1"
    if p.fsdp:
        yield "fsdp"
    if config.fp8.recipe != "none":
        yield "fp8"


def all_choices() -> Iterator[tuple[str, str]]:
    """Values of the keys that are changed and have words or truth values."""
    yield from (("config file", name) for name in BASES)
    for key in keys():
        for member in members(key.field.annotation):
            if member is bool:
                yield from ((key.path, str(x)) for x in (False, True))
            elif get_origin(member) is Literal:
                yield from ((key.path, x) for x in get_args(member) if isinstance(x, str))
