"""ZB-H1: 1F1B that fills part of its bubble with weight gradients (Qi et al. 2024, arXiv:2401.10241).

The previous stage waits for the gradient of a stage's input, but nothing waits for the weight gradients until the
optimizer step. If they are split from the input gradient, they can be computed when a rank would otherwise be idle.
This costs memory: the operands of a weight gradient, which are inputs and output gradients of linear layers (in FP8 if
the layer is), are held until then.
"""

from __future__ import annotations

from megafp8.parallel.pipeline.schedules import RankActions, Schedule, ScheduleRecord, StagePlacement


def zb_h1(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Build 1F1B in which rank r computes weight gradients r micro-batches late.

    Every rank holds at most p micro-batches until their last gradient, like the first rank of 1F1B. The bubble is (p -
    1)(F + B - W) instead of (p - 1)(F + B + W): a third, if F = B = W. Any m works.
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
