"""Statistics of the cost of watching: a known difference is found within its interval, and chance is none."""

from __future__ import annotations

import random

import pytest

from benchmarks.bench_watching import confidence, difference
from tests.marks import slow_but


@pytest.mark.parametrize("added", slow_but([0.0, 0.01, 0.2]))
def test_a_known_difference_is_found(added: float) -> None:
    noise = random.Random(1)
    without = [100 + noise.expovariate(0.2) for _ in range(4000)]
    with_ = [(1 + added) * (100 + noise.expovariate(0.2)) for _ in range(4000)]
    low, high = confidence(with_, without)
    assert low < added < high < low + 0.005
    assert difference(with_, without) == pytest.approx(added, abs=0.002)
