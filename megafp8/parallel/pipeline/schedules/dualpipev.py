"""DualPipeV: half of DeepSeek's DualPipe (arXiv:2412.19437), on two stages per rank in a V.

The schedule comes from Sea AI Lab's "DualPipe could be better without the dual". Few backwards are split; in the steady
state, each forward is followed by a backward of another micro-batch. The pairs are meant to overlap the all-to-alls of
expert parallelism with computation. This implementation has no such overlap and runs the two one after the other.
"""

from __future__ import annotations

from megafp8.parallel.pipeline.schedules import Action, RankActions, Schedule, ScheduleRecord, StagePlacement, truncated


def dualpipev(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Build DualPipeV for any m; the schedule reaches its steady state from m = 2p on."""
    p = placement.num_ranks
    m = max(2 * p, num_microbatches)
    return truncated([_rank_actions(p, r, m) for r in range(p)], num_microbatches)


def _rank_actions(p: int, r: int, m: int) -> list[Action]:
    """Build one rank's actions in the eight steps of DeepSeek's implementation."""
    rank = RankActions()
    for _ in range(2 * (p - r - 1)):  # 1
        rank.forward(0)
    for _ in range(r + 1):  # 2
        rank.forward(0)
        rank.forward(1)
    for _ in range(p - r - 1):  # 3
        rank.split_backward(1)
        rank.weight()
        rank.forward(1)
    for _ in range(m - 2 * p + r + 1):  # 4: the steady state
        rank.forward(0)
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    for _ in range(p - r - 1):  # 5
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    # 6 to 8: from the middle of step 6 on, weight gradients are left for the gaps of steps 7 and 8
    for i in range(2 * (r + 1)):  # 6
        (rank.split_backward if i > r else rank.backward)(1 - i % 2)
    for _ in range(p - r - 1):  # 7
        rank.weight()
        rank.split_backward(0)
    rank.pending_weights()  # 8
    return rank.actions


SCHEDULE = ScheduleRecord("dualpipev", dualpipev, chunks=2, placement="v", splits_wgrad=True)
