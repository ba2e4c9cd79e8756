"""Which cases of a table every change pays for. The rest are run with `-m slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """`cases` for `parametrize`, of which all but those in `quick` are marked slow."""
    found = list(cases)
    assert all(case in found for case in quick), f"{quick} of {found}"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in found]
