"""Adds the sends and receives to a schedule, in an order that cannot deadlock.

A rank's transfers in one direction (activations forward, or gradients backward) go through one queue in issue order:
an NCCL process group has one communicator and one stream for its point-to-point calls. Two ranks that both send first
and then receive deadlock, and so does a ring of ranks. In loop and V placements activations travel both ways between
the same ranks, and any fixed rule such as "receive first" meets such a case.

Therefore one global order is used. The compute actions are simulated with equally fast stages, and the transfers of a
direction are sorted by the time at which their tensors are made. Each rank queues its part of the transfers in that
order: a send directly after the action that makes the tensor; a receive in front of the compute action that its rank
executes at that time, or one compute action before the one that needs it, if that is earlier; but behind whatever comes
earlier in the order.

*Why this always ends.* Take the first transfer, in the global order, that does not happen. Everything before it has
happened. Both its ranks reach the point where they issue it: all that they compute before needs transfers whose tensors
were made earlier, and a send waits at most for the one before it. At both ends it is at the head of its queue. So it
happens. The argument needs no particular times, only that every action takes some; real times that differ from the
simulated ones cost waiting, never a deadlock. `check_schedule` checks the resulting lists once more.

A receive that waits for its sender delays the sends queued behind it, but not the computation. As tensors are received
when they are made, a sender never waits for a receiver that does not need them yet; the receiver's buffer takes the
memory instead.
"""

from __future__ import annotations

from bisect import bisect_left

from megafp8.parallel.pipeline.actions import RECEIVE_BEFORE, SEND_AFTER, Action, Kind, Schedule, StagePlacement
from megafp8.parallel.pipeline.simulate import TimedAction, simulate

_Order = tuple[float, int, int]
"""A transfer's place in the global order: when its tensor is made, then micro-batch and stage, to break ties."""


def with_communication(compute: Schedule, placement: StagePlacement) -> Schedule:
    """`compute` with every send and receive added. Raises ValueError where it deadlocks.

    The first stage receives no activation and sends no gradient, the last sends no activation and receives no gradient,
    and stages of one rank pass tensors without a transfer.
    """
    timeline = simulate(compute, placement).spans
    orders: dict[tuple[Kind, int, int], _Order] = {}  # by direction, micro-batch and the stage that makes the tensor
    for stages, spans in zip(placement.stages, timeline):
        for (kind, microbatch, chunk), _, end in spans:
            orders[kind, microbatch, stages[chunk]] = (end, microbatch, stages[chunk])
    return [_communicate(spans, rank, placement, orders) for rank, spans in enumerate(timeline)]


def _communicate(
    spans: list[TimedAction], rank: int, placement: StagePlacement, orders: dict[tuple[Kind, int, int], _Order]
) -> list[Action]:
    """The actions of one rank."""
    receives: list[list[Action]] = [[] for _ in spans]  # in front of each compute action
    sends: list[list[Action]] = [[] for _ in spans]  # behind it
    ends = [span.end for span in spans]
    for direction in RECEIVE_BEFORE:
        queue: list[tuple[_Order, int, Action]] = []
        maker = -1 if direction is Kind.FORWARD else 1  # of what is received, relative to the own stage
        for k, span in enumerate(spans):
            kind, microbatch, chunk = span.action
            if kind is not direction:
                continue
            stage = placement.stages[rank][chunk]
            for transfer, source in ((RECEIVE_BEFORE[kind], stage + maker), (SEND_AFTER[kind], stage)):
                if placement.peer(transfer, rank, chunk) is not None:
                    queue.append((orders[kind, microbatch, source], k, Action(transfer, microbatch, chunk)))
        earliest = 0
        for order, k, transfer_action in sorted(queue, key=lambda entry: entry[0]):
            if transfer_action.kind is SEND_AFTER[direction]:
                sends[k].append(transfer_action)
                earliest = k + 1
            else:
                running = bisect_left(ends, order[0])
                earliest = max(earliest, min(running, max(k - 1, 0)))
                receives[earliest].append(transfer_action)
    return [a for k, span in enumerate(spans) for a in (*receives[k], span.action, *sends[k])]
