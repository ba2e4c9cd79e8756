"""Matching of regular expressions from files of others, in bounded time.

Python's `re` backtracks: `(a+)+b` takes twice as long for each more `a` of the text. Here a pattern maps the set of
positions that a match has reached to the next one, so a quantifier costs at most the square of the text's length.
Whether there is a match is the same; there are no groups to return. Patterns of adapters are names, classes of
characters, alternatives and quantifiers; back references, assertions and flags are refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as sre_constants  # type: ignore[attr-defined]
    from re import _parser as sre_parse  # type: ignore[attr-defined]
else:
    import sre_constants
    import sre_parse

_LONGEST = 1000  # characters of a pattern and of a text
_MAX_NESTED = 2  # quantifiers
_REPEATS = (sre_constants.MAX_REPEAT, sre_constants.MIN_REPEAT)
_CATEGORIES = {
    sre_constants.CATEGORY_DIGIT: re.compile(r"\d"),
    sre_constants.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    sre_constants.CATEGORY_WORD: re.compile(r"\w"),
    sre_constants.CATEGORY_NOT_WORD: re.compile(r"\W"),
    sre_constants.CATEGORY_SPACE: re.compile(r"\s"),
    sre_constants.CATEGORY_NOT_SPACE: re.compile(r"\S"),
}


def matches(pattern: str, text: str, starts: Collection[int] = (0,)) -> bool:
    """Whether `text` matches from one of the positions `starts` to its end.

    Raises ValueError where `pattern` is none, or is not supported.
    """
    if max(len(pattern), len(text)) > _LONGEST:
        raise ValueError(f"a pattern or name of more than {_LONGEST} characters: {max(pattern, text, key=len)[:40]}...")
    try:
        parsed = sre_parse.parse(pattern)
        if parsed.state.flags & ~re.UNICODE.value:
            raise ValueError("flags are not supported")
        return len(text) in _advance(parsed, text, set(starts), 0)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"{pattern!r} cannot be matched: {error}") from None


def _advance(items: Any, text: str, reached: set[int], nested: int) -> set[int]:
    """The positions after `items`, a parsed pattern, from any of the positions `reached`."""
    for kind, value in items:
        if not reached:
            break
        if kind is sre_constants.SUBPATTERN and not value[1] and not value[2]:
            reached = _advance(value[3], text, reached, nested)
        elif kind is sre_constants.BRANCH:
            reached = set().union(*(_advance(option, text, reached, nested) for option in value[1]))
        elif kind in _REPEATS:
            reached = _repeat(value, text, reached, nested + 1)
        elif kind is sre_constants.AT:
            reached = reached & ({0} if value in _BEGINNINGS else {len(text)} if value in _ENDS else _refuse(value))
        else:
            reached = {at + 1 for at in reached if at < len(text) and _is_in(kind, value, text[at])}
    return reached


def _repeat(quantified: Any, text: str, reached: set[int], nested: int) -> set[int]:
    least, most, items = quantified
    if nested > _MAX_NESTED:
        raise ValueError(f"more than {_MAX_NESTED} quantifiers are nested")
    states = set(reached) if least == 0 else set()
    count = 0
    while reached and count < most:
        following = _advance(items, text, reached, nested)
        count = max(count + 1, least) if following == reached else count + 1
        new = following - states
        if count >= least:
            states |= following
            if not new:
                break
        reached = following
    return states


_BEGINNINGS = (sre_constants.AT_BEGINNING, sre_constants.AT_BEGINNING_STRING)
_ENDS = (sre_constants.AT_END, sre_constants.AT_END_STRING)


def _is_in(kind: Any, value: Any, character: str) -> bool:
    """Whether one character matches an item of a pattern that is of one character."""
    if kind is sre_constants.LITERAL:
        return ord(character) == value
    if kind is sre_constants.NOT_LITERAL:
        return ord(character) != value
    if kind is sre_constants.ANY:
        return character != "\n"
    if kind is sre_constants.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    if kind is sre_constants.CATEGORY:
        return _CATEGORIES[value].match(character) is not None
    if kind is sre_constants.IN:
        negated = value[0][0] is sre_constants.NEGATE
        return negated != any(_is_in(part[0], part[1], character) for part in value[negated:])
    return _refuse(kind)


def _refuse(kind: Any) -> Any:
    raise ValueError(f"{str(kind).lower()} is not supported")
