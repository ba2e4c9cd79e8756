"""A `TPOverlap` for tests on CPU that splits GEMMs as `SymmetricMemory` does; nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import DONE, as_bytes
from megafp8.parallel.tp_overlap import (
    MAX_CHUNKS,
    AllGatherHandle,
    Product,
    ReduceHandle,
    compute_partials,
    ring_steps,
    sum_partials,
)


class InChunks:
    """Gathers and sums with collectives of torch, and lets layers compute chunk by chunk, their own tokens first."""

    def __init__(self, group: ProcessGroup, *_: object) -> None:
        self.group = group
        self._steps = ring_steps(group.rank(), group.size(), MAX_CHUNKS)

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        t = self.group.size()
        gathered = [x.new_empty((t * x.shape[0], *x.shape[1:])) for x in own]
        for out, x in zip(gathered, own):
            dist.all_gather_into_tensor(as_bytes(out), as_bytes(x), group=self.group)
        return AllGatherHandle(gathered, [(step.rows(gathered[0].shape[0], t), DONE.wait) for step in self._steps])

    def sum(self, product: Product) -> ReduceHandle:
        t, rank = self.group.size(), self.group.rank()
        partials_trn = product.empty(t, product.input.wait()[0].shape[0] // t)
        own, *others = self._steps
        for step in (*others, own):
            for receiver, partial in compute_partials(product, step, partials_trn, rank).items():
                partials_trn[receiver] = partial
        received_trn = torch.empty_like(partials_trn)
        dist.all_to_all_single(received_trn, partials_trn, group=self.group)
        return ReduceHandle(DONE, lambda: sum_partials(received_trn))
