"""Learning rate schedules: end points, slopes, and values by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.optimizer.learning_rate import Schedule

KINDS = ["cosine", "linear", "wsd", "constant"]


@st.composite
def schedules(draw: Any) -> Schedule:
    kind = draw(st.sampled_from(KINDS))
    warmup, decay, stable = draw(st.integers(0, 50)), draw(st.integers(1, 200)), draw(st.integers(1, 200))
    peak = draw(st.floats(1e-6, 1.0))
    minimum, total = peak * draw(st.floats(0.0, 1.0)), warmup + stable + decay
    return Schedule(
        kind, peak=peak, minimum=minimum, warmup_steps=warmup, total_steps=total,
        decay_steps=decay if kind == "wsd" else 0,
    )  # fmt: skip


@given(schedules())
def test_end_points(s: Schedule) -> None:
    if s.warmup_steps:
        assert s.at(0) == pytest.approx(s.peak / s.warmup_steps, rel=1e-12)
        assert s.at(s.warmup_steps - 1) == s.peak
    assert s.at(s.warmup_steps) == pytest.approx(s.peak, rel=1e-12)
    for step in (s.total_steps, s.total_steps + 1, 10 * s.total_steps):
        assert s.at(step) == (s.peak if s.kind == "constant" else s.minimum)
    if s.kind == "wsd":
        assert s.at(s.total_steps - s.decay_steps) == pytest.approx(s.peak, rel=1e-12)


@given(schedules())
def test_up_then_down_in_small_steps(s: Schedule) -> None:
    """No step changes the rate by more than the steepest slope of its curve."""
    rates = [s.at(step) for step in range(s.total_steps + 3)]
    slack = 1e-12 * s.peak
    assert all(0 <= rate <= s.peak + slack for rate in rates)
    warmup = pairwise(rates[: s.warmup_steps])
    assert all(b - a == pytest.approx(s.peak / s.warmup_steps, rel=1e-6) for a, b in warmup)
    length = s.total_steps - s.warmup_steps
    steepest = {"cosine": math.pi / 2 / length, "linear": 1 / length, "constant": 0.0}
    limit = steepest[s.kind] if s.kind != "wsd" else math.sqrt(1 / s.decay_steps)
    for a, b in pairwise(rates[s.warmup_steps :]):
        assert -slack <= a - b <= (s.peak - s.minimum) * limit + slack


def test_values_by_hand() -> None:
    def schedule(kind: Any, decay_steps: int = 0) -> Schedule:
        return Schedule(kind, 1.0, 0.2, warmup_steps=4, total_steps=12, decay_steps=decay_steps)

    assert [schedule("linear").at(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule("linear").at(8) == pytest.approx(0.6)
    assert schedule("cosine").at(8) == pytest.approx(0.6)
    assert schedule("cosine").at(6) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))
    assert [schedule("wsd", 4).at(i) for i in (5, 8, 9, 12)] == pytest.approx([1, 1, 0.6, 0.2])


def test_a_schedule_that_begins_later() -> None:
    """Annealing to zero from step 8 on; and a decay that ended at 0.2, warmed up again from there and decayed."""
    anneal = Schedule("linear", 1.0, 0.0, 0, 12, first_step=8)
    assert [anneal.at(i) for i in (0, 8, 9, 11, 12)] == [1.0, 1.0, 0.75, 0.25, 0.0]
    again = Schedule(
        "wsd", peak=1.0, minimum=0.1, warmup_steps=4, total_steps=20, decay_steps=4, first_step=8, warmup_from=0.2
    )
    rates = [again.at(i) for i in (7, 8, 9, 11, 12, 16, 17, 20)]
    assert rates == pytest.approx([0.4, 0.4, 0.6, 1.0, 1.0, 1.0, 0.55, 0.1])
    constant = Schedule("constant", 1.0, 1.0, 2, 2, first_step=8)
    assert [constant.at(i) for i in (8, 9, 10, 100)] == [0.5, 1.0, 1.0, 1.0]
