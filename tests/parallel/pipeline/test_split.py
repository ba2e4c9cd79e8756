"""Layers to stages: by hand and as properties."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.parallel.pipeline.split import balanced, even, stage_layers


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 2, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (3, 2, [2, 1]),
    ],
)
def test_the_even_split_by_hand(layers: int, stages: int, counts: list[int]) -> None:
    assert even(layers, stages) == counts


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_every_layer_is_on_one_stage_in_order(layers: int, stages: int) -> None:
    if layers < stages:
        return
    split = stage_layers(even(layers, stages))
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert len(split[-1]) == layers // stages


def test_an_explicit_split() -> None:
    assert stage_layers([3, 5, 5, 3]) == [range(3), range(3, 8), range(8, 13), range(13, 16)]


LOOP, V = [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("layers", "homes", "last_work", "counts"),
    [
        (32, [0, 1, 2, 3], 2.7, [9, 9, 8, 6]),
        (32, [0, 1, 2, 3], 0.0, [8, 8, 8, 8]),
        (32, [0, 1], 2.4, [17, 15]),
        (32, LOOP, 2.7, [5, 5, 4, 4, 4, 4, 4, 2]),
        (32, V, 2.7, [4, 5, 5, 4, 4, 4, 4, 2]),
        (4, [0, 1, 2, 3], 50.0, [1, 1, 1, 1]),
        (5, [0, 1], 50.0, [4, 1]),
    ],
)
def test_ranks_have_equal_work(layers: int, homes: list[int], last_work: float, counts: list[int]) -> None:
    assert balanced(layers, homes, last_work) == counts


@pytest.mark.parametrize("last_work", [0.0, 0.3, 1.0, 2.5, 7.0])
@pytest.mark.parametrize("layers", [4, 7, 10])
def test_no_other_split_has_less_for_the_busiest_rank(layers: int, last_work: float) -> None:
    def busiest(counts: tuple[int, ...]) -> float:
        return max(*counts[:-1], counts[-1] + last_work)

    splits = [c for c in product(range(1, layers), repeat=3) if sum(c) == layers]
    assert busiest(tuple(balanced(layers, [0, 1, 2], last_work))) == min(map(busiest, splits))
