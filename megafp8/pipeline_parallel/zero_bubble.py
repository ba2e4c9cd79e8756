"""Schedules that fill the bubble with weight gradients.

A stage's backward is two computations. Its input's gradient is waited for by the stage before; its weights' gradients
are waited for by nobody until the optimizer steps. Split apart, the first can hurry through the pipeline and the second
be done where a rank would idle (Qi et al. 2024, arXiv:2401.10241). What that costs is memory: the operands of a weight
gradient, inputs and output gradients of linear layers (as FP8 codes where the layer is in FP8), live until it is done.

    zb_h1      one stage a rank; every rank holds what 1F1B's first rank holds; the bubble is (p - 1)(F + B - W) instead
               of (p - 1)(F + B + W), a third where F = B = W
    zb_v       two stages a rank in a V (Qi et al. 2024, arXiv:2405.15362); memory as zb_h1; where F = B = W no gap but
               the p - 1 forwards, of half-size stages, that it takes to reach the last rank: a sixth of 1F1B's bubble
    dualpipev  two stages a rank in a V (DeepSeek's DualPipe, arXiv:2412.19437, cut in half: Sea AI Lab's
               "DualPipe could be better without the dual"); splits few backwards; each steady forward is followed by a
               backward of another micro-batch, so that communication inside layers can hide behind it

Here DualPipeV's forward-backward pairs run one after the other: the pair's own overlap is for expert parallelism's
all-to-alls, which there are none of. F, B and W are times of a stage's forward, input's and weights' gradients.
"""

from __future__ import annotations

from collections import deque

from megafp8.pipeline_parallel.schedules import Action, Kind, Placement, Schedule, without

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


class _Rank:
    """A rank's list in the making: micro-batches of each kind and chunk come in order, weight gradients in their own.

    `split`, `whole` or `weight` of a chunk is its next backward without or with weight gradients, or its next weight
    gradients; `oldest` the weight gradients that have waited longest.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: dict[tuple[Kind, int], int] = {}
        self._waiting: deque[tuple[int, int]] = deque()

    def _next(self, kind: Kind, chunk: int) -> int:
        number = self._counts.get((kind, chunk), 0)
        self._counts[kind, chunk] = number + 1
        self.actions.append(Action(kind, number, chunk))
        return number

    def forward(self, chunk: int) -> None:
        self._next(F, chunk)

    def whole(self, chunk: int) -> None:
        self._next(B, chunk)

    def split(self, chunk: int) -> None:
        self._waiting.append((self._next(B, chunk), chunk))

    def weight(self, chunk: int) -> None:
        number = next(number for number, c in self._waiting if c == chunk)
        self._waiting.remove((number, chunk))
        self.actions.append(Action(W, number, chunk))

    def oldest(self) -> None:
        number, chunk = self._waiting.popleft()
        self.actions.append(Action(W, number, chunk))

    def count(self, kind: Kind, chunk: int) -> int:
        return self._counts.get((kind, chunk), 0)

    def drain(self) -> None:
        while self._waiting:
            self.oldest()


def zb_h1(placement: Placement, num_microbatches: int) -> Schedule:
    """ZB-H1 on one stage a rank: 1F1B whose rank r is r micro-batches late with its weight gradients.

    So every rank holds at most p micro-batches until their last gradient. Any m.
    """
    assert placement.num_chunks == 1
    schedule = []
    for r in range(placement.num_ranks):
        rank = _Rank()
        for _ in range(min(placement.num_ranks - r - 1, num_microbatches)):
            rank.forward(0)
        for number in range(num_microbatches):
            draining = rank.count(F, 0) == num_microbatches
            if not draining:
                rank.forward(0)
            rank.split(0)
            if draining or number >= r:
                rank.oldest()
        rank.drain()
        schedule.append(rank.actions)
    return schedule


def zb_v(placement: Placement, num_microbatches: int) -> Schedule:
    """ZB-V on two stages a rank in a V. Any m; from 2p - 1 on the steady state is reached."""
    assert placement.num_chunks == 2
    p = placement.num_ranks
    made = max(2 * p - 1, num_microbatches)
    return without([_zb_v_rank(p, r, made) for r in range(p)], num_microbatches)


def _zb_v_rank(p: int, r: int, m: int) -> list[Action]:
    rank = _Rank()

    def backward(chunk: int) -> None:
        rank.split(chunk)
        rank.weight(chunk)

    for _ in range(2 * (p - r) - 1):
        rank.forward(0)
    for _ in range(r):
        rank.forward(1)
        rank.forward(0)
    for _ in range(p - r):
        rank.forward(1)
        backward(1)
    while rank.count(F, 1) < m:
        if rank.count(F, 0) < m:
            rank.forward(0)
        backward(0)
        rank.forward(1)
        backward(1)
    for _ in range(r):
        rank.split(0)
        rank.split(1)
    for _ in range(p - r):
        rank.split(0)
        rank.weight(0)
    rank.drain()
    return rank.actions


def dualpipev(placement: Placement, num_microbatches: int) -> Schedule:
    """DualPipeV on two stages a rank in a V. Any m; from 2p on the steady state is reached."""
    assert placement.num_chunks == 2
    p = placement.num_ranks
    made = max(2 * p, num_microbatches)
    return without([_dualpipev_rank(p, r, made) for r in range(p)], num_microbatches)


def _dualpipev_rank(p: int, r: int, m: int) -> list[Action]:
    """The eight steps of DeepSeek's implementation."""
    rank = _Rank()
    for _ in range(2 * (p - r - 1)):  # 1
        rank.forward(0)
    for _ in range(r + 1):  # 2
        rank.forward(0)
        rank.forward(1)
    for _ in range(p - r - 1):  # 3
        rank.split(1)
        rank.oldest()
        rank.forward(1)
    for _ in range(m - 2 * p + r + 1):  # 4: the steady state
        rank.forward(0)
        rank.whole(1)
        rank.forward(1)
        rank.whole(0)
    for _ in range(p - r - 1):  # 5
        rank.whole(1)
        rank.forward(1)
        rank.whole(0)
    # 6 to 8: from the middle of step 6 on, weight gradients are kept for the gaps of steps 7 and 8
    for i in range(2 * (r + 1)):  # 6
        (rank.split if i > r else rank.whole)(1 - i % 2)
    for _ in range(p - r - 1):  # 7
        rank.oldest()
        rank.split(0)
    rank.drain()  # 8
    return rank.actions
