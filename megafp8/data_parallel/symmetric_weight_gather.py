"""The `Carrier` of FP8 codes that GPUs of one host fetch from each other's memory.

An all-gather is a meeting: nobody gets anything before all are there, its kernels take multiprocessors from the GEMMs
that they run beside, and it stands in one queue with the reduction of gradients. But codes change once a step, so a
rank can fetch a block's whenever it wants them, by its copy engines, and the others take no part in it. Codes need two
barriers a step: before they are overwritten everyone has fetched for the last time, and when they have been written
everyone may fetch. (What a block has beside codes, its norms, torch gathers as ever.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.symmetric_memory import Mapped, starts


class Pulled:
    """Codes of `group`, GPUs of one host; `sizes`: of each weight, bytes of a rank. Collective: build it on every rank.

    RuntimeError, on every rank alike, where symmetric memory cannot be set up.
    """

    def __init__(self, sizes: Sequence[int], group: ProcessGroup, device: torch.device) -> None:
        buffer = Mapped(starts(sizes)[-1], group, device)
        self._of, self._rank, self._barrier = buffer.places(tuple(sizes)), group.rank(), buffer.barrier
        buffer.of[self._rank].zero_()  # rows that mean nothing are codes, too
        self.own: list[Tensor] = self._of[self._rank]

    def bring(self, weights: Sequence[int], places: Sequence[Tensor]) -> None:
        t = len(self._of)
        for step in range(t):  # each from another, so that nobody is asked by all at the same time
            rank = (self._rank + step) % t
            for i, place in zip(weights, places):
                place[rank].copy_(self._of[rank][i])

    def settle(self) -> None:
        self._barrier()
