"""1F1B: PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from megafp8.parallel.pipeline.schedules import RankActions, Schedule, ScheduleRecord, StagePlacement


def one_f_one_b(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Build 1F1B: p - r - 1 forwards on rank r, then alternating forwards and backwards, then the remaining backwards.

    Rank r holds at most p - r micro-batches for their backward, for any m. The bubble is (p - 1) / (m + p - 1) of the
    time. m may be smaller than p.
    """
    schedule = []
    for r in range(placement.num_ranks):
        rank = RankActions()
        for _ in range(min(placement.num_ranks - r - 1, num_microbatches)):
            rank.forward()
        for _ in range(num_microbatches):
            if rank.num_forwards() < num_microbatches:
                rank.forward()
            rank.backward()
        schedule.append(rank.actions)
    return schedule


SCHEDULE = ScheduleRecord("1f1b", one_f_one_b)
