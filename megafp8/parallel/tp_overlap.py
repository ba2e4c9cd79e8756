"""Overlap of tensor-parallel communication with GEMMs.

A tensor-parallel layer is a GEMM with a collective on one side. Its input may have to be gathered: x in forward of a
column-parallel layer, dy in backward of a row-parallel one. Or its output is a partial sum on each rank: y of a
row-parallel layer, dx of a column-parallel one. A `TPOverlap` implements these two directions; a layer has one at
either end (`megafp8.linear.quantized_gather.TPComm`) and does not know which.

    Replicated       every rank has all tokens: nothing to gather, partial sums are all-reduced
    Collective       tokens are sharded: one all-gather, one reduce-scatter
    SymmetricMemory  the same rank by rank, each chunk multiplied while the GPUs' copy engines transfer the next one
                     (`megafp8.parallel.tp_symmetric`)

*What overlaps.* A sum is started when its GEMM has been queued and waited for when its result is needed, so the sum of
dx runs beside the weight gradient in every mode. Forward has no such independent work: there the GEMM itself is split
into chunks of tokens. A chunk is the tokens of one rank, so chunks need no reordering. Gathering starts with the GEMM
of the local tokens while the next rank's arrive; summing ends with the chunk that this rank keeps, while the others
are sent. Rank r exchanges with rank r + 1 first, then r + 2, so each link carries one chunk at a time. With more than
four ranks, neighbours form one chunk (`ring_steps`): an eighth of a GEMM has too few tiles to fill a GPU.

*Numerics.* Gathering moves bits. A row of a product is the same sum over k however many rows there are, but a GEMM may
use another order of additions for another shape; `SymmetricMemory` changes nothing else. It adds partial sums in fp32
in the order of ranks and rounds once; a collective adds in the library's order and rounds at each hop. With two ranks
both are the same.

*Cost.* GEMMs of fewer rows fill the GPU less evenly, and the partial sums, as large as the product, are in memory until
they have been added.

Shapes: m rows (tokens), n columns of a product; t ranks, each with m/t of the rows. A "chunk" is a slice of the m rows:
those of one rank, of g neighbouring ranks, or all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import (
    DONE,
    CollectiveWork,
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)

MAX_CHUNKS = 4
"""Chunks that a GEMM is split into, at most."""


class AllGatherHandle:
    """A running all-gather of matrices into `gathered`, the first of them `[m, c]`.

    Iterating yields chunks in the order of arrival, each once the current stream may read it. Iterate once, and take
    all chunks or call `wait` before `gathered` is freed.
    """

    def __init__(self, gathered: list[Tensor], chunks: Iterable[tuple[slice, Callable[[], Any]]]) -> None:
        self.gathered = gathered
        self._chunks = deque(chunks)

    @property
    def is_chunked(self) -> bool:
        return len(self._chunks) > 1

    def __iter__(self) -> Iterator[slice]:
        while self._chunks:
            chunk, wait = self._chunks.popleft()
            wait()
            yield chunk

    def wait(self) -> list[Tensor]:
        """The gathered matrices, complete."""
        for _ in self:
            pass
        return self.gathered


class RingStep(NamedTuple):
    """One step of a ring, about the chunk of neighbouring `ranks`.

    In an all-gather this rank receives from each of `recv_from` in order and sends to the one of `send_to` in the same
    place at the same time; a reduction goes the opposite way: partial sums are sent to `recv_from`.
    """

    ranks: range
    recv_from: tuple[int, ...]
    send_to: tuple[int, ...]

    def rows(self, m: int, t: int) -> slice:
        """The chunk's rows of m, sharded over t ranks."""
        return slice(self.ranks.start * (m // t), self.ranks.stop * (m // t))


@cache
def ring_steps(rank: int, t: int, max_chunks: int) -> tuple[RingStep, ...]:
    """The steps of `rank`, its own chunk first. The number of chunks is the largest divisor of t <= `max_chunks`."""
    count = max(n for n in range(1, max_chunks + 1) if t % n == 0)
    g = t // count
    ring, place = divmod(rank, g)

    def ranks(chunk: int, direction: int) -> tuple[int, ...]:
        return tuple(chunk % count * g + (place + direction * i) % g for i in range(g))

    starts = [(ring + step) % count * g for step in range(count)]
    return tuple(
        RingStep(range(start, start + g), ranks(ring + step, 1), ranks(ring - step, -1))
        for step, start in enumerate(starts)
    )


class Product(NamedTuple):
    """A product `[m, n]` in `dtype` to be computed from the rows that `input` gathers.

    `compute_rows(chunk, out)` computes a chunk, into `out` if given, and returns it.
    """

    input: AllGatherHandle
    n: int
    dtype: torch.dtype
    compute_rows: Callable[[slice, Tensor | None], Tensor]

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized tensor `[*shape, n]`."""
        return torch.empty((*shape, self.n), dtype=self.dtype, device=self.input.gathered[0].device)

    def compute(self) -> Tensor:
        """The product of all rows."""
        if not self.input.is_chunked:
            (chunk,) = self.input
            return self.compute_rows(chunk, None)
        y_mn = self.empty(self.input.gathered[0].shape[0])
        for chunk in self.input:
            self.compute_rows(chunk, y_mn[chunk])
        return y_mn


class ReduceHandle(NamedTuple):
    """A running sum over ranks. `alive`: tensors that it still reads."""

    work: CollectiveWork
    result: Callable[[], Tensor]
    alive: Any = None

    def wait(self) -> Tensor:
        """The sum: all rows, or this rank's."""
        self.work.wait()
        return self.result()


class TPOverlap(Protocol):
    """Communication at one end of a tensor-parallel layer."""

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks over which tokens are sharded outside the layer; None where each has all of them."""
        ...

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        """Start gathering contiguous matrices, of the same shapes on all ranks, along dim 0."""
        ...

    def sum(self, product: Product) -> ReduceHandle:
        """Compute this rank's partial sum and start summing over ranks, to the rows that it has outside the layer."""
        ...


@dataclass(frozen=True)
class ReplicatedTokens:
    """Every rank of `ranks` has all tokens. None: no other rank has a partial sum."""

    ranks: ProcessGroup | None
    group: None = None

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        return AllGatherHandle(list(shards), [(slice(0, shards[0].shape[0]), DONE.wait)])

    def sum(self, product: Product) -> ReduceHandle:
        y_mn = product.compute()
        return ReduceHandle(all_reduce_async(y_mn, self.ranks), lambda: y_mn)


NO_COMM: TPOverlap = ReplicatedTokens(None)
"""Overlap for an end of a layer that has no communication."""


@dataclass(frozen=True)
class Collective:
    """Tokens are sharded over `group`; one collective for each direction."""

    group: ProcessGroup

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        gathered, work = all_gather_async(shards, self.group)

        def wait(_: Sequence[Tensor] = shards) -> None:  # keeps it alive until then
            work.wait()

        return AllGatherHandle(gathered, [(slice(0, gathered[0].shape[0]), wait)])

    def sum(self, product: Product) -> ReduceHandle:
        partial_mn = product.compute()
        summed, work = reduce_scatter_async(partial_mn, self.group)
        return ReduceHandle(work, lambda: summed, partial_mn)


def sum_partials(partials_trn: Tensor) -> Tensor:
    """`[t, r, n]` -> `[r, n]`, summed in fp32 or wider in the order of ranks and rounded once.

    The reference of `megafp8.kernels.sum_shards`.
    """
    dtype = partials_trn.dtype
    total = partials_trn[0].to(torch.promote_types(dtype, torch.float32))
    for partial in partials_trn[1:]:
        total = total + partial
    return total.to(dtype)


def compute_partials(product: Product, step: RingStep, partials_trn: Tensor, rank: int) -> dict[int, Tensor]:
    """This rank's partial sums of a chunk, by the rank that gets them; its own goes to `partials_trn[rank]`."""
    t, r, n = partials_trn.shape
    chunk = step.rows(t * r, t)
    if step.ranks == range(rank, rank + 1):
        product.compute_rows(chunk, partials_trn[rank])
        return {}
    partials = dict(zip(step.ranks, product.compute_rows(chunk, None).view(-1, r, n)))
    if rank in partials:
        partials_trn[rank].copy_(partials.pop(rank))
    return partials


def default_overlap(group: ProcessGroup, *, sequence_parallel: bool) -> TPOverlap:
    """The `TPOverlap` that needs no set-up."""
    if group.size() == 1:
        return NO_COMM
    return Collective(group) if sequence_parallel else ReplicatedTokens(group)
