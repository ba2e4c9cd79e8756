"""Schedules: small ones written by hand, and properties that hold for every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.pipeline_parallel.communication import with_communication
from megafp8.pipeline_parallel.schedules import (
    COMPUTE,
    Action,
    Kind,
    Placement,
    Schedule,
    forward_only,
    in_a_v,
    in_turns,
    interleaved,
    one_f_one_b,
)
from megafp8.pipeline_parallel.zero_bubble import dualpipev, zb_h1, zb_v

stages = st.integers(1, 8)
microbatches = st.integers(1, 24)
SHORT = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.WEIGHT: "W",
    Kind.SEND_FORWARD: "sF",
    Kind.RECV_FORWARD: "rF",
    Kind.SEND_BACKWARD: "sB",
    Kind.RECV_BACKWARD: "rB",
}


def short(schedule: Schedule) -> list[str]:
    return [
        " ".join(f"{SHORT[a.kind]}{a.microbatch}" + (f".{a.chunk}" if a.chunk else "") for a in actions)
        for actions in schedule
    ]


def test_four_stages_as_drawn_in_the_paper() -> None:
    assert short(one_f_one_b(in_turns(4), 6)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert short(one_f_one_b(in_turns(4), 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_forward_only() -> None:
    assert short(forward_only(in_turns(2), 3)) == ["F0 F1 F2", "F0 F1 F2"]


def test_communication_of_three_stages() -> None:
    """Warm-up and cool-down put the receive behind the send; in the steady state it overlaps the action before."""
    assert short(with_communication(one_f_one_b(in_turns(3), 3), in_turns(3))) == [
        "F0 sF0 F1 sF1 rB0 F2 sF2 rB1 B0 rB2 B1 B2",
        "rF0 F0 sF0 rF1 rB0 F1 sF1 rF2 B0 sB0 rB1 F2 sF2 B1 sB1 rB2 B2 sB2",
        "rF0 rF1 F0 B0 sB0 F1 rF2 B1 sB1 F2 B2 sB2",
    ]


def test_communication_of_an_evaluation() -> None:
    assert short(with_communication(forward_only(in_turns(3), 2), in_turns(3))) == [
        "F0 sF0 F1 sF1",
        "rF0 F0 sF0 rF1 F1 sF1",
        "rF0 rF1 F0 F1",
    ]


def test_one_stage_communicates_nothing() -> None:
    assert with_communication(one_f_one_b(in_turns(1), 5), in_turns(1)) == one_f_one_b(in_turns(1), 5)


@given(p=stages, m=microbatches)
def test_compute_actions_are_all_there_and_in_order(p: int, m: int) -> None:
    for actions in one_f_one_b(in_turns(p), m):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(m))
        for i in range(m):
            assert actions.index(Action(Kind.FORWARD, i)) < actions.index(Action(Kind.BACKWARD, i))


@given(p=stages, m=microbatches)
def test_communication_changes_no_compute(p: int, m: int) -> None:
    for compute in (one_f_one_b(in_turns(p), m), forward_only(in_turns(p), m)):
        for before, after in zip(compute, with_communication(compute, in_turns(p)), strict=True):
            assert [a for a in after if a.kind in COMPUTE] == before


@given(p=st.integers(2, 8), m=microbatches)
def test_the_ends_of_the_pipeline(p: int, m: int) -> None:
    first, *_, last = with_communication(one_f_one_b(in_turns(p), m), in_turns(p))
    assert not {Kind.RECV_FORWARD, Kind.SEND_BACKWARD} & {a.kind for a in first}
    assert not {Kind.SEND_FORWARD, Kind.RECV_BACKWARD} & {a.kind for a in last}


@given(p=stages, m=microbatches)
def test_in_the_steady_state_every_receive_overlaps_a_compute_action(p: int, m: int) -> None:
    for rank, actions in enumerate(with_communication(one_f_one_b(in_turns(p), m), in_turns(p))):
        for i in range(p - rank, m):  # later than the first steady forward
            if rank > 0:
                posted, used = (actions.index(Action(kind, i)) for kind in (Kind.RECV_FORWARD, Kind.FORWARD))
                assert Kind.BACKWARD in {a.kind for a in actions[posted:used]}


# The figures of the papers, F = B = W.


def test_interleaved_as_drawn_in_the_paper() -> None:
    """Figure 4 of arXiv:2104.04473: four ranks of two chunks, the first of them and the last."""
    first, *_, last = short(interleaved(in_turns(4, 2), 8))
    assert first.startswith(
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1 B2 B3 B4.1"
    )
    assert last.startswith("F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3 F4.1 B4.1")


def test_interleaved_where_the_ranks_do_not_divide_the_microbatches() -> None:
    assert short(interleaved(in_turns(2, 2), 3))[1] == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 B1 F2.1 B2.1 B2"


def test_zb_h1_as_drawn_in_the_paper() -> None:
    """Figure 2 of arXiv:2401.10241: every rank is later with its weight gradients by its number."""
    assert short(zb_h1(in_turns(4), 5)) == [
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 B2 W2 B3 W3 B4 W4",
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 B3 W2 B4 W3 W4",
        "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 B4 W2 W3 W4",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4",
    ]


def test_zb_v_of_two_ranks() -> None:
    assert short(zb_v(in_a_v(2), 4)) == [
        "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3 B0 W0 F2.1 B2.1 W2.1 B1 W1 F3.1 B3.1 W3.1 B2 W2 B3 W3",
        "F0 F0.1 F1 F1.1 B0.1 W0.1 F2 B0 W0 F2.1 B1.1 W1.1 F3 B1 W1 F3.1 B2.1 W2.1 B2 B3.1 B3 W2 W3.1 W3",
    ]


def test_dualpipev_pairs_forwards_with_backwards() -> None:
    assert short(dualpipev(in_a_v(2), 5)) == [
        "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 F4 B2.1 F3.1 B1 B3.1 F4.1 B2 B4.1 B3 W3 B4 W4",
        "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 F4 B2.1 F4.1 B2 B3.1 B3 B4.1 B4 W4.1 W4",
    ]


def test_evaluation_of_a_v_drains_first() -> None:
    assert short(forward_only(in_a_v(2), 3)) == ["F0 F1 F2 F0.1 F1.1 F2.1", "F0 F0.1 F1 F1.1 F2 F2.1"]


def test_communication_of_a_v() -> None:
    """Activations go both ways between the ranks and are queued at both ends in one order; the turn sends nothing."""
    first, second = short(with_communication(forward_only(in_a_v(2), 2), in_a_v(2)))
    assert first == "F0 sF0 F1 sF1 rF0.1 rF1.1 F0.1 F1.1"
    assert second == "rF0 rF1 F0 F0.1 sF0.1 F1 F1.1 sF1.1"


def test_where_stages_are() -> None:
    assert in_turns(3, 2).stages == ((0, 3), (1, 4), (2, 5))
    assert in_a_v(3).stages == ((0, 5), (1, 4), (2, 3))
    assert in_a_v(3).homes == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    assert in_turns(3, 2).peer(Kind.SEND_FORWARD, 2, 0) == 0
    assert in_turns(3, 2).peer(Kind.SEND_FORWARD, 2, 1) is None
    assert in_a_v(3).neighbour(Kind.SEND_FORWARD, 2, 0) == (2, 1)
    assert in_a_v(3).peer(Kind.SEND_FORWARD, 2, 0) is None
    assert in_a_v(3).peer(Kind.SEND_BACKWARD, 1, 1) == 2


@pytest.mark.parametrize("build", [one_f_one_b, interleaved, forward_only])
def test_no_microbatches_are_refused(build: Callable[[Placement, int], Schedule]) -> None:
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        build(in_turns(2), 0)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks is 0"):
        in_turns(0)
