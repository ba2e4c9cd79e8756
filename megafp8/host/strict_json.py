"""Strict JSON: a parser for files from others, of moderate depth, and values without NaN and infinities to write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Maximum nesting of arrays and objects. Code that reads them later may be recursive."""


def parse_json(content: bytes | str, constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of `content`, which is UTF-8 JSON.

    Raises ValueError if it is not valid JSON; NaN, infinities and numbers too large for a float are invalid, too.
    `constant` converts NaN and infinities for files that may have them.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        parsed = json.loads(text, parse_constant=constant or _refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"it is nested too deeply: more than {MAX_DEPTH} levels") from None
    level = [parsed] if isinstance(parsed, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            value
            for outer in level
            for value in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return parsed
    raise ValueError(f"it is nested too deeply: more than {MAX_DEPTH} levels")


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinities, which JSON does not have, replaced by text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(x) for key, x in value.items()}
    return [finite(x) for x in value] if isinstance(value, list | tuple) else value


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not valid JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
