"""`SymmetricMemory`: the `TPOverlap` in which the GPUs' copy engines move tokens during the GEMM.

NCCL moves data with kernels, which take multiprocessors from the GEMM that they should overlap with. Copy engines take
none. They need addresses, which symmetric memory provides: buffers that all ranks of a host have mapped, and a
device-side barrier of a few microseconds. torch's `fused_all_gather_matmul` uses the same idea, but only with torch's
GEMMs.

    gather  copy own tokens to the own buffer; barrier; then copy from the other ranks' buffers, one after the other, on
            a side stream, with an event after each
    sum     copy each partial sum to its rank's buffer, on the side stream, once it is computed; barrier; add

*Why two buffers are enough.* Exchanges alternate between two buffers, and each exchange has one barrier, on the compute
stream. When a rank has passed the barrier of exchange i + 1, every other rank has reached it and therefore finished
exchange i: both its copies, which its GEMMs waited for, and its sum, which came earlier on the same stream. Exchange i
+ 2 may therefore overwrite the buffer of exchange i. This requires that an exchange is waited for before the next one
begins (asserted), and that all exchanges compute on one stream.

*Why the barrier is on the compute stream.* Its kernel is tiny, but next to a GEMM that fills the GPU it would not be
scheduled until the GEMM ends, and nothing would overlap.

Shapes: m rows (tokens), n columns; t ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import DONE, WaitFunction, barrier
from megafp8.parallel.symmetric_memory import SymmetricBuffer, offsets
from megafp8.parallel.tp_overlap import (
    MAX_CHUNKS,
    AllGatherHandle,
    Product,
    ReduceHandle,
    compute_partials,
    ring_steps,
)


class SymmetricMemory:
    """Overlap for tokens that are sharded over `group`, GPUs of one host. The constructor is a collective.

    Buffers start with `size` bytes each and grow as needed, which synchronizes. `sum_partials` is the kernel that sums
    partial results, or `tp_overlap.sum_partials`.

    Raises:
        RuntimeError: On every rank, if symmetric memory cannot be set up.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        sum_partials: Callable[[Tensor], Tensor],
        size: int = 2**20,
        max_chunks: int = MAX_CHUNKS,
    ) -> None:
        self.group, self.device, self._sum_partials = group, device, sum_partials
        self._stream = torch.cuda.Stream(device)
        self._steps = ring_steps(group.rank(), group.size(), max_chunks)
        # Events are reused: all waits of an exchange are queued before the next exchange records the events again.
        self._computed = torch.cuda.Event()
        self._copied = [torch.cuda.Event() for _ in self._steps]
        self._buffers: list[SymmetricBuffer] = []
        self._size = self._current = 0
        self._busy = False
        self._grow(size)

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        """Start to gather the ranks' shards along the tokens; see `TPOverlap.gather`."""
        t, rank = self.group.size(), self.group.rank()
        shard_bytes = [_flat_bytes(x) for x in shards]
        sizes = tuple(x.numel() for x in shard_bytes)
        buffer = self._next_buffer(offsets(sizes)[-1])
        views = buffer.views(sizes)
        gathered = [x.new_empty((t, x.numel())) for x in shard_bytes]
        by_rank = list(zip(*(x.unbind() for x in gathered)))
        current = torch.cuda.current_stream(self.device)
        for view, x in zip(views[rank], shard_bytes):
            view.copy_(x)
        buffer.barrier()
        self._computed.record(current)
        self._computed.wait(self._stream)
        m = t * shards[0].shape[0]
        chunks: list[tuple[slice, Callable[[], Any]]] = []
        with torch.cuda.stream(self._stream):
            for step, copied in zip(self._steps, self._copied):
                if step.recv_from == (rank,):
                    chunks.append((step.rows(m, t), DONE.wait))
                    continue
                for sender in step.recv_from:
                    if sender != rank:
                        for out, view in zip(by_rank[sender], views[sender]):
                            out.copy_(view)
                copied.record(self._stream)
                wait = partial(self._wait, copied, current, last=copied is self._copied[-1])
                chunks.append((step.rows(m, t), wait))
        for out, x in zip(by_rank[rank], shard_bytes):
            out.copy_(x)
        return AllGatherHandle([y.view(x.dtype).view(-1, *x.shape[1:]) for x, y in zip(shards, gathered)], chunks)

    def sum(self, product: Product) -> ReduceHandle:
        """Compute `product` and start to sum it over the ranks, each rank keeping its tokens; see `TPOverlap.sum`."""
        t, rank = self.group.size(), self.group.rank()
        m = product.input.wait()[0].shape[0]
        nbytes = m // t * product.n * product.dtype.itemsize
        buffer = self._next_buffer(t * nbytes)
        current = torch.cuda.current_stream(self.device)
        partials_trn = buffer.buffers[rank][: t * nbytes].view(product.dtype).view(t, m // t, product.n)
        own_step, *others = self._steps
        sent = []
        for step in (*others, own_step):
            partials = compute_partials(product, step, partials_trn, rank)
            if not partials:
                continue
            self._computed.record(current)
            self._computed.wait(self._stream)
            with torch.cuda.stream(self._stream):
                for receiver in step.recv_from:
                    if receiver != rank:
                        out = buffer.buffers[receiver][rank * nbytes : (rank + 1) * nbytes]
                        out.copy_(_flat_bytes(partials[receiver]))
            sent.append(partials)
        all_sent = self._copied[-1]
        all_sent.record(self._stream)

        def result() -> Tensor:
            buffer.barrier()
            return self._sum_partials(partials_trn)

        return ReduceHandle(WaitFunction(partial(self._wait, all_sent, current, last=True)), result, sent)

    def _wait(self, event: torch.cuda.Event, current: torch.cuda.Stream, *, last: bool) -> None:
        event.wait(current)
        self._busy = self._busy and not last

    def _next_buffer(self, size: int) -> SymmetricBuffer:
        """Return the buffer of the next exchange, with at least `size` bytes."""
        assert not self._busy, "an exchange began before the previous exchange was waited for"
        self._busy = True
        if size > self._size:
            self._grow(size)
        self._current = 1 - self._current
        return self._buffers[self._current]

    def _grow(self, size: int) -> None:
        """Replace both buffers by larger ones."""
        torch.cuda.synchronize(self.device)
        barrier(self.group)  # no rank reads a buffer that is about to be freed
        torch.cuda.synchronize(self.device)
        self._buffers = []
        self._buffers = [SymmetricBuffer(size, self.group, self.device) for _ in range(2)]
        self._size = size


def _flat_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as a flat tensor of bytes."""
    return x.view(-1).view(torch.uint8)
