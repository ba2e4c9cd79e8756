"""How ranks hand each other tokens around a matrix product, so that they travel while it is computed.

A tensor-parallel layer is a product with a collective on one side. Tokens come in, x in forward of a column-parallel
layer and dy in backward of a row-parallel one: they are gathered. Or a product goes out of which each rank has a share,
y of a row-parallel layer and dx of a column-parallel one: the shares are summed. An `TPOverlap` is these two
directions; a layer has one at either end (`megafp8.ops.quantized_gather.TPComm`) and does not know which.

    Replicated   every rank has all tokens: nothing to gather, shares are all-reduced
    Collective   tokens are cut over ranks: one all-gather, one reduce-scatter
    P2PRing      the same rank by rank, each part multiplied while the next one travels
    SymmetricMemory  the same by the GPUs' copy engines (`megafp8.distributed.tp_symmetric`)

*What hides behind what.* A sum begins when its product has been queued and is waited for only when someone wants it, so
the sum of dx runs beside the weight gradient in every mode. In forward there is nothing else to do: there the product
itself has to be cut, along the tokens. A part is what one rank has or will have, so parts need no reordering: gathering
begins with the product of one's own tokens while the next rank's arrive; summing ends with the share one keeps, when
the others are on their way. Rank r deals with rank r + 1 first, then r + 2: each link carries one part at a time.
Of more than four ranks some neighbours make a part together (`ring_steps`): eighths of a product would be too few
tiles to fill a GPU with.

*Numbers.* Gathering moves bits. A row of a product is the same sum over k however many rows there are, but a GEMM may
add it up in another order for another shape; that is all that `P2PRing` and `SymmetricMemory` change there. Their
shares are
added in fp32 in the order of ranks and rounded once, those of a collective in the library's order, rounded at each hop.
Of two ranks both are the same.

*What it gives up.* Products of fewer rows fill the GPU less evenly, and the shares of a sum, once as large as the
product, lie in memory until it has been made.

Shapes: m rows (tokens), n columns of a product; t ranks, each with m/t of the rows. A "part" is a slice of the m rows:
those of one rank, of g neighbouring ones, or all.
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

from megafp8.distributed.collectives import (
    DONE,
    Work,
    all_gather_async,
    all_reduce_async,
    as_bytes,
    reduce_scatter_async,
    swap_async,
)


class AllGatherHandle:
    """Matrices being gathered: `whole`, the first of them `[m, c]`.

    Iterating gives parts in the order in which they come, each when it may be read on the current stream. That happens
    once; all must be taken, or waited for, before `whole` is let go.
    """

    def __init__(self, whole: list[Tensor], pieces: Iterable[tuple[slice, Callable[[], Any]]]) -> None:
        self.whole = whole
        self._pieces = deque(pieces)

    @property
    def in_pieces(self) -> bool:
        return len(self._pieces) > 1

    def __iter__(self) -> Iterator[slice]:
        while self._pieces:
            part, wait = self._pieces.popleft()
            wait()
            yield part

    def wait(self) -> list[Tensor]:
        """All that was gathered."""
        for _ in self:
            pass
        return self.whole


PARTS = 4
"""Parts that a product is cut into, at most."""


class RingStep(NamedTuple):
    """What a rank does with one part of a product: that of `ranks`, which are neighbours.

    `there`: these ranks one after the other, from whom something comes when parts are gathered, and to whom it goes
    when they are summed; `back`: whom this rank is such a one for, at the same time.
    """

    ranks: range
    there: tuple[int, ...]
    back: tuple[int, ...]

    def rows(self, m: int, t: int) -> slice:
        """Which of m rows, of t ranks, are those of the part."""
        return slice(self.ranks.start * (m // t), self.ranks.stop * (m // t))


@cache
def ring_steps(rank: int, t: int, parts: int) -> tuple[RingStep, ...]:
    """The parts of t ranks as `rank` deals with them, its own first: as many as divide t, but no more than `parts`."""
    count = max(n for n in range(1, parts + 1) if t % n == 0)
    g = t // count
    own, place = divmod(rank, g)

    def ranks(part: int, direction: int) -> tuple[int, ...]:
        return tuple(part % count * g + (place + direction * i) % g for i in range(g))

    found = []
    for step in range(count):
        start = (own + step) % count * g
        found.append(RingStep(range(start, start + g), ranks(own + step, 1), ranks(own - step, -1)))
    return tuple(found)


def part_of(rank: int, m: int, t: int) -> slice:
    """Which of m rows are those of one of t ranks."""
    return slice(rank * (m // t), (rank + 1) * (m // t))


class Product(NamedTuple):
    """`[m, n]` in `dtype`, to be computed of the rows that `arriving` brings.

    `rows(part, out)` computes a part, into `out` where there is one, and gives it back.
    """

    arriving: AllGatherHandle
    n: int
    dtype: torch.dtype
    rows: Callable[[slice, Tensor | None], Tensor]

    def empty(self, *shape: int) -> Tensor:
        """A tensor `[*shape, n]` for it, or for some of it."""
        return torch.empty((*shape, self.n), dtype=self.dtype, device=self.arriving.whole[0].device)

    def whole(self) -> Tensor:
        """All of it, on this rank."""
        arriving = self.arriving
        if not arriving.in_pieces:
            (part,) = arriving
            return self.rows(part, None)
        y_mn = self.empty(arriving.whole[0].shape[0])
        for part in arriving:
            self.rows(part, y_mn[part])
        return y_mn


class ReduceHandle(NamedTuple):
    """A sum over ranks under way. `alive`: what is still being read for it."""

    work: Work
    result: Callable[[], Tensor]
    alive: Any = None

    def wait(self) -> Tensor:
        """The sum: all rows, or this rank's."""
        self.work.wait()
        return self.result()


