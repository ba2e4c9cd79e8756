"""Learning rate schedules: end points, slopes, values by hand, and invalid ones."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.optimizer.learning_rate import learning_rate

KINDS = ["cosine", "linear", "wsd", "constant"]


@st.composite
def schedules(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(KINDS))
    warmup, decay, stable = draw(st.integers(0, 50)), draw(st.integers(1, 200)), draw(st.integers(1, 200))
    peak = draw(st.floats(1e-6, 1.0))
    return {
        "kind": kind,
        "peak": peak,
        "minimum": peak * draw(st.floats(0.0, 1.0)),
        "warmup_steps": warmup,
        "total_steps": warmup + stable + decay,
        "decay_steps": decay if kind == "wsd" else 0,
    }


@given(schedules())
def test_end_points(s: dict[str, Any]) -> None:
    warmup, total, peak = s["warmup_steps"], s["total_steps"], s["peak"]
    if warmup:
        assert learning_rate(0, **s) == pytest.approx(peak / warmup, rel=1e-12)
        assert learning_rate(warmup - 1, **s) == peak
    assert learning_rate(warmup, **s) == pytest.approx(peak, rel=1e-12)
    for step in (total, total + 1, 10 * total):
        assert learning_rate(step, **s) == (peak if s["kind"] == "constant" else s["minimum"])
    if s["kind"] == "wsd":
        assert learning_rate(total - s["decay_steps"], **s) == pytest.approx(peak, rel=1e-12)


@given(schedules())
def test_up_then_down_in_small_steps(s: dict[str, Any]) -> None:
    """No step changes the rate by more than the steepest slope of its curve."""
    warmup, total, peak = s["warmup_steps"], s["total_steps"], s["peak"]
    rates = [learning_rate(step, **s) for step in range(total + 3)]
    slack = 1e-12 * peak
    assert all(0 <= rate <= peak + slack for rate in rates)
    assert all(b - a == pytest.approx(peak / warmup, rel=1e-6) for a, b in pairwise(rates[:warmup]))
    length = total - warmup
    steepest = {"cosine": math.pi / 2 / length, "linear": 1 / length, "constant": 0.0}
    limit = steepest[s["kind"]] if s["kind"] != "wsd" else math.sqrt(1 / s["decay_steps"])
    for a, b in pairwise(rates[warmup:]):
        assert -slack <= a - b <= (peak - s["minimum"]) * limit + slack


def test_values_by_hand() -> None:
    s: dict[str, Any] = {"peak": 1.0, "minimum": 0.2, "warmup_steps": 4, "total_steps": 12}
    assert [learning_rate(i, kind="linear", **s) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(8, kind="linear", **s) == pytest.approx(0.6)
    assert learning_rate(8, kind="cosine", **s) == pytest.approx(0.6)
    assert learning_rate(6, kind="cosine", **s) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))
    assert [learning_rate(i, kind="wsd", decay_steps=4, **s) for i in (5, 8, 9, 12)] == pytest.approx([1, 1, 0.6, 0.2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "step"}, "'step' is unknown"),
        ({"minimum": 2.0}, "minimum learning rate 2.0"),
        ({"warmup_steps": 11}, "exceed total_steps 10"),
        ({"kind": "wsd"}, "needs at least 1"),
        ({"kind": "wsd", "decay_steps": 9, "warmup_steps": 2}, "exceed total_steps 10"),
        ({"decay_steps": 3}, "no separate decay"),
        ({"total_steps": 0}, "at least 1"),
    ],
)
def test_invalid_schedules(change: dict[str, Any], message: str) -> None:
    s = {"kind": "cosine", "peak": 1.0, "minimum": 0.0, "warmup_steps": 0, "total_steps": 10} | change
    with pytest.raises(ValueError, match=message):
        learning_rate(0, **s)
