"""Recipes refuse values that mean nothing, and say what would."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.fp8 import E4M3, E5M2, CurrentScaling, DelayedScaling


def test_defaults_are_the_specified_ones() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.amax_history_len, recipe.amax_compute_algo) == (0, 1, 1024, "max")
    assert recipe.use_fast_accum == (True, False, False)
    assert recipe.override_linear_precision == (False, False, False)


def test_formats() -> None:
    assert (DelayedScaling().forward_format, DelayedScaling().gradient_format) == (E4M3, E5M2)
    recipe = CurrentScaling(fp8_format="e4m3")
    assert (recipe.forward_format, recipe.gradient_format) == (E4M3, E4M3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8_format": "e5m2"}, "fp8_format is 'e5m2'; it must be 'hybrid' or 'e4m3'"),
        ({"interval": 0}, "interval is 0; it must be at least 1"),
        ({"amax_history_len": 0}, "amax_history_len is 0"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo is 'mean'; it must be 'max', 'most_recent' or"),
        ({"use_fast_accum": (True, False)}, "three booleans"),
        ({"override_linear_precision": (0, 0, "no")}, "three booleans"),
    ],
)
def test_delayed_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**options)


def test_current_refuses() -> None:
    with pytest.raises(ValueError, match=r"CurrentScaling: amax_epsilon is -1.0; it must be 0 or more"):
        CurrentScaling(amax_epsilon=-1.0)
