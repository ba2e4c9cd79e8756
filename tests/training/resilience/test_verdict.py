"""Which rank a verdict names, for reports as ranks write them in each kind of hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.training.resilience.verdict import CollectiveCall, ProcessLocation, Report, decide

RANKS = 4
PLACES = [ProcessLocation(f"node{rank // 2}", 100 + rank) for rank in range(RANKS)]


def others(rank: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> list[int]:
    return [other for other in ranks if other != rank]


def waiting(rank: int, number: int = 7, key: str = "g", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Report:
    """A rank that has begun call `number` of a group, and waits for it."""
    call = CollectiveCall("all_reduce", key, number, key, others(rank, ranks))
    groups = {"g": others(rank), key: others(rank, ranks)}
    return Report(
        rank, 3, "update", idle_seconds=9.0, begun={"g": 7, key: number}, others=groups, waits=[call],
        waits_for_device=False, where="training/trainer.py:1 in f",
    )  # fmt: skip


def busy(rank: int, number: int = 6) -> Report:
    where = "training/job.py:7 in _one_step"
    return Report(
        rank, 3, "data", idle_seconds=11.0, begun={"g": number}, others={"g": others(rank)}, waits=[],
        waits_for_device=False, where=where,
    )  # fmt: skip


def on_device(rank: int, number: int) -> Report:
    return replace(busy(rank, number), waits_for_device=True, section="update")


def message_at(rank: int, key: str, peer: int, number: int) -> Report:
    """A rank of a pipeline that waits to receive message `number` from `peer`."""
    own, theirs = f"p {peer}>{rank} received", f"p {peer}>{rank} sent"
    return Report(
        rank, 3, key, idle_seconds=9.0, begun={own: number}, others={},
        waits=[CollectiveCall("receive", own, number, theirs, [peer])], waits_for_device=False, where="x",
    )  # fmt: skip


def sender(rank: int, to: int, sent: int) -> Report:
    return Report(
        rank, 3, "forward and backward", idle_seconds=9.0, begun={f"p {rank}>{to} sent": sent}, others={}, waits=[],
        waits_for_device=False, where="here",
    )  # fmt: skip


STATES = {1: "T (stopped)"}
CASES: dict[str, tuple[list[Report], list[int], str]] = {
    "stopped": (
        [replace(waiting(0), process_states=STATES), waiting(2), waiting(3)], [1],
        "rank 1 on node0 (process 101) is stopped (by SIGSTOP, or a debugger)",
    ),
    "silent": ([waiting(r) for r in (0, 1, 2)], [3], "rank 3 on node1 (process 103) does not report"),
    "in Python": (
        [waiting(0), waiting(1), busy(2), waiting(3)], [2],
        "rank 2 on node1 (process 102) hangs in step 3, data, outside of collectives: training/job.py:7 in _one_step",
    ),
    "two in Python": ([busy(0), waiting(1), busy(2), waiting(3)], [0, 2], "rank 2 on node1 (process 102) hangs"),
    "left out": (  # rank 3 has gone on, and waits in another group for the others
        [waiting(0), waiting(1), waiting(2), replace(waiting(3, 21, "h"), begun={"g": 6, "h": 21}, step=4)], [3],
        "rank 3 on node1 (process 103) waits in all_reduce (number 21 with ranks 0, 1, 2), step 4, update, which the",
    ),
    "behind another": (  # 0 and 1 wait for 2, which waits for 3
        [waiting(0), waiting(1), replace(waiting(2, 5, "t", (2, 3)), begun={"g": 6, "t": 5}),
         replace(busy(3), begun={"g": 6, "t": 4})], [3], "rank 3 on node1 (process 103) hangs",
    ),
    "on devices": ([on_device(0, 7), on_device(1, 7), busy(2, 6), on_device(3, 7)], [2], "hangs in step 3, data"),
    "link": ([waiting(r) for r in range(RANKS)], [0, 1, 2, 3], "which all members have begun: the link between them"),
    "everybody": ([busy(r, 6) for r in range(RANKS)], [0, 1, 2, 3], "hangs in step 3"),
    "pipeline": (
        [sender(0, 1, 4), message_at(1, "a", 0, 5), message_at(2, "a", 1, 5), message_at(3, "a", 2, 5)], [0],
        "rank 0 on node0 (process 100) hangs in step 3, forward and backward, outside of collectives: here",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_rank_at_fault_is_named(case: str) -> None:
    reports, at_fault, text = CASES[case]
    verdict = decide({report.rank: report for report in reports}, PLACES, "runs/x/hangs/y")
    assert verdict.ranks == at_fault
    assert text in verdict.message
    assert verdict.message.splitlines()[-1] == "stacks of the ranks that could write them: runs/x/hangs/y"


def test_the_others_are_listed_by_what_they_wait_for() -> None:
    verdict = decide({r.rank: r for r in CASES["in Python"][0]}, PLACES, "f")
    assert verdict.message.splitlines()[0] == "no progress for 11 s in step 3"
    assert verdict.message.splitlines()[2] == "ranks 0, 1, 3: wait in all_reduce number 7, step 3, update"
