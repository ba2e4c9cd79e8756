"""Which cases of a table every change pays for. The rest are run with `-m slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """`cases` for `parametrize`, of which all but those in `quick` are marked slow. A tuple is a value a parameter."""
    found = list(cases)
    assert all(case in found for case in quick), f"{quick} of {found}"
    return [case if case in quick else _slow(case) for case in found]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