class TPOverlap(Protocol):
    """How tokens come to a layer and leave it."""

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks over which tokens are cut outside the layer; None where each has all of them."""
        ...

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        """Start gathering along dim 0 contiguous matrices that all ranks have in the same shapes."""
        ...

    def sum(self, product: Product) -> ReduceHandle:
        """Compute this rank's share of the product and start summing shares, to the rows that it has outside."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Every rank of `ranks` has all tokens. None: nobody else computes a share either."""

    ranks: ProcessGroup | None
    group: None = None

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        return AllGatherHandle(list(own), [(slice(0, own[0].shape[0]), DONE.wait)])

    def sum(self, product: Product) -> ReduceHandle:
        y_mn = product.whole()
        return ReduceHandle(all_reduce_async(y_mn, self.ranks), lambda: y_mn)


NO_COMM: TPOverlap = Replicated(None)
"""At an end where nothing is exchanged."""


@dataclass(frozen=True)
class Collective:
    """Tokens are cut over `group`; one collective each way."""

    group: ProcessGroup

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        whole, work = all_gather_async(own, self.group)

        def wait(_: Sequence[Tensor] = own) -> None:  # which is alive until then
            work.wait()

        return AllGatherHandle(whole, [(slice(0, whole[0].shape[0]), wait)])

    def sum(self, product: Product) -> ReduceHandle:
        share_mn = product.whole()
        own, work = reduce_scatter_async(share_mn, self.group)
        return ReduceHandle(work, lambda: own, share_mn)


@dataclass(frozen=True)
class P2PRing:
    """Tokens are cut over `group`; ranks send each other their parts, while those at hand are multiplied."""

    group: ProcessGroup
    parts: int = PARTS

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        t, rank = self.group.size(), self.group.rank()
        whole = [x.new_empty((t * x.shape[0], *x.shape[1:])) for x in own]
        m = whole[0].shape[0]
        pieces: list[tuple[slice, Callable[[], Any]]] = []
        for turn in ring_steps(rank, t, self.parts):
            works = []
            for sender, receiver in zip(turn.there, turn.back):
                if sender != rank:
                    received = [x[part_of(sender, x.shape[0], t)] for x in whole]
                    works.append(swap_async(own, receiver, received, sender, self.group))
            pieces.append((turn.rows(m, t), _All(works).wait))
        for x, mine in zip(whole, own):
            as_bytes(x[part_of(rank, x.shape[0], t)]).copy_(as_bytes(mine))
        return AllGatherHandle(whole, pieces)

    def sum(self, product: Product) -> ReduceHandle:
        t, rank = self.group.size(), self.group.rank()
        m = product.arriving.wait()[0].shape[0]
        shares_trn = product.empty(t, m // t)
        works: list[Work] = []
        own, *others = ring_steps(rank, t, self.parts)
        for turn in (*others, own):
            shares = shares_of(product, turn, shares_trn, rank)
            for to, sender in zip(turn.there, turn.back):
                if to != rank:
                    works.append(swap_async([shares[to]], to, [shares_trn[sender]], sender, self.group))
        return ReduceHandle(_All(works), lambda: add_shares(shares_trn))


def shares_of(product: Product, turn: RingStep, shares_trn: Tensor, rank: int) -> dict[int, Tensor]:
    """This rank's shares of a part, by whose they are; its own goes to its place in `shares_trn` `[t, m/t, n]`."""
    t, r, n = shares_trn.shape
    part = turn.rows(t * r, t)
    if turn.ranks == range(rank, rank + 1):
        product.rows(part, shares_trn[rank])
        return {}
    shares = dict(zip(turn.ranks, product.rows(part, None).view(-1, r, n)))
    if rank in shares:
        shares_trn[rank].copy_(shares.pop(rank))
    return shares


class _All(NamedTuple):
    works: list[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def add_shares(shares_trn: Tensor) -> Tensor:
    """`[t, r, n]` -> `[r, n]`, summed in fp32 or wider, rank after rank, and rounded once."""
    if shares_trn.is_cuda and shares_trn.dtype != torch.float64:
        from megafp8.kernels.sum_shards import add  # needs Triton, which comes with torch's CUDA builds

        return add(shares_trn)
    dtype = shares_trn.dtype
    total = shares_trn[0].to(torch.promote_types(dtype, torch.float32))
    for share in shares_trn[1:]:
        total = total + share
    return total.to(dtype)


def default_overlap(group: ProcessGroup, *, sequence_parallel: bool) -> TPOverlap:
    """The one that needs nothing set up."""
    if group.size() == 1:
        return NO_COMM
    return Collective(group) if sequence_parallel else Replicated(group)
