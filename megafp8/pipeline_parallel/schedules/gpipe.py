"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""

from __future__ import annotations

from megafp8.pipeline_parallel.schedules import Placement, RankActions, Schedule, ScheduleRecord


def gpipe(placement: Placement, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards; every rank holds m micro-batches. The bubble is that of 1F1B."""
    rank = RankActions()
    for _ in range(num_microbatches):
        rank.forward()
    for _ in range(num_microbatches):
        rank.backward()
    return [rank.actions for _ in range(placement.num_ranks)]


SCHEDULE = ScheduleRecord("gpipe", gpipe)
