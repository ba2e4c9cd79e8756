"""ZB-H1: 1F1B that fills part of its bubble with weight gradients (Qi et al. 2024, arXiv:2401.10241).

The stage before waits for the gradient of a stage's input; nothing waits for the weight gradients until the optimizer
steps. Split from the input gradient, they can be computed where a rank would be idle. This costs memory: the operands
of a weight gradient, inputs and output gradients of linear layers (in FP8 where the layer is), are held until then.
"""

from __future__ import annotations

from megafp8.parallel.pipeline.schedules import RankActions, Schedule, ScheduleRecord, StagePlacement


def zb_h1(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """1F1B whose rank r computes weight gradients r micro-batches late.

    Every rank holds at most p micro-batches until their last gradient, as the first rank of 1F1B does. The bubble is
    (p - 1)(F + B - W) instead of (p - 1)(F + B + W): a third, where F = B = W. Any m.
    """
    schedule = []
    for r in range(placement.num_ranks):
        rank = RankActions()
        for _ in range(min(placement.num_ranks - r - 1, num_microbatches)):
            rank.forward()
        for number in range(num_microbatches):
            draining = rank.num_forwards() == num_microbatches
            if not draining:
                rank.forward()
            rank.split_backward()
            if draining or number >= r:
                rank.weight()
        rank.pending_weights()
        schedule.append(rank.actions)
    return schedule


SCHEDULE = ScheduleRecord("zb-h1", zb_h1, splits_wgrad=True)
