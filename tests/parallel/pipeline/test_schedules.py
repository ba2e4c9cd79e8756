"""Each schedule against small ones written by hand or drawn in its paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.parallel.pipeline.actions import Action, Kind, StagePlacement, loop_placement, v_placement
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.registry import SCHEDULES
from megafp8.parallel.pipeline.schedules.interleaved import interleaved
from megafp8.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.parallel.pipeline.notation import lines_of


@pytest.mark.parametrize(
    ("name", "placement", "m", "lines"),
    [
        pytest.param(
            "1f1b", loop_placement(4), 6,
            [
                "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
                "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
                "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
                "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
            ],
            id="1f1b",
        ),
        pytest.param("1f1b", loop_placement(4), 2, [*["F0 F1 B0 B1"] * 3, "F0 B0 F1 B1"], id="m-less-than-p"),
        pytest.param(  # Figure 2 of arXiv:2401.10241
            "zb-h1", loop_placement(4), 5,
            [
                "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 W2 B3 W3 B4 W4",
                "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 B3 W2 B4 W3 W4",
                "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 B4 W2 W3 W4",
                "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4",
            ],
            id="zb-h1",
        ),
        pytest.param(
            "zb-v", v_placement(2), 4,
            [
                "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3 B0 W0 F2.1 B2.1 W2.1 B1 W1 F3.1 B3.1 W3.1 B2 W2 B3 W3",
                "F0 F0.1 F1 F1.1 B0.1 W0.1 F2 B0 W0 F2.1 B1.1 W1.1 F3 B1 W1 F3.1 B2.1 W2.1 B2 B3.1 B3 W2 W3.1 W3",
            ],
            id="zb-v",
        ),
        pytest.param(
            "dualpipev", v_placement(2), 5,
            [
                "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 F4 B2.1 F3.1 B1 B3.1 F4.1 B2 B4.1 B3 W3 B4 W4",
                "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 F4 B2.1 F4.1 B2 B3.1 B3 B4.1 B4 W4.1 W4",
            ],
            id="dualpipev",
        ),
    ],
)  # fmt: skip
def test_schedules_by_hand(name: str, placement: StagePlacement, m: int, lines: list[str]) -> None:
    assert lines_of(SCHEDULES[name].build(placement, m)) == lines


def test_interleaved_as_drawn_in_the_paper() -> None:
    """Figure 4 of arXiv:2104.04473: four ranks of two chunks, the first of them and the last."""
    first, *_, last = lines_of(interleaved(loop_placement(4, 2), 8))
    assert first.startswith(
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1 B2 B3 B4.1"
    )
    assert last.startswith("F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3 F4.1 B4.1")


def test_interleaved_where_the_ranks_do_not_divide_the_microbatches() -> None:
    assert lines_of(interleaved(loop_placement(2, 2), 3))[1] == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 B1 F2.1 B2.1 B2"


def test_forward_only() -> None:
    assert lines_of(forward_only(loop_placement(2), 3)) == ["F0 F1 F2", "F0 F1 F2"]
    drained_first = ["F0 F1 F2 F0.1 F1.1 F2.1", "F0 F0.1 F1 F1.1 F2 F2.1"]
    assert lines_of(forward_only(v_placement(2), 3)) == drained_first


@given(p=st.integers(1, 8), m=st.integers(1, 24))
def test_compute_actions_are_all_there_and_in_order(p: int, m: int) -> None:
    for actions in one_f_one_b(loop_placement(p), m):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(m))
        for i in range(m):
            assert actions.index(Action(Kind.FORWARD, i)) < actions.index(Action(Kind.BACKWARD, i))
