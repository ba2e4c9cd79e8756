"""Keys that choose a kind, such as `fp8.recipe`, and what happens to the options of the kind that was chosen before.

A kind often has options that others lack: they stand beside the key and are errors with another kind. So whatever
changes a choice that was made before it (an override, a stage, a file with a `base`) leaves out the options that were
given for the old kind and that the new one does not have. Options that are given together with the new choice stay, and
are checked like any others. A section says which of its keys choose (`Section.options`); the `kind` of a part of a
layer chooses its section.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args

from megafp8.config.reader import member_with, members, section_of, section_of_kind
from megafp8.section import Section

logger = logging.getLogger(__name__)


class LeftOut(NamedTuple):
    """An option that was left out: dotted paths of it and of the key that chooses, their values, and its section's."""

    path: str
    value: Any
    choice: str
    chosen: Any


def leave_out_options(
    before: Mapping[str, Any], after: dict[str, Any], given: Mapping[str, Any], annotation: Any, path: str = ""
) -> Iterator[LeftOut]:
    """Delete from `after` what `before` has for kinds that `given` replaced, and name it.

    `after`: `before` with the keys of `given`, a tree, in place of its own. `annotation`: the type of all three.
    """
    old, new = _section(annotation, before), _section(annotation, after)
    if old is not None and new is not None:
        for choice, lost in _lost(old, new, before, after):
            for key in sorted(lost & before.keys() & after.keys() - given.keys()):
                yield LeftOut(f"{path}{key}", after.pop(key), f"{path}{choice}", after.get(choice))
    for key, value in given.items():
        inner = before.get(key), after.get(key), value
        if all(isinstance(tree, dict) for tree in inner):
            yield from leave_out_options(*inner, type_of(annotation, new, key), f"{path}{key}.")  # type: ignore[arg-type]


def _section(annotation: Any, values: Mapping[str, Any]) -> type[Section] | None:
    """The section of `values`; None for a mapping, and where its `kind` is none of the type's."""
    several = len(members(annotation)) > 1 and "kind" in values
    return section_of_kind(annotation, values["kind"]) if several else section_of(annotation)  # the first by default


def type_of(annotation: Any, section: type[Section] | None, key: str) -> Any:
    """The type of `key` in a section, or of a value in a mapping."""
    if section is not None:
        return section.model_fields[key].annotation if key in section.model_fields else None
    inner = get_args(member_with(annotation, dict))
    return inner[-1] if inner else None


def _lost(
    old: type[Section], new: type[Section], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, set[str]]]:
    """By key that chooses: keys that its former value has and its present one has not."""
    if old is not new:
        yield "kind", set(old.model_fields) - set(new.model_fields)
        return
    for choice in old.choices:
        one, other = (values.get(choice, old.model_fields[choice].default) for values in (before, after))
        if one != other and before.keys() - {choice}:
            yield choice, set(old.options(choice, before)) - set(old.options(choice, after))


def report(left_out: Sequence[LeftOut], config: Section, source: str) -> None:
    """Log what `config` has otherwise for what was left out of `source`, once in a process."""
    by_choice: dict[tuple[str, str], list[str]] = {}
    tree = config.model_dump(mode="json") if left_out else {}
    for path, value, choice, chosen in left_out:
        if value != _at(tree, path):
            by_choice.setdefault((choice, str(chosen)), []).append(f"{path} = {value!r}")
    lines = (f"{choice} {chosen} has no {', '.join(options)}" for (choice, chosen), options in by_choice.items())
    if by_choice:
        _log(f"{source}: left out, as {'; '.join(lines)}")


def _at(tree: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


@cache
def _log(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # all ranks read the config, before a job's log is open
        logger.warning(line)
