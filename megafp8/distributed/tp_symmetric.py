"""The `TPOverlap` that computes while the GPUs' copy engines carry tokens.

NCCL moves data with kernels, which take multiprocessors away from the product they are to hide behind. Copy engines
take none. They need addresses: symmetric memory is a buffer of each rank that all ranks of a host have mapped, and a
barrier of a few microseconds that the GPUs keep among themselves. That is all that is used of it here; torch's own
`fused_all_gather_matmul` is the same idea, but tied to torch's GEMMs.

    gather  own tokens into one's buffer; barrier; then copies from the others' buffers, one after the other, on a
            stream of their own, and an event after each
    sum     each share into its rank's buffer, on that stream, once it is computed; barrier; the sum of what arrived

*Why two buffers are enough.* Exchanges take them in turns, and each has one barrier, on the stream that computes. When
a rank has passed the barrier of exchange i + 1, every other has reached it, and so has done with exchange i: its
copies, for which its products waited, and its sum, which came before on that stream. So the buffer of exchange i may be
overwritten in exchange i + 2. This needs that an exchange is waited for before the next one begins (asserted), and that
all exchanges compute on one stream.

*Why the barrier is on the computing stream.* Its kernel is tiny, but beside a GEMM that fills the GPU it would not be
scheduled before the GEMM ends, and nothing would be hidden.

Shapes: m rows (tokens), n columns; t ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import DONE, barrier
from megafp8.distributed.symmetric_memory import Mapped, starts
from megafp8.distributed.tp_overlap import (
    PARTS,
    AllGatherHandle,
    Product,
    ReduceHandle,
    add_shares,
    ring_steps,
    shares_of,
)


class SymmetricMemory:
    """Tokens are cut over `group`, whose ranks are GPUs of one host. Collective: build it on every rank.

    Buffers begin with `size` bytes each and grow; growing synchronizes. RuntimeError, on every rank alike, where
    symmetric memory cannot be set up.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, size: int = 2**20, parts: int = PARTS) -> None:
        self.group, self.device = group, device
        self._stream = torch.cuda.Stream(device)
        self._turns = ring_steps(group.rank(), group.size(), parts)
        # Of one exchange, whose waits have all been queued when the next one records them again.
        self._computed = torch.cuda.Event()
        self._moved = [torch.cuda.Event() for _ in self._turns]
        self._buffers: list[Mapped] = []
        self._size = self._turn = 0
        self._busy = False
        self._grow(size)

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        t, rank = self.group.size(), self.group.rank()
        own_bytes = [_flat(x) for x in own]
        sizes = tuple(x.numel() for x in own_bytes)
        buffer = self._next(starts(sizes)[-1])
        places = buffer.places(sizes)
        whole = [x.new_empty((t, x.numel())) for x in own_bytes]
        parts = list(zip(*(x.unbind() for x in whole)))
        current = torch.cuda.current_stream(self.device)
        for place, x in zip(places[rank], own_bytes):
            place.copy_(x)
        buffer.barrier()
        self._computed.record(current)
        self._computed.wait(self._stream)
        m = t * own[0].shape[0]
        pieces: list[tuple[slice, Callable[[], Any]]] = []
        with torch.cuda.stream(self._stream):
            for turn, moved in zip(self._turns, self._moved):
                if turn.there == (rank,):
                    pieces.append((turn.rows(m, t), DONE.wait))
                    continue
                for sender in turn.there:
                    if sender != rank:
                        for part, place in zip(parts[sender], places[sender]):
                            part.copy_(place)
                moved.record(self._stream)
                pieces.append((turn.rows(m, t), partial(self._wait, moved, current, last=moved is self._moved[-1])))
        for part, x in zip(parts[rank], own_bytes):
            part.copy_(x)
        return AllGatherHandle([y.view(x.dtype).view(-1, *x.shape[1:]) for x, y in zip(own, whole)], pieces)

    def sum(self, product: Product) -> ReduceHandle:
        t, rank = self.group.size(), self.group.rank()
        m = product.arriving.wait()[0].shape[0]
        share_bytes = m // t * product.n * product.dtype.itemsize
        buffer = self._next(t * share_bytes)
        current = torch.cuda.current_stream(self.device)
        shares_trn = buffer.of[rank][: t * share_bytes].view(product.dtype).view(t, m // t, product.n)
        own, *others = self._turns
        sent = []
        for turn in (*others, own):
            shares = shares_of(product, turn, shares_trn, rank)
            if not shares:
                continue
            self._computed.record(current)
            self._computed.wait(self._stream)
            with torch.cuda.stream(self._stream):
                for to in turn.there:
                    if to != rank:
                        place = buffer.of[to][rank * share_bytes : (rank + 1) * share_bytes]
                        place.copy_(_flat(shares[to]))
            sent.append(shares)
        all_sent = self._moved[-1]
        all_sent.record(self._stream)

        def result() -> Tensor:
            buffer.barrier()
            return add_shares(shares_trn)

        return ReduceHandle(_Waiting(partial(self._wait, all_sent, current, last=True)), result, sent)

    def _wait(self, event: torch.cuda.Event, current: torch.cuda.Stream, *, last: bool) -> None:
        event.wait(current)
        self._busy = self._busy and not last

    def _next(self, size: int) -> Mapped:
        """The buffer whose turn it is, of `size` bytes or more."""
        assert not self._busy, "an exchange began before the last one was waited for"
        self._busy = True
        if size > self._size:
            self._grow(size)
        self._turn = 1 - self._turn
        return self._buffers[self._turn]

    def _grow(self, size: int) -> None:
        torch.cuda.synchronize(self.device)
        barrier(self.group)  # nobody reads a buffer that is about to go
        torch.cuda.synchronize(self.device)
        self._buffers = []
        self._buffers = [Mapped(size, self.group, self.device) for _ in range(2)]
        self._size = size


class _Waiting(NamedTuple):
    """A wait as a `Work`."""

    wait: Callable[[], Any]


def _flat(x: Tensor) -> Tensor:
    """A contiguous tensor as a vector of bytes."""
    return x.view(-1).view(torch.uint8)
