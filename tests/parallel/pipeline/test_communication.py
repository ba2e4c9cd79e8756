"""Sends and receives: small schedules written by hand, and properties that hold for every size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megafp8.parallel.pipeline.actions import COMPUTE, Action, Kind, loop_placement, v_placement
from megafp8.parallel.pipeline.communication import with_communication
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.parallel.pipeline.notation import lines_of

stages = st.integers(1, 8)
microbatches = st.integers(1, 24)


def test_three_stages() -> None:
    """Warm-up and cool-down put the receive behind the send; in the steady state it overlaps the action before."""
    assert lines_of(with_communication(one_f_one_b(loop_placement(3), 3), loop_placement(3))) == [
        "F0 sF0 F1 sF1 rB0 F2 sF2 rB1 B0 rB2 B1 B2",
        "rF0 F0 sF0 rF1 rB0 F1 sF1 rF2 B0 sB0 rB1 F2 sF2 B1 sB1 rB2 B2 sB2",
        "rF0 rF1 F0 B0 sB0 F1 rF2 B1 sB1 F2 B2 sB2",
    ]


def test_an_evaluation() -> None:
    assert lines_of(with_communication(forward_only(loop_placement(3), 2), loop_placement(3))) == [
        "F0 sF0 F1 sF1",
        "rF0 F0 sF0 rF1 F1 sF1",
        "rF0 rF1 F0 F1",
    ]


def test_a_v() -> None:
    """Activations go both ways between the ranks and are queued at both ends in one order; rank 1 keeps its own."""
    assert lines_of(with_communication(forward_only(v_placement(2), 2), v_placement(2))) == [
        "F0 sF0 F1 sF1 rF0.1 rF1.1 F0.1 F1.1",
        "rF0 rF1 F0 F0.1 sF0.1 F1 F1.1 sF1.1",
    ]


@given(p=stages, m=microbatches)
def test_communication_changes_no_compute(p: int, m: int) -> None:
    for compute in (one_f_one_b(loop_placement(p), m), forward_only(loop_placement(p), m)):
        found = with_communication(compute, loop_placement(p))
        assert [[a for a in actions if a.kind in COMPUTE] for actions in found] == compute
        assert p > 1 or found == compute


@given(p=st.integers(2, 8), m=microbatches)
def test_the_ends_of_the_pipeline(p: int, m: int) -> None:
    first, *_, last = with_communication(one_f_one_b(loop_placement(p), m), loop_placement(p))
    assert not {Kind.RECV_FORWARD, Kind.SEND_BACKWARD} & {a.kind for a in first}
    assert not {Kind.SEND_FORWARD, Kind.RECV_BACKWARD} & {a.kind for a in last}


@given(p=stages, m=microbatches)
def test_in_the_steady_state_every_receive_overlaps_a_compute_action(p: int, m: int) -> None:
    _, *receivers = with_communication(one_f_one_b(loop_placement(p), m), loop_placement(p))
    for rank, actions in enumerate(receivers, 1):
        for i in range(p - rank, m):  # later than the first steady forward
            posted, used = (actions.index(Action(kind, i)) for kind in (Kind.RECV_FORWARD, Kind.FORWARD))
            assert Kind.BACKWARD in {a.kind for a in actions[posted:used]}
