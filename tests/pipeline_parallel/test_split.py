"""Layers to stages: by hand, as properties, and the messages of splits that do not fit."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.pipeline_parallel.split import balanced, stage_layers


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
    assert [len(layers) for layers in stage_layers(layers, stages)] == counts


@given(layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_every_layer_is_on_one_stage_in_order(layers: int, stages: int) -> None:
    if layers < stages:
        return
    split = stage_layers(layers, stages)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1
    assert len(split[-1]) == layers // stages


def test_an_explicit_split() -> None:
    assert stage_layers(16, 4, [3, 5, 5, 3]) == [range(3), range(3, 8), range(8, 13), range(13, 16)]


@pytest.mark.parametrize(
    ("layers", "stages", "explicit", "message"),
    [
        (16, 4, [3, 5, 5, 4], "parallel.layers_per_stage [3, 5, 5, 4] sums to 17 but the model has 16 layers; [4, 4"),
        (16, 4, [8, 8], "parallel.layers_per_stage [8, 8] has 2 entries for 4 pipeline stages; [4, 4, 4, 4] would"),
        (16, 4, [], "parallel.layers_per_stage [] has 0 entries for 4 pipeline stages"),
        (16, 4, [0, 5, 6, 5], "parallel.layers_per_stage [0, 5, 6, 5] has a stage with no layers"),
        (
            3,
            4,
            None,
            "parallel.pipeline (× virtual_pipeline) is 4 but the model has 3 layers: that leaves",
        ),
        (3, 0, None, "parallel.pipeline is 0"),
    ],
)
def test_splits_that_do_not_fit(layers: int, stages: int, explicit: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stage_layers(layers, stages, explicit)


TURNS, V = [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("layers", "homes", "last_work", "counts"),
    [
        (32, [0, 1, 2, 3], 2.7, [9, 9, 8, 6]),
        (32, [0, 1, 2, 3], 0.0, [8, 8, 8, 8]),
        (32, [0, 1], 2.4, [17, 15]),
        (32, TURNS, 2.7, [5, 5, 4, 4, 4, 4, 4, 2]),
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
