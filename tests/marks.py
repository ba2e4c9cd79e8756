"""Marks for cases of a table: `make test` runs some, `-m slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """`cases` for `parametrize`, all marked slow but those in `quick`. A tuple has one value for each parameter."""
    found = list(cases)
    assert all(case in found for case in quick), f"{quick} of {found}"
    return [case if case in quick else _slow(case) for case in found]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
