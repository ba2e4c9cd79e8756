"""Overlap of tensor-parallel communication with GEMMs.

A tensor-parallel layer is a GEMM with a collective on one side. Either its input must be gathered: x in the forward of
a column-parallel layer, dy in the backward of a row-parallel layer. Or its output is a partial sum on each rank: y of a
row-parallel layer, dx of a column-parallel layer. A `TPOverlap` implements these two directions. A layer has one at
either end (`megafp8.linear.quantized_gather.TPComm`) and does not know which implementation it is.

    ReplicatedTokens  every rank has all tokens: nothing to gather, partial sums are all-reduced
    Collective        tokens are sharded: one all-gather, one reduce-scatter
    SymmetricMemory   the same rank by rank, each chunk multiplied while the GPUs' copy engines transfer the next one
                      (`megafp8.parallel.tp_symmetric`)

*What overlaps.* A sum starts when its GEMM has been queued, and is waited for when its result is needed, so the sum of
dx overlaps with the weight gradient in every mode. Forward has no such independent work, so the GEMM itself is split
into chunks of tokens. A chunk holds the tokens of one rank, so chunks need no reordering. Gathering starts with the
GEMM of the local tokens while the next rank's tokens arrive. Summing ends with the chunk that this rank keeps, while
the other chunks are sent. Rank r exchanges with rank r + 1 first, then r + 2, so each link carries one chunk at a time.
With more than four ranks, neighbors form one chunk (`ring_steps`), because an eighth of a GEMM has too few tiles to
fill a GPU.

*Numerics.* Gathering moves bits. A row of a product is the same sum over k regardless of the number of rows, but a GEMM
may add in a different order for a different shape; this is the only difference that chunking in `SymmetricMemory`
makes. It adds partial sums in fp32 in the order of ranks and rounds once; a collective adds in the library's order and
rounds at each hop. With two ranks both give the same result.

*Cost.* GEMMs with fewer rows fill the GPU less evenly. The partial sums, as large as the product, stay in memory until
they have been added.

Shapes: m rows (tokens), n columns of a product; t ranks, each with m/t of the rows. A "chunk" is a slice of the m rows:
the rows of one rank, of g neighboring ranks, or all rows.
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
"""Maximum number of chunks that a GEMM is split into."""


class AllGatherHandle:
    """Running all-gather of matrices into `gathered`. The first matrix is `[m, c]`.

    Iteration yields chunks in the order of arrival, each once the current stream may read it. Iterate only once, and
    take all chunks or call `wait` before `gathered` is freed.
    """

    def __init__(self, gathered: list[Tensor], chunks: Iterable[tuple[slice, Callable[[], Any]]]) -> None:
        self.gathered = gathered
        self._chunks = deque(chunks)

    @property
    def is_chunked(self) -> bool:
        """Whether the rows arrive in several chunks."""
        return len(self._chunks) > 1

    def __iter__(self) -> Iterator[slice]:
        while self._chunks:
            chunk, wait = self._chunks.popleft()
            wait()
            yield chunk

    def wait(self) -> list[Tensor]:
        """Wait for all chunks and return the gathered matrices."""
        for _ in self:
            pass
        return self.gathered


class RingStep(NamedTuple):
    """Step of a ring that handles the chunk of neighboring `ranks`.

    In an all-gather, this rank receives from each rank of `recv_from` in order. A reduction goes the opposite way:
    partial sums are sent to `recv_from`.
    """

    ranks: range
    recv_from: tuple[int, ...]

    def rows(self, m: int, t: int) -> slice:
        """Return the chunk's slice of m rows that are sharded over t ranks."""
        return slice(self.ranks.start * (m // t), self.ranks.stop * (m // t))


@cache
def ring_steps(rank: int, t: int, max_chunks: int) -> tuple[RingStep, ...]:
    """Return the steps of `rank`, starting with its own chunk.

    The number of chunks is the largest divisor of t that is at most `max_chunks`.
    """
    count = max(n for n in range(1, max_chunks + 1) if t % n == 0)
    g = t // count
    ring, place = divmod(rank, g)
    starts = [(ring + step) % count * g for step in range(count)]
    return tuple(
        RingStep(range(start, start + g), tuple(start + (place + i) % g for i in range(g))) for start in starts
    )


class Product(NamedTuple):
    """Product `[m, n]` in `dtype` to compute from the rows that `input` gathers.

    `compute_rows(chunk, out)` computes a chunk, writes it to `out` if given, and returns it.
    """

    input: AllGatherHandle
    n: int
    dtype: torch.dtype
    compute_rows: Callable[[slice, Tensor | None], Tensor]

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor `[*shape, n]`."""
        return torch.empty((*shape, self.n), dtype=self.dtype, device=self.input.gathered[0].device)

    def compute(self) -> Tensor:
        """Compute and return the product of all rows."""
        if not self.input.is_chunked:
            (chunk,) = self.input
            return self.compute_rows(chunk, None)
        y_mn = self.empty(self.input.gathered[0].shape[0])
        for chunk in self.input:
            self.compute_rows(chunk, y_mn[chunk])
        return y_mn


class ReduceHandle(NamedTuple):
    """Running sum over ranks. `alive` holds the tensors that the sum still reads."""

    work: CollectiveWork
    result: Callable[[], Tensor]
    alive: Any = None

    def wait(self) -> Tensor:
        """Wait for the sum and return it: all rows, or this rank's rows."""
        self.work.wait()
        return self.result()


class TPOverlap(Protocol):
    """Communication at one end of a tensor-parallel layer."""

    @property
    def group(self) -> ProcessGroup | None:
        """Ranks over which tokens are sharded outside the layer; None if each rank has all tokens."""
        ...

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        """Start to gather contiguous matrices, with equal shapes on all ranks, along dim 0."""
        ...

    def sum(self, product: Product) -> ReduceHandle:
        """Compute this rank's partial sum, and start to sum over ranks into the rows that each rank keeps."""
        ...


@dataclass(frozen=True)
class ReplicatedTokens:
    """Overlap for tokens that every rank of `ranks` has. None means that no other rank has a partial sum."""

    ranks: ProcessGroup | None
    group: None = None

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        """Return the whole matrices: nothing is gathered."""
        return AllGatherHandle(list(shards), [(slice(0, shards[0].shape[0]), DONE.wait)])

    def sum(self, product: Product) -> ReduceHandle:
        """Compute the product `[m, n]` and start to all-reduce it."""
        y_mn = product.compute()
        return ReduceHandle(all_reduce_async(y_mn, self.ranks), lambda: y_mn)


NO_COMM: TPOverlap = ReplicatedTokens(None)
"""Overlap for an end of a layer that has no communication."""


@dataclass(frozen=True)
class Collective:
    """Overlap for tokens that are sharded over `group`, with one collective for each direction."""

    group: ProcessGroup

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        """Start one all-gather of all matrices."""
        gathered, work = all_gather_async(shards, self.group)

        def wait(_: Sequence[Tensor] = shards) -> None:  # keeps `shards` alive until the wait
            work.wait()

        return AllGatherHandle(gathered, [(slice(0, gathered[0].shape[0]), wait)])

    def sum(self, product: Product) -> ReduceHandle:
        """Compute the product `[m, n]` and start to reduce-scatter it to `[m/t, n]`."""
        partial_mn = product.compute()
        summed, work = reduce_scatter_async(partial_mn, self.group)
        return ReduceHandle(work, lambda: summed, partial_mn)


def sum_partials(partials_trn: Tensor) -> Tensor:
    """Sum `[t, r, n]` over t in fp32 or wider, in the order of ranks, and round once to `[r, n]`.

    This is the reference of `megafp8.kernels.sum_shards`.
    """
    dtype = partials_trn.dtype
    total = partials_trn[0].to(torch.promote_types(dtype, torch.float32))
    for partial in partials_trn[1:]:
        total = total + partial
    return total.to(dtype)


def compute_partials(product: Product, step: RingStep, partials_trn: Tensor, rank: int) -> dict[int, Tensor]:
    """Compute this rank's partial sums of a chunk, and return them by receiving rank.

    The sum for this rank itself is written to `partials_trn[rank]`.
    """
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
    """Return the `TPOverlap` that needs no setup."""
    if group.size() == 1:
        return NO_COMM
    return Collective(group) if sequence_parallel else ReplicatedTokens(group)
