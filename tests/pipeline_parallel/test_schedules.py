"""Schedules: small ones written by hand, and properties that hold for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.pipeline_parallel.schedules import Action, Kind, Schedule, forward_only, one_f_one_b, with_communication

stages = st.integers(1, 8)
microbatches = st.integers(1, 24)
SHORT = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.SEND_FORWARD: "sF",
    Kind.RECV_FORWARD: "rF",
    Kind.SEND_BACKWARD: "sB",
    Kind.RECV_BACKWARD: "rB",
}


def short(schedule: Schedule) -> list[str]:
    return [" ".join(f"{SHORT[a.kind]}{a.microbatch}" for a in actions) for actions in schedule]


def test_four_stages_as_drawn_in_the_paper() -> None:
    assert short(one_f_one_b(4, 6)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert short(one_f_one_b(4, 2)) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_forward_only() -> None:
    assert short(forward_only(2, 3)) == ["F0 F1 F2", "F0 F1 F2"]


def test_communication_of_three_stages() -> None:
    """Warm-up and cool-down put the receive behind the send; in the steady state it overlaps the action before."""
    assert short(with_communication(one_f_one_b(3, 3))) == [
        "F0 sF0 F1 sF1 rB0 F2 sF2 rB1 B0 rB2 B1 B2",
        "rF0 F0 sF0 rF1 rB0 F1 sF1 rF2 B0 sB0 rB1 F2 sF2 B1 sB1 rB2 B2 sB2",
        "rF0 F0 rF1 B0 sB0 F1 rF2 B1 sB1 F2 B2 sB2",
    ]


def test_communication_of_an_evaluation() -> None:
    assert short(with_communication(forward_only(3, 2))) == ["F0 sF0 F1 sF1", "rF0 F0 sF0 rF1 F1 sF1", "rF0 rF1 F0 F1"]


def test_one_stage_communicates_nothing() -> None:
    assert with_communication(one_f_one_b(1, 5)) == one_f_one_b(1, 5)


@given(p=stages, m=microbatches)
def test_compute_actions_are_all_there_and_in_order(p: int, m: int) -> None:
    for actions in one_f_one_b(p, m):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(m))
        for i in range(m):
            assert actions.index(Action(Kind.FORWARD, i)) < actions.index(Action(Kind.BACKWARD, i))


@given(p=stages, m=microbatches)
def test_communication_changes_no_compute(p: int, m: int) -> None:
    for compute in (one_f_one_b(p, m), forward_only(p, m)):
        for before, after in zip(compute, with_communication(compute), strict=True):
            assert [a for a in after if a.kind in (Kind.FORWARD, Kind.BACKWARD)] == before


@given(p=st.integers(2, 8), m=microbatches)
def test_the_ends_of_the_pipeline(p: int, m: int) -> None:
    first, *_, last = with_communication(one_f_one_b(p, m))
    assert not {Kind.RECV_FORWARD, Kind.SEND_BACKWARD} & {a.kind for a in first}
    assert not {Kind.SEND_FORWARD, Kind.RECV_BACKWARD} & {a.kind for a in last}


@given(p=stages, m=microbatches)
def test_in_the_steady_state_every_receive_overlaps_a_compute_action(p: int, m: int) -> None:
    for rank, actions in enumerate(with_communication(one_f_one_b(p, m))):
        for i in range(p - rank, m):  # later than the first steady forward
            if rank > 0:
                posted, used = (actions.index(Action(kind, i)) for kind in (Kind.RECV_FORWARD, Kind.FORWARD))
                assert Kind.BACKWARD in {a.kind for a in actions[posted:used]}


@pytest.mark.parametrize("build", [one_f_one_b, forward_only])
@pytest.mark.parametrize(("p", "m", "message"), [(0, 4, "num_stages is 0"), (4, 0, "num_microbatches is 0")])
def test_empty_schedules_are_refused(build: object, p: int, m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(p, m)  # type: ignore[operator]
