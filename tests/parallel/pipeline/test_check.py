"""The checker: everything that is built passes, and schedules broken by hand do not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement, loop_placement, v_placement
from megafp8.parallel.pipeline.check import check_compute, check_schedule
from megafp8.parallel.pipeline.communication import with_communication
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.registry import SCHEDULES, place_stages
from tests.parallel.pipeline.notation import schedule_of


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=30)
@given(p=st.integers(1, 8), v=st.integers(2, 4), m=st.integers(1, 24))
def test_every_built_in_schedule_can_run(name: str, p: int, v: int, m: int) -> None:
    placement = place_stages(name, p, SCHEDULES[name].chunks or v)
    for compute in (SCHEDULES[name].build(placement, m), forward_only(placement, m)):
        check_compute(compute, placement, m)
        check_schedule(with_communication(compute, placement), placement)


@settings(max_examples=60)
@given(data=st.data(), p=st.integers(1, 4), v=st.integers(1, 3), m=st.integers(1, 6))
def test_any_order_that_can_be_carried_out_gets_communication_that_ends(
    data: st.DataObject, p: int, v: int, m: int
) -> None:
    """Schedules as a user may write them: stages anywhere, and at each moment some rank does something it can do."""
    homes = data.draw(st.permutations(range(p * v)))
    placement = StagePlacement(tuple(tuple(homes[r * v : (r + 1) * v]) for r in range(p)))
    compute: Schedule = [[] for _ in range(p)]
    last = placement.num_stages - 1
    possible = {(Kind.FORWARD, 0, i) for i in range(m)}
    while possible:
        kind, stage, i = data.draw(st.sampled_from(sorted(possible, key=str)))
        possible.remove((kind, stage, i))
        rank, chunk = placement.homes[stage]
        compute[rank].append(Action(kind, i, chunk))
        if kind is Kind.FORWARD:
            possible.add((Kind.BACKWARD, stage, i) if stage == last else (Kind.FORWARD, stage + 1, i))
        elif kind is Kind.BACKWARD:
            possible |= {(Kind.BACKWARD, stage - 1, i)} if stage else set()
            possible |= {(Kind.WEIGHT, stage, i)} if (stage + i) % 2 else set()
    check_compute(compute, placement, m)
    check_schedule(with_communication(compute, placement), placement)


# 1F1B of three stages and three micro-batches, its communication included. Each case below breaks one thing.
GOOD = [
    "F0 sF0 F1 sF1 rB0 F2 sF2 rB1 B0 rB2 B1 B2",
    "rF0 F0 sF0 rF1 rB0 F1 sF1 rF2 B0 sB0 rB1 F2 sF2 B1 sB1 rB2 B2 sB2",
    "rF0 F0 rF1 B0 sB0 F1 rF2 B1 sB1 F2 B2 sB2",
]


def replaced(rank: int, old: str, new: str, good: list[str] = GOOD) -> Schedule:
    """`good` with actions of one rank replaced."""
    lines = [f" {line} " for line in good]
    assert f" {old} " in lines[rank]
    lines[rank] = lines[rank].replace(f" {old} ", f" {new} ", 1)
    return schedule_of(*lines)


BROKEN: dict[str, tuple[Schedule, str]] = {
    "nothing": (schedule_of("", ""), "the schedule has no actions"),
    "forward twice": (replaced(0, "F1", "F1 F1"), "rank 0, position 3, FORWARD(1): every micro-batch has exactly one"),
    "no forward": (replaced(2, "F1 rF2", "rF2"), "rank 2, position 11, FORWARD(1): missing at the end"),
    "no backward": (replaced(0, "B1 B2", "B1"), "rank 0, position 11, BACKWARD(2): missing at the end"),
    "backward first": (
        replaced(2, "F0 rF1 B0", "B0 rF1 F0"),
        "rank 2, position 1, BACKWARD(0): a backward comes after",
    ),
    "not sent": (replaced(1, "F1 sF1", "F1"), "rank 1, position 17, SEND_FORWARD(1): missing at the end"),
    "not received": (replaced(1, "rB2 B2", "B2"), "rank 1, position 17, RECV_BACKWARD(2): missing at the end"),
    "sent too early": (replaced(0, "F1 sF1", "sF1 F1"), "rank 0, position 2, SEND_FORWARD(1): an activation is sent"),
    "gradient too early": (replaced(1, "B0 sB0", "sB0 B0"), "rank 1, position 8, SEND_BACKWARD(0): a gradient is sent"),
    "received late": (replaced(2, "rF0 F0", "F0 rF0"), "rank 2, position 0, FORWARD(0): the input must be received"),
    "gradient late": (replaced(0, "rB1 B0 rB2 B1", "B0 rB2 B1 rB1"), "position 9, BACKWARD(1): the gradient must be"),
    "first stage receives": (
        replaced(0, "F0", "rF0 F0"),
        "rank 0, position 0, RECV_FORWARD(0): stage 0 of 3 has no neighbor",
    ),
    "last stage sends": (
        replaced(2, "F2", "F2 sF2"),
        "rank 2, position 10, SEND_FORWARD(2): stage 2 of 3 has no neighbor",
    ),
    "orders differ": (
        replaced(1, "rF1 rB0 F1 sF1 rF2", "rF2 rB0 rF1 F1 sF1"),
        "rank 1, position 3, RECV_FORWARD(2): rank 0 sends the tensor of RECV_FORWARD(1) first; receives follow",
    ),
    "weight gradients before their backward": (
        replaced(0, "B0 rB2", "W0 B0 rB2"),
        "rank 0, position 8, WEIGHT(0): weight gradients come after their backward",
    ),
    "weight gradients without a backward": (
        schedule_of("F0 W0"),
        "rank 0, position 2, BACKWARD(0): missing at the end",
    ),
    "compute in a ring": (
        schedule_of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 F0 sF0 rF1 F1 sF1 rB0 B0 sB0 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        ),
        "rank 0, position 3, BACKWARD(0): deadlock: waits forever; transfers issued but unfinished: RECV_BACKWARD(0)",
    ),
    "a receive queued in front of a send": (
        schedule_of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 rF1 F0 sF0 rB0 B0 sB0 F1 sF1 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        ),
        "rank 0, position 3, BACKWARD(0): deadlock: waits forever",
    ),
    "a send before the one ahead of it is through": (
        # Rank 1 sends its second gradient before it posts its third receive, and rank 0 its fourth activation before
        # it posts the receive of any gradient: each send waits for the one ahead of it.
        schedule_of(
            "F0 sF0 F1 sF1 F2 sF2 F3 sF3 rB0 B0 rB1 B1 rB2 B2 rB3 B3",
            "rF0 F0 sF0 rF1 F1 sF1 rB0 B0 sB0 rB1 B1 sB1 rF2 F2 sF2 rF3 F3 sF3 rB2 B2 sB2 rB3 B3 sB3",
            "rF0 F0 sF0 rF1 F1 sF1 rB0 B0 sB0 rB1 B1 sB1 rF2 F2 sF2 rF3 F3 sF3 rB2 B2 sB2 rB3 B3 sB3",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1 rF2 F2 B2 sB2 rF3 F3 B3 sB3",
        ),
        "rank 0, position 7, SEND_FORWARD(3): deadlock: waits forever; transfers issued but unfinished: SEND_FORWARD",
    ),
    "gradients in an evaluation": (
        schedule_of("F0 sF0 rB0", "rF0 F0 sB0"),
        "rank 0, position 2, RECV_BACKWARD(0): an evaluation",
    ),
    "negative": ([[Action(Kind.FORWARD, -1), Action(Kind.FORWARD, 0)]], "micro-batches, numbered from 0"),
    "chunk": (schedule_of("F0.1"), "rank 0, position 0, FORWARD(0, chunk 1): a rank of this pipeline holds 1 chunks"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_schedules_are_refused(case: str) -> None:
    schedule, message = BROKEN[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schedule(schedule, loop_placement(len(schedule)))


# Two micro-batches through the V of two ranks; rank 1 holds stages 1 and 2. Activations go both ways between the ranks.
GOOD_V = [
    "F0 sF0 F1 sF1 rF0.1 rF1.1 F0.1 B0.1 sB0.1 F1.1 B1.1 sB1.1 rB0 rB1 B0 B1",
    "rF0 F0 rF1 F0.1 sF0.1 F1 F1.1 sF1.1 rB0.1 rB1.1 B0.1 B0 sB0 B1.1 B1 sB1",
]


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (1, "F0 rF1 F0.1", "F0 sF0 rF1 F0.1", "rank 1, position 2, SEND_FORWARD(0): stage 1 of 4 has no"),
        (1, "F0 rF1 F0.1", "F0.1 rF1 F0", "rank 0, position 6, FORWARD(0, chunk 1): deadl"),
        (
            1, "F0 rF1 F0.1 sF0.1 F1", "F0 F0.1 sF0.1 rF1 F1",
            "rank 0, position 6, FORWARD(0, chunk 1): deadlock: waits forever; transfers issued but unfinished: SEND",
        ),
        (0, "F0 sF0 F1 sF1 rF0.1", "F0 rF0.1 sF0 F1 sF1", "rank 0, position 4, SEND_FORWARD(1)"),
        (1, "B1.1 B1 sB1", "B1.1", "rank 1, position 14, BACKWARD(1): missing at the end"),
    ],
    ids=["sent-within-a-rank", "chunks-swapped", "send-before-receive", "receive-before-send", "chunk-left-out"],
)  # fmt: skip
def test_broken_vs_are_refused(rank: int, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schedule(replaced(rank, old, new, GOOD_V), v_placement(2))


def test_good_schedules_are_accepted() -> None:
    check_schedule(schedule_of(*GOOD), loop_placement(3))
    check_schedule(schedule_of(*GOOD_V), v_placement(2))
    # The compute order of "a receive queued in front of a send", with the receive behind the send.
    check_schedule(
        schedule_of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 F0 sF0 rF1 rB0 B0 sB0 F1 sF1 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        ),
        loop_placement(3),
    )


def test_a_ring_of_sends_is_refused() -> None:
    """In a loop with every send in front of every receive, the ranks would wait for each other in a circle."""
    placement = loop_placement(2, 2)
    check_schedule(with_communication(schedule_of(*["F0 F1 F0.1 F1.1"] * 2), placement), placement)
    late = schedule_of(
        "F0 sF0 F1 sF1 rF0.1 F0.1 sF0.1 rF1.1 F1.1 sF1.1",
        "rF0 F0 sF0 rF1 F1 sF1 rF0.1 F0.1 rF1.1 F1.1",
    )
    with pytest.raises(ValueError, match="deadlock: waits forever"):
        check_schedule(late, placement)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0 B0"], "the schedule is for 1 ranks, but the pipeline has 2"),
        (["F0 B0 F1 B1", "F0 B0 F1 B1 F2"], "rank 1, position 4, FORWARD(2): there are 2 micro-batches"),
        (["F0 F1 B0", "F0 B0 F1 B1"], "rank 0, position 3, BACKWARD(1): missing at the end"),
        (["F0 B0 F1 B1", "F0 B0 B1 F1"], "rank 1, position 2, BACKWARD(1): a backward comes after its forward"),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            "rank 0, position 1, BACKWARD(0): deadlock: waits for BACKWARD(0) of rank 1, and rank 1 never",
        ),
        (["F0 sF0 B0 F1 B1", "F0 F1 B0 B1"], "rank 0, position 1, SEND_FORWARD(0): transfers follow"),
    ],
)
def test_compute_actions_that_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_compute(schedule_of(*lines), loop_placement(2), 2)


def test_a_deadlock_names_the_rank_that_waits_for_itself() -> None:
    lines = ["F0 F0.1 B0.1 B0", "F0.1 F0 B0.1 B0"]
    message = "rank 1, position 0, FORWARD(0, chunk 1): deadlock: waits for FORWARD(0) of rank 1, which comes later"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_compute(schedule_of(*lines), v_placement(2), 1)
