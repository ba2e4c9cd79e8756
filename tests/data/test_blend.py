"""Blends: each data set's samples in order, none lost, and in proportion to the weights."""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.data.blend import BLOCK, Blend, Segment


def mixed(sets: Any, weights: list[float], seed: int) -> Blend:
    """The blend of a new run."""
    return Blend(sets, Segment.fresh(weights, seed))


class Numbers:
    """A stub data set: sample i is (name, i)."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __getitem__(self, index: int) -> Any:
        return np.array([self.name, index])


@settings(max_examples=25)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), seed=st.integers(-5, 2**40))
def test_each_sample_once_in_order_and_by_weight(weights: list[float], seed: int) -> None:
    blend = mixed([Numbers(k) for k in range(len(weights))], weights, seed)
    given_out: dict[int, list[int]] = defaultdict(list)
    for i in range(2 * BLOCK + 100):
        source, index = blend.segment.locate(i)
        given_out[source].append(index)
        assert blend[i].tolist() == [source, index]
    for source, indices in given_out.items():
        assert indices == list(range(len(indices)))
        in_blocks = sum(blend.segment.locate(i)[0] == source for i in range(2 * BLOCK))
        share = weights[source] / sum(weights)  # rounding each count moves n by half a sample for each data set
        assert abs(in_blocks - 2 * BLOCK * share) <= 0.5 + share * len(weights) / 2 + 1e-6


def test_order_depends_on_the_seed_alone() -> None:
    sets: Any = [Numbers(0), Numbers(1)]
    order = [mixed(sets, [1, 2], 7).segment.locate(i) for i in range(300)]
    assert [mixed(sets, [1, 2], 7).segment.locate(i) for i in reversed(range(300))] == order[::-1]
    assert [mixed(sets, [1, 2], 8).segment.locate(i) for i in range(300)] != order
    assert [pickle.loads(pickle.dumps(mixed(sets, [1, 2], 7))).segment.locate(i) for i in range(300)] == order
    sources = [source for source, _ in order]
    assert max(len(run) for run in "".join(map(str, sources)).split("0")) < 30, "not mixed within the block"


@pytest.mark.parametrize(
    ("weights", "seed", "digest"),
    [
        ([1.0, 2.0], 7, "71b00f6fc314d73c"),
        ([0.6, 0.0005, 0.0005, 0.3989], 1234, "8cd9ab2184d935af"),
        ([3.7, 1.1, 12.9], -3, "11cd36adbbc6e65a"),
    ],
)
def test_the_order_of_fresh_runs_is_that_of_earlier_versions(weights: list[float], seed: int, digest: str) -> None:
    """Digests of the first 5,000 samples, taken from version 0.1 before blends had segments."""
    segment = Segment.fresh(weights, seed)
    order = repr([segment.locate(i) for i in range(5000)])
    assert hashlib.sha256(order.encode()).hexdigest()[:16] == digest


def test_a_later_segment_continues_the_counts() -> None:
    """The same blend from global sample 777 on, each data set from what it has given before."""
    fresh, later = Segment.fresh([2, 1, 5], 3), Segment((2, 1, 5), 3, 777, (10, 0, 99))
    counts = [10, 0, 99]
    for i in range(2 * BLOCK + 5):
        assert later.given(777 + i) == counts
        source, number = later.locate(777 + i)
        assert (source, number) == (fresh.locate(i)[0], counts[source])
        counts[source] += 1


def test_very_small_weights() -> None:
    weights = [0.6, 0.0005, 0.0005, 0.3989]
    blend = mixed([Numbers(k) for k in range(4)], weights, 0)
    counts = [0] * 4
    for block in range(200):
        for place in range(BLOCK):
            source, index = blend.segment.locate(block * BLOCK + place)
            assert index == counts[source]
            counts[source] += 1
