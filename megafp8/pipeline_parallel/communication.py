"""The sends and receives of a schedule, in an order in which none can wait for ever.

A rank's transfers in one direction (activations forward, or gradients backward) pass through one queue in the order
they were issued: so it is on NCCL, where a process group has a communicator and a stream for its point-to-point calls.
Two ranks that both send first and then receive hold each other up for ever, and so does a ring of ranks; with stages in
turns or in a V, where activations travel both ways between the same ranks, any fixed rule such as "receive first" meets
such a case.

So there is one order for all. The compute actions are played out (`simulate`), every stage equally fast, and the
transfers of a direction are put in the order of the moments at which their tensors are made. Each rank queues its part
of the transfers in that order: a send directly after what makes the tensor; a receive in front of the compute action
that its rank is in at that moment, or one compute action before the one that needs it, if that is earlier; but behind
whatever comes earlier in the order.

*Why this always ends.* Take the first transfer, in the order of all, that does not happen. Everything before it has
happened. Its two ranks have come to where they post it: all that they compute before needs transfers whose tensors
were made earlier, and a send waits at most for the one before it. At both ends it stands first in its queue. So it
happens. The argument needs no particular times, only that every action takes some; real ones may differ from the
played ones and cost waiting, never a deadlock. `check_schedule` proves it once more for the very lists that will run.

A receive that waits for its sender holds back the sends queued behind it, though not the computation. As tensors are
received when they are made, a sender never waits for a receiver that has yet to need them; the receiver's buffer takes
the memory instead.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from megafp8.pipeline_parallel.schedules import RECEIVE_BEFORE, SEND_AFTER, Action, Kind, Placement, Schedule
from megafp8.pipeline_parallel.simulate import Span, simulate


@dataclass(frozen=True, order=True)
class _Moment:
    """Where a transfer stands in the order of all; equal moments are put in order by micro-batch and stage."""

    time: float
    microbatch: int
    stage: int


def with_communication(compute: Schedule, placement: Placement) -> Schedule:
    """`compute` with every send and receive added. Raises ValueError where its actions wait for each other for ever.

    The first stage receives no activation and sends no gradient, the last sends no activation and receives no gradient,
    and stages of one rank hand over without sending.
    """
    spans = simulate(compute, placement).spans
    made: dict[tuple[Kind, int, int], _Moment] = {}  # by direction, micro-batch and the stage that makes the tensor
    for rank, stages in enumerate(placement.stages):
        for span in spans[rank]:
            a, stage = span.action, stages[span.action.chunk]
            made[a.kind, a.microbatch, stage] = _Moment(span.end, a.microbatch, stage)
    return [_communicate(spans[rank], rank, placement, made) for rank in range(placement.num_ranks)]


def _communicate(
    spans: list[Span], rank: int, placement: Placement, made: dict[tuple[Kind, int, int], _Moment]
) -> list[Action]:
    """The list of one rank."""
    slots: list[list[Action]] = [[] for _ in spans]  # receives in front of each compute action
    sends: list[list[Action]] = [[] for _ in spans]  # what each is followed by
    ends = [span.end for span in spans]
    queues: dict[Kind, list[tuple[_Moment, int, Action]]] = {direction: [] for direction in RECEIVE_BEFORE}
    for k, span in enumerate(spans):
        action, stage = span.action, placement.stages[rank][span.action.chunk]
        for table in (RECEIVE_BEFORE, SEND_AFTER):
            kind = table.get(action.kind)
            if kind is None or placement.peer(kind, rank, action.chunk) is None:
                continue
            maker = stage
            if table is RECEIVE_BEFORE:
                maker += -1 if action.kind is Kind.FORWARD else 1
            transfer = Action(kind, action.microbatch, action.chunk)
            queues[action.kind].append((made[action.kind, action.microbatch, maker], k, transfer))
    for direction, queue in queues.items():
        earliest = 0
        for moment, k, transfer in sorted(queue, key=lambda entry: entry[0]):
            if transfer.kind is SEND_AFTER[direction]:
                sends[k].append(transfer)
                earliest = k + 1
            else:
                running = bisect_left(ends, moment.time)
                earliest = max(earliest, min(running, max(k - 1, 0)))
                slots[earliest].append(transfer)
    return [a for k, span in enumerate(spans) for a in (*slots[k], span.action, *sends[k])]
