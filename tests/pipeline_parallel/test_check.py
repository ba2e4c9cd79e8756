"""The checker: everything that is built passes, and schedules broken by hand do not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.pipeline_parallel.check import check_compute, check_schedule
from megafp8.pipeline_parallel.communication import with_communication
from megafp8.pipeline_parallel.registry import BUILT_IN
from megafp8.pipeline_parallel.schedules import (
    Action,
    Kind,
    Placement,
    Schedule,
    forward_only,
    in_a_v,
    in_turns,
)

microbatches = st.integers(1, 24)
KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "W": Kind.WEIGHT,
    "sF": Kind.SEND_FORWARD,
    "rF": Kind.RECV_FORWARD,
    "sB": Kind.SEND_BACKWARD,
    "rB": Kind.RECV_BACKWARD,
}


def actions(line: str) -> list[Action]:
    """`"rF0 F0 F0.1"` as actions; what follows the point is the chunk."""
    parts = [re.fullmatch(r"([sr]?[FBW])(\d+)(?:\.(\d+))?", word) for word in line.split()]
    return [Action(KINDS[part[1]], int(part[2]), int(part[3] or 0)) for part in parts if part]


placements = st.one_of(
    st.builds(in_turns, st.integers(1, 8)),
    st.builds(in_turns, st.integers(1, 6), st.integers(2, 4)),
    st.builds(in_a_v, st.integers(1, 8)),
)


def builders(placement: Placement) -> list[str]:
    """The built-in schedules for a placement."""
    if placement.num_chunks == 1:
        return ["1f1b", "zb-h1"]
    return ["zb-v", "dualpipev"] if placement == in_a_v(placement.num_ranks) else ["interleaved"]


@settings(max_examples=60)
@given(placement=placements, m=microbatches)
def test_what_the_builders_make_is_fit_to_run(placement: Placement, m: int) -> None:
    built = [BUILT_IN[name](placement, m) for name in builders(placement)]
    for compute in [*built, forward_only(placement, m)]:
        check_compute(compute, placement, m)
        check_schedule(with_communication(compute, placement), placement)


@settings(max_examples=60)
@given(data=st.data(), p=st.integers(1, 4), v=st.integers(1, 3), m=st.integers(1, 6))
def test_any_order_that_can_be_carried_out_gets_communication_that_ends(
    data: st.DataObject, p: int, v: int, m: int
) -> None:
    """Schedules as a user may write them: stages anywhere, and at each moment some rank does something it can do."""
    homes = data.draw(st.permutations(range(p * v)))
    placement = Placement(tuple(tuple(homes[r * v : (r + 1) * v]) for r in range(p)))
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
        "rank 1, position 3, RECV_FORWARD(2): rank 0 sends what RECV_FORWARD(1) receives here; receives follow",
    ),
    "weight gradients before their backward": (
        replace(0, "B0 rB2", "W0 B0 rB2"),
        "rank 0, position 8, WEIGHT(0): weight gradients come after their backward",
    ),
    "weight gradients without a backward": (
        of("F0 W0"),
        "rank 0, position 2, BACKWARD(0): missing at the end",
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
    "negative": (lambda: [[Action(Kind.FORWARD, -1), Action(Kind.FORWARD, 0)]], "micro-batches, numbered from 0"),
    "chunk": (of("F0.1"), "rank 0, position 0, FORWARD(0, chunk 1): a rank of this pipeline holds 1 chunks"),
}


def test_the_schedule_that_the_broken_ones_start_from_is_good() -> None:
    check_schedule([actions(line) for line in GOOD], in_turns(3))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_schedules_are_refused(case: str) -> None:
    build, message = BROKEN[case]
    schedule = build()
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schedule(schedule, in_turns(len(schedule)))


def test_the_queue_deadlock_is_about_the_queue_alone() -> None:
    """The same compute order with the receive behind the send is fine."""
    check_schedule(
        of(
            "F0 sF0 rB0 B0 F1 sF1 rB1 B1",
            "rF0 F0 sF0 rF1 rB0 B0 sB0 F1 sF1 rB1 B1 sB1",
            "rF0 F0 B0 sB0 rF1 F1 B1 sB1",
        )(),
        in_turns(3),
    )


# Two micro-batches through the V of two ranks, whose turn is on rank 1. Activations go both ways between the ranks.
GOOD_V = [
    "F0 sF0 F1 sF1 rF0.1 rF1.1 F0.1 B0.1 sB0.1 F1.1 B1.1 sB1.1 rB0 rB1 B0 B1",
    "rF0 F0 rF1 F0.1 sF0.1 F1 F1.1 sF1.1 rB0.1 rB1.1 B0.1 B0 sB0 B1.1 B1 sB1",
]
BROKEN_V = {
    "sent over the turn": (
        1,
        "F0 rF1 F0.1",
        "F0 sF0 rF1 F0.1",
        "rank 1, position 2, SEND_FORWARD(0): stage 1 of 4 has no",
    ),
    "the turn before its forward": (1, "F0 rF1 F0.1", "F0.1 rF1 F0", "rank 0, position 6, FORWARD(0, chunk 1): deadl"),
    "a send before a receive": (
        1,
        "F0 rF1 F0.1 sF0.1 F1",
        "F0 F0.1 sF0.1 rF1 F1",
        "rank 0, position 6, FORWARD(0, chunk 1): deadlock: waits for ever; transfers issued and not through: SEND_FOR",
    ),
    "a receive before a send": (0, "F0 sF0 F1 sF1 rF0.1", "F0 rF0.1 sF0 F1 sF1", "rank 0, position 4, SEND_FORWARD(1)"),
    "a chunk left out": (1, "B1.1 B1 sB1", "B1.1", "rank 1, position 14, BACKWARD(1): missing at the end"),
}


def test_the_v_that_the_broken_ones_start_from_is_good() -> None:
    check_schedule([actions(line) for line in GOOD_V], in_a_v(2))


@pytest.mark.parametrize("case", BROKEN_V)
def test_broken_vs_are_refused(case: str) -> None:
    rank, old, new, message = BROKEN_V[case]
    lines = list(GOOD_V)
    assert old in lines[rank]
    lines[rank] = lines[rank].replace(old, new, 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schedule([actions(line) for line in lines], in_a_v(2))


def test_a_ring_of_sends_is_refused() -> None:
    """Stages in turns: with every send in front of every receive, the ranks would wait for each other in a circle."""
    compute = [actions("F0 F1 F0.1 F1.1"), actions("F0 F1 F0.1 F1.1")]
    schedule = with_communication(compute, in_turns(2, 2))
    check_schedule(schedule, in_turns(2, 2))
    late = [actions("F0 sF0 F1 sF1 rF0.1 F0.1 sF0.1 rF1.1 F1.1 sF1.1")]
    late += [actions("rF0 F0 sF0 rF1 F1 sF1 rF0.1 F0.1 rF1.1 F1.1")]
    with pytest.raises(ValueError, match="deadlock: waits for ever"):
        check_schedule(late, in_turns(2, 2))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0 B0"], "the schedule is for 1 ranks, the pipeline has 2"),
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
        check_compute([actions(line) for line in lines], in_turns(2), 2)


def test_a_deadlock_names_the_rank_that_waits_for_itself() -> None:
    lines = ["F0 F0.1 B0.1 B0", "F0.1 F0 B0.1 B0"]
    message = "rank 1, position 0, FORWARD(0, chunk 1): deadlock: waits for FORWARD(0) of rank 1, which comes later"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_compute([actions(line) for line in lines], in_a_v(2), 1)
