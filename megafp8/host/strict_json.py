"""Strict parser for JSON files from others: only plain JSON of moderate depth is accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not valid JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
