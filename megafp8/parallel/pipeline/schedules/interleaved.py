"""Interleaved 1F1B on v stages per rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.parallel.pipeline.schedules import Action, Kind, Schedule, ScheduleRecord, StagePlacement, truncated


def interleaved(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Build 1F1B in which each rank takes p micro-batches through a chunk before it moves to the next chunk.

    Rank r is 2(p - r - 1) + (v - 1)p forwards ahead of its backwards. The bubble is (p - 1) / (v·m + p - 1) of the time
    if p divides m; otherwise the last round has gaps.
    """
    p, v = placement.num_ranks, placement.num_chunks
    rounds = -(-num_microbatches // p)

    def order(kind: Kind, chunks: Sequence[int]) -> list[Action]:
        return [Action(kind, n * p + i, c) for n in range(rounds) for c in chunks for i in range(p)]

    forwards, backwards = order(Kind.FORWARD, range(v)), order(Kind.BACKWARD, range(v)[::-1])
    schedule = []
    for rank in range(p):
        ahead = min(2 * (p - rank - 1) + (v - 1) * p, len(forwards))
        steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
        schedule.append([*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]])
    return truncated(schedule, num_microbatches)


SCHEDULE = ScheduleRecord("interleaved", interleaved, chunks=None)
