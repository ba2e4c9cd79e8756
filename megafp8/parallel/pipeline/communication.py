"""Insertion of sends and receives into a schedule, in an order that cannot deadlock.

A rank's transfers in one direction (activations forward, or gradients backward) go through one queue in issue order,
because an NCCL process group has one communicator and one stream for its point-to-point calls. Two ranks that both send
first and then receive deadlock, and so does a ring of ranks. In loop and V placements, activations are sent both ways
between the same ranks, and any fixed rule such as "receive first" can run into such a deadlock.

Therefore all ranks use one global order. The compute actions are simulated with equally fast stages, and the transfers
of a direction are sorted by the time at which their tensors are produced. Each rank queues its part of the transfers in
that order. A send comes directly after the action that produces the tensor. A receive comes before the compute action
that its rank executes at that time, or one compute action before the action that needs it, if that is earlier; but it
comes after all transfers that are earlier in the order.

*Why this always ends.* Take the first transfer, in the global order, that does not happen. All transfers before it have
happened. Both its ranks reach the point where they issue it: all their earlier computation needs only tensors that
were produced earlier, and a send waits at most for the send before it. At both ends the transfer is at the head of its
queue. So it happens. The argument needs no particular times, only that every action takes some time; real times that
differ from the simulated times cost waiting, but never cause a deadlock. `check_schedule` checks the resulting lists
once more.

A receive that waits for its sender delays the sends queued behind it, but not the computation. Tensors are received
when they are produced, so a sender never waits for a receiver that does not need them yet; instead, the receiver's
buffer uses the memory.
"""

from __future__ import annotations

from bisect import bisect_left

from megafp8.parallel.pipeline.actions import RECEIVE_BEFORE, SEND_AFTER, Action, Kind, Schedule, StagePlacement
from megafp8.parallel.pipeline.simulate import TimedAction, simulate

_Order = tuple[float, int, int]
"""Place of a transfer in the global order: time at which its tensor is produced, micro-batch and stage."""


def with_communication(compute: Schedule, placement: StagePlacement) -> Schedule:
    """Return `compute` with every send and receive added; raise ValueError if it deadlocks.

    The first stage receives no activation and sends no gradient, and the last stage sends no activation and receives no
    gradient. Stages on one rank pass tensors without a transfer.
    """
    timeline = simulate(compute, placement).spans
    orders: dict[tuple[Kind, int, int], _Order] = {}  # by direction, micro-batch and stage that produces the tensor
    for stages, spans in zip(placement.stages, timeline):
        for (kind, microbatch, chunk), _, end in spans:
            orders[kind, microbatch, stages[chunk]] = (end, microbatch, stages[chunk])
    return [_communicate(spans, rank, placement, orders) for rank, spans in enumerate(timeline)]


def _communicate(
    spans: list[TimedAction], rank: int, placement: StagePlacement, orders: dict[tuple[Kind, int, int], _Order]
) -> list[Action]:
    """Return the actions of one rank."""
    receives: list[list[Action]] = [[] for _ in spans]  # before each compute action
    sends: list[list[Action]] = [[] for _ in spans]  # after each compute action
    ends = [span.end for span in spans]
    for direction in RECEIVE_BEFORE:
        queue: list[tuple[_Order, int, Action]] = []
        maker = -1 if direction is Kind.FORWARD else 1  # stage that produces the received tensor, relative to this one
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
