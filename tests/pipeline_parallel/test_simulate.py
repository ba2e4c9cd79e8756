"""The checker against schedules broken by hand, and the simulator against closed forms."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.pipeline_parallel.schedules import Action, Kind, Schedule, forward_only, one_f_one_b, with_communication
from megafp8.pipeline_parallel.simulate import check_schedule, simulate

stages = st.integers(1, 8)
microbatches = st.integers(1, 24)
KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "sF": Kind.SEND_FORWARD,
    "rF": Kind.RECV_FORWARD,
    "sB": Kind.SEND_BACKWARD,
    "rB": Kind.RECV_BACKWARD,
}


def actions(line: str) -> list[Action]:
    """`"rF0 F0"` as actions."""
    return [Action(KINDS[word.rstrip("0123456789")], int(word.lstrip("sFrB"))) for word in line.split()]


@given(p=stages, m=microbatches)
def test_what_the_builders_make_is_fit_to_run(p: int, m: int) -> None:
    check_schedule(with_communication(one_f_one_b(p, m)))
    check_schedule(with_communication(forward_only(p, m)))


# 1F1B of three stages and three micro-batches, its communication included. Each case below breaks one thing.
GOOD = [
    "F0 sF0 F1 sF1 rB0 F2 sF2 rB1 B0 rB2 B1 B2",
    "rF0 F0 sF0 rF1 rB0 F1 sF1 rF2 B0 sB0 rB1 F2 sF2 B1 sB1 rB2 B2 sB2",
    "rF0 F0 rF1 B0 sB0 F1 rF2 B1 sB1 F2 B2 sB2",
]


def replace(rank: int, old: str, new: str) -> Callable[[], Schedule]:
    def build() -> Schedule:
        lines = list(GOOD)
        assert f" {old} " in f" {lines[rank]} "
        lines[rank] = f" {lines[rank]} ".replace(f" {old} ", f" {new} ", 1)
        return [actions(line) for line in lines]

    return build


def of(*lines: str) -> Callable[[], Schedule]:
    return lambda: [actions(line) for line in lines]


BROKEN = {
    "nothing": (of("", ""), "the schedule has no actions"),
    "forward twice": (replace(0, "F1", "F1 F1"), "rank 0, position 3, FORWARD(1): every micro-batch has exactly one"),
    "no forward": (replace(2, "F1 rF2", "rF2"), "rank 2, position 11, FORWARD(1): missing at the end"),
    "no backward": (replace(0, "B1 B2", "B1"), "rank 0, position 11, BACKWARD(2): missing at the end"),
    "backward first": (replace(2, "F0 rF1 B0", "B0 rF1 F0"), "rank 2, position 1, BACKWARD(0): a backward comes after"),
    "not sent": (replace(1, "F1 sF1", "F1"), "rank 1, position 17, SEND_FORWARD(1): missing at the end"),
    "not received": (replace(1, "rB2 B2", "B2"), "rank 1, position 17, RECV_BACKWARD(2): missing at the end"),
    "sent too early": (replace(0, "F1 sF1", "sF1 F1"), "rank 0, position 2, SEND_FORWARD(1): an activation is sent"),
    "gradient too early": (replace(1, "B0 sB0", "sB0 B0"), "rank 1, position 8, SEND_BACKWARD(0): a gradient is sent"),
    "received late": (replace(2, "rF0 F0", "F0 rF0"), "rank 2, position 0, FORWARD(0): the input must be received"),
    "gradient late": (replace(0, "rB1 B0 rB2 B1", "B0 rB2 B1 rB1"), "position 9, BACKWARD(1): the gradient must be"),
    "first stage receives": (
        replace(0, "F0", "rF0 F0"),
        "rank 0, position 0, RECV_FORWARD(0): stage 0 of 3 has no neighbour",
    ),
    "last stage sends": (
        replace(2, "F2", "F2 sF2"),
        "rank 2, position 10, SEND_FORWARD(2): stage 2 of 3 has no neighbour",
    ),
    "orders differ": (
        replace(1, "rF1 rB0 F1 sF1 rF2", "rF2 rB0 rF1 F1 sF1"),
        "rank 1, position 3, RECV_FORWARD(2): rank 0 sends micro-batch 1 here; receives follow the order",
    ),
    "too many in flight": (
        of("F0 sF0 F1 sF1 rB0 B0 rB1 B1", "rF0 F0 rF1 F1 B0 sB0 B1 sB1"),
        "rank 1, position 3, FORWARD(1): 2 micro-batches in flight; at most p - r = 1 may be",
    ),
    "compute in a ring": (
        of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 F0 sF0 rF1 F1 sF1 rB0 B0 sB0 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        ),
        "rank 0, position 3, BACKWARD(0): deadlock: waits for ever; transfers issued and not through: RECV_BACKWARD(0)",
    ),
    "a receive queued in front of a send": (
        of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 rF1 F0 sF0 rB0 B0 sB0 F1 sF1 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        ),
        "rank 0, position 3, BACKWARD(0): deadlock: waits for ever",
    ),
    "a send before the one ahead of it is through": (
        # Rank 1 sends its second gradient before it posts its third receive, and rank 0 its fourth activation before
        # it posts the receive of any gradient: each send waits for the one ahead of it.
        of(
            "F0 sF0 F1 sF1 F2 sF2 F3 sF3 rB0 B0 rB1 B1 rB2 B2 rB3 B3",
            "rF0 F0 sF0 rF1 F1 sF1 rB0 B0 sB0 rB1 B1 sB1 rF2 F2 sF2 rF3 F3 sF3 rB2 B2 sB2 rB3 B3 sB3",
            "rF0 F0 sF0 rF1 F1 sF1 rB0 B0 sB0 rB1 B1 sB1 rF2 F2 sF2 rF3 F3 sF3 rB2 B2 sB2 rB3 B3 sB3",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1 rF2 F2 B2 sB2 rF3 F3 B3 sB3",
        ),
        "rank 0, position 7, SEND_FORWARD(3): deadlock: waits for ever; transfers issued and not through: SEND_FORWARD",
    ),
    "gradients in an evaluation": (
        of("F0 sF0 rB0", "rF0 F0 sB0"),
        "rank 0, position 2, RECV_BACKWARD(0): an evaluation",
    ),
    "negative": (lambda: [[Action(Kind.FORWARD, -1), Action(Kind.FORWARD, 0)]], "micro-batches are numbered from 0"),
    "chunk": (lambda: [[Action(Kind.FORWARD, 0, chunk=1)]], "rank 0, position 0, FORWARD(0): chunk is 1, but a rank"),
}


def test_the_schedule_that_the_broken_ones_start_from_is_good() -> None:
    check_schedule([actions(line) for line in GOOD])


@pytest.mark.parametrize("case", BROKEN)
def test_broken_schedules_are_refused(case: str) -> None:
    build, message = BROKEN[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schedule(build())


def test_the_queue_deadlock_is_about_the_queue_alone() -> None:
    """The same compute order with the receive behind the send is fine."""
    check_schedule(
        of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 F0 sF0 rF1 rB0 B0 sB0 F1 sF1 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        )()
    )


@given(p=stages, m=microbatches, forward=st.sampled_from([0.5, 1.0, 3.0]), backward=st.sampled_from([1.0, 2.0]))
def test_one_f_one_b_meets_its_closed_forms(p: int, m: int, forward: float, backward: float) -> None:
    timeline = simulate(one_f_one_b(p, m), forward, backward)
    assert timeline.duration == pytest.approx((m + p - 1) * (forward + backward), abs=1e-12)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert timeline.peak_in_flight == [min(m, p - rank) for rank in range(p)]


@given(p=stages, m=microbatches)
def test_an_evaluation_fills_and_drains_once(p: int, m: int) -> None:
    timeline = simulate(with_communication(forward_only(p, m)), forward_time=2.0)
    assert timeline.duration == (m + p - 1) * 2.0
    assert timeline.peak_in_flight == [0] * p


@given(p=stages)
def test_transfers_of_one_microbatch_are_all_exposed(p: int) -> None:
    assert simulate(one_f_one_b(p, 1), p2p_time=0.25).duration == 3.0 * p + 2 * (p - 1) * 0.25


def test_spans_of_two_stages_by_hand() -> None:
    timeline = simulate(one_f_one_b(2, 2), forward_time=1.0, backward_time=2.0)
    assert [[(str(s.action), s.start, s.end) for s in spans] for spans in timeline.spans] == [
        [("FORWARD(0)", 0, 1), ("FORWARD(1)", 1, 2), ("BACKWARD(0)", 4, 6), ("BACKWARD(1)", 7, 9)],
        [("FORWARD(0)", 1, 2), ("BACKWARD(0)", 2, 4), ("FORWARD(1)", 4, 5), ("BACKWARD(1)", 5, 7)],
    ]


def test_a_ring_of_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("rank 0, position 1, BACKWARD(0): deadlock")):
        simulate([actions("F0 B0 F1 B1"), actions("F0 F1 B0 B1")])
