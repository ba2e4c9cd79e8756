"""Layers to stages: by hand, as properties, and the messages of splits that do not fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.pipeline_parallel.split import stage_layers


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
