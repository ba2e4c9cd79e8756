"""ZB-V: zero bubble on two stages per rank in a V (Qi et al. 2024, arXiv:2405.15362).

Backwards are split as in `zb_h1.py`, with the same memory. If F = B = W, the only idle time is the p - 1 forwards of
half-size stages until the last rank starts: a sixth of 1F1B's bubble.
"""

from __future__ import annotations

from megafp8.parallel.pipeline.schedules import Action, RankActions, Schedule, ScheduleRecord, StagePlacement, truncated


def zb_v(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Build ZB-V for any m; the schedule reaches its steady state from m = 2p - 1 on."""
    p = placement.num_ranks
    m = max(2 * p - 1, num_microbatches)
    return truncated([_rank_actions(p, r, m) for r in range(p)], num_microbatches)


def _rank_actions(p: int, r: int, m: int) -> list[Action]:
    """Build one rank's actions."""
    rank = RankActions()

    def backward(chunk: int) -> None:
        rank.split_backward(chunk)
        rank.weight(chunk)

    for _ in range(2 * (p - r) - 1):
        rank.forward(0)
    for _ in range(r):
        rank.forward(1)
        rank.forward(0)
    for _ in range(p - r):
        rank.forward(1)
        backward(1)
    while rank.num_forwards(1) < m:
        if rank.num_forwards(0) < m:
            rank.forward(0)
        backward(0)
        rank.forward(1)
        backward(1)
    for _ in range(r):
        rank.split_backward(0)
        rank.split_backward(1)
    for _ in range(p - r):
        rank.split_backward(0)
        rank.weight(0)
    rank.pending_weights()
    return rank.actions


SCHEDULE = ScheduleRecord("zb-v", zb_v, chunks=2, placement="v", splits_wgrad=True)
