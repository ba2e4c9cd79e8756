"""Keys that choose a kind, such as `fp8.recipe`, and the removal of options that belong to a previously chosen kind.

Some options exist only for certain kinds. They are keys next to the choosing key, and are errors with any other kind.
When an override, a stage, or a file with a `base` changes an earlier choice, this module removes the options that were
given for the old kind and that the new kind does not have. Options that are given together with the new choice stay and
are checked like any others. `Section.options` declares which keys of a section choose; the `kind` of a layer part
chooses its section.
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
    """Option that was left out.

    `path` and `choice`: dotted paths of the option and of the key that chooses the kind. `value` and `chosen`: their
    values.
    """

    path: str
    value: Any
    choice: str
    chosen: Any


def leave_out_options(
    before: Mapping[str, Any], after: dict[str, Any], given: Mapping[str, Any], annotation: Any, path: str = ""
) -> Iterator[LeftOut]:
    """Delete from `after` the options that belong to kinds replaced by `given`, and yield each of them.

    Args:
        before: Tree of values before the change.
        after: `before`, updated with `given`. Changed in place.
        given: Tree of the changed values.
        annotation: Type of all three trees.
        path: Dotted path of the trees, with a trailing dot; empty at the top.
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
    """Return the section class of `values`; None for a mapping, or if no class has its `kind`."""
    several = len(members(annotation)) > 1 and "kind" in values
    return (
        section_of_kind(annotation, values["kind"]) if several else section_of(annotation)
    )  # the first one is the default


def type_of(annotation: Any, section: type[Section] | None, key: str) -> Any:
    """Return the type of `key` in a section, or of the values in a mapping."""
    if section is not None:
        return section.model_fields[key].annotation if key in section.model_fields else None
    inner = get_args(member_with(annotation, dict))
    return inner[-1] if inner else None


def _lost(
    old: type[Section], new: type[Section], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, set[str]]]:
    """Yield each choosing key that changed, with the options that its old value has and its new value lacks."""
    if old is not new:
        yield "kind", set(old.model_fields) - set(new.model_fields)
        return
    for choice in old.choices:
        one, other = (values.get(choice, old.model_fields[choice].default) for values in (before, after))
        if one != other and before.keys() - {choice}:
            yield choice, set(old.options(choice, before)) - set(old.options(choice, after))


def report(left_out: Sequence[LeftOut], config: Section, source: str) -> None:
    """Log the options left out of `source`, once per process.

    Options that have the same values in `config` are not logged.
    """
    by_choice: dict[tuple[str, str], list[str]] = {}
    tree = config.model_dump(mode="json") if left_out else {}
    for path, value, choice, chosen in left_out:
        if value != _at(tree, path):
            by_choice.setdefault((choice, str(chosen)), []).append(f"{path} = {value!r}")
    lines = (f"{choice} {chosen} has no {', '.join(options)}" for (choice, chosen), options in by_choice.items())
    if by_choice:
        _log(f"{source}: left out, because {'; '.join(lines)}")


def _at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


@cache
def _log(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # all ranks read the config, before a job's log is open
        logger.warning(line)
