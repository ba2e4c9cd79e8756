"""FSDP weights gathered in FP8, directly into the memory that the GEMMs read.

`fully_shard` gathers all weights of a block at once, rank after rank, and then copies each weight out of that buffer.
Every byte is written, read and written again in each forward and each backward, on a communicator where it waits for
gradient reductions. FP8 data needs none of this, because torch does not compute with it. Therefore torch's all-gather
(`fsdp_pre_all_gather`) gets only a few bytes, and the block's FP8 data is gathered separately, each weight into its own
buffer. When torch's all-gather is complete (`fsdp_post_all_gather`), this gather is complete too, because torch's
stream waited for it. The parameter that the layer sees is `Released`.

*Transports.* `CollectiveTransport` uses one all-gather. `SymmetricTransport` copies from the memory of the host's other
GPUs. An all-gather synchronizes all ranks, takes multiprocessors from the GEMMs that run at the same time, and shares a
queue with the reduction of gradients. But FP8 data changes only once per step, so a rank can copy a block's data
whenever it wants, with its copy engines, between two barriers per step: before the data is overwritten, every rank has
made its last copy; once it has been written, every rank may copy. (torch gathers the rest of a block, its norms, as
usual.)

*Replicas* of the shards each quantize a slice of a rank's bytes and gather the rest from each other. A block's first
gather after that waits for its bytes (`arrive`), and then for the other ranks', by one more barrier.

*Buffers.* torch keeps its gathered tensor until it reshards a block, and then resizes the storage to zero, which shows
that the block's buffer is free. Kernels queued before may still read it: an event, recorded when the next block's data
arrives, is waited for before the buffer is written again. In forward and in backward, this needs two buffers, one being
read and one being filled. They are kept, so that nothing waits for the allocator.

torch still decides which block is gathered when, and when it is freed. This module relies on undocumented behavior: the
storage is resized, and the weights of a block are gathered together.

Shapes: t ranks; n, k of a weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_gather_into_async
from megafp8.parallel.data.buckets import Slot
from megafp8.parallel.data.fsdp import Released, RowShard
from megafp8.parallel.symmetric_memory import SymmetricBuffer, offsets, split

logger = logging.getLogger(__name__)

_STUB_BYTES = 16  # bytes that torch gathers for each weight


class Transport(Protocol):
    """Gather of FP8 data.

    `memory` are this rank's bytes, and `shards` its bytes of each weight, to be written between two `synchronize`
    calls.
    """

    memory: Tensor
    shards: list[Tensor]

    def gather(self, weights: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Queue a gather of some weights of all ranks into `outs` `[t, bytes]` on the current stream."""
        ...

    def synchronize(self) -> None:
        """Order work of all ranks on the current stream: work queued before completes before work queued after."""
        ...


class CollectiveTransport:
    """Transport by all-gathers over `group`. `slots` are the places of each weight in `size` bytes of each rank."""

    def __init__(self, slots: Sequence[Slot], size: int, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.shards = [self.memory[start:end] for start, end in slots]

    def gather(self, weights: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Gather some weights of all ranks into `outs` `[t, bytes]`."""
        all_gather_into_async([out.view(-1) for out in outs], [self.shards[i] for i in weights], self.group).wait()

    def synchronize(self) -> None:
        """Do nothing: an all-gather synchronizes all ranks."""


class SymmetricTransport:
    """Transport by copies between GPUs of one host, the ranks of `group`.

    `slots` are the places of each weight in `size` bytes of each rank. The constructor is a collective.

    Raises:
        RuntimeError: On every rank, if symmetric memory cannot be set up.
    """

    def __init__(self, slots: Sequence[Slot], size: int, group: ProcessGroup, device: torch.device) -> None:
        buffer = SymmetricBuffer(size, group, device)
        self._views = [[memory[start:end] for start, end in slots] for memory in buffer.buffers]
        self._rank, self._barrier = group.rank(), buffer.barrier
        self.memory = buffer.buffers[self._rank].zero_()  # padding rows are also read
        self.shards: list[Tensor] = self._views[self._rank]

    def gather(self, weights: Sequence[int], outs: Sequence[Tensor]) -> None:
        """Copy some weights of all ranks into `outs` `[t, bytes]`."""
        t = len(self._views)
        for step in range(t):  # ranks start with different peers, so that they do not all read from one rank
            rank = (self._rank + step) % t
            for i, out in zip(weights, outs):
                out[rank].copy_(self._views[rank][i])

    def synchronize(self) -> None:
        """Run a device-side barrier on the current stream."""
        self._barrier()


def open_transport(
    slots: Sequence[Slot], size: int, group: ProcessGroup, device: torch.device, one_host: bool
) -> Transport:
    """Return a transport by copies if all GPUs are on `one_host` and can map each other's memory; else by collectives.

    Collective.
    """
    if one_host and device.type == "cuda" and group.size() > 1:
        try:
            return SymmetricTransport(slots, size, group, device)
        except RuntimeError as error:
            logger.info(f"fp8.param_gather: {error}; FP8 weights are gathered by collectives")
    return CollectiveTransport(slots, size, group, device)


class GatheredWeight(NamedTuple):
    """Weight that is gathered in FP8: its row shard, its FP8 dtype, and a callback for its gathered data `[n, k]`."""

    rows: RowShard
    dtype: torch.dtype
    on_gathered: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's rows."""
        return self.rows.padded_rows * self.rows.global_shape[1]


class _Buffer:
    """Memory for a block's data. `owner` is the block that uses it; `last_read` is recorded after its last reader."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.owner: _Block | None = None
        self.last_read = torch.cuda.Event() if device.type == "cuda" else None


class _BufferPool:
    """Pool of buffers. It grows to the largest number of buffers in use at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []

    def acquire(self, size: int, owner: _Block) -> _Buffer:
        """Return a free buffer of at least `size` bytes, for the current stream to write to."""
        free = [buffer for buffer in self._buffers if buffer.owner is None and len(buffer.memory) >= size]
        buffer = min(free, key=lambda buffer: len(buffer.memory)) if free else _Buffer(size, self._device)
        if not free:
            self._buffers.append(buffer)
        elif buffer.last_read is not None:
            buffer.last_read.wait()
        buffer.owner = owner
        return buffer

    def release_unused(self) -> None:
        """Free buffers that their blocks no longer need. Their readers have been queued on the current stream."""
        for buffer in self._buffers:
            if buffer.owner is not None and not buffer.owner.needs(buffer):
                buffer.owner = None
                if buffer.last_read is not None:
                    buffer.last_read.record()

    def record_reads(self) -> None:
        """Make the next writers wait for all work that has been queued on the current stream."""
        self.release_unused()
        for buffer in self._buffers:
            if buffer.owner is None and buffer.last_read is not None:
                buffer.last_read.record()


class _Block:
    """Weights that torch gathers together.

    `indices` are their indices in the transport. `arrive` waits for this rank's bytes if they are still being gathered
    from its replicas, and returns whether they were.
    """

    def __init__(
        self,
        weights: Sequence[GatheredWeight],
        indices: range,
        transport: Transport,
        pool: _BufferPool,
        ranks: int,
        arrive: Callable[[], bool],
    ) -> None:
        self._weights, self._indices, self._transport = weights, indices, transport
        self._pool, self._ranks, self.arrive = pool, ranks, arrive
        self._sizes = [ranks * weight.nbytes for weight in weights]
        self._incoming: _Buffer | None = None
        self._current: _Buffer | None = None
        self._stub = torch.zeros(_STUB_BYTES, dtype=torch.uint8, device=weights[0].rows.values.device)
        self._gathered_stub = self._stub  # torch's result, which has storage while the block is gathered
        for i, weight in enumerate(weights):
            hooks: Any = weight.rows.sharded
            hooks.fsdp_pre_all_gather = self._start_gather if i == 0 else self._send_stub
            hooks.fsdp_post_all_gather = partial(self._finish_gather, i)

    def needs(self, buffer: _Buffer) -> bool:
        """Return whether the block will still read from this buffer, which it owns."""
        if buffer is self._incoming:
            return True
        return buffer is self._current and self._gathered_stub.untyped_storage().size() > 0

    def _views(self, buffer: _Buffer) -> list[Tensor]:
        """Return the views `[t, bytes]` of each weight."""
        return [view.view(self._ranks, -1) for view in split(buffer.memory, self._sizes)]

    # `mesh` is the only parameter: with more parameters, torch expects the byte count of an unevenly sharded weight.

    def _start_gather(self, mesh: Any) -> Any:
        """Start to gather the FP8 data of the block, and return the stub that torch gathers."""
        # torch silently drops a gather if it prefetched the wrong block; the buffer is then still assigned.
        self._incoming = self._incoming or self._pool.acquire(offsets(self._sizes)[-1], self)
        if self.arrive():
            self._transport.synchronize()
        self._transport.gather(self._indices, self._views(self._incoming))
        return self._send_stub(mesh)

    def _send_stub(self, mesh: Any) -> Any:
        """Return the stub that torch gathers."""
        return (self._stub,), None

    def _finish_gather(
        self, i: int, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Give the layers their gathered FP8 data, and torch a released tensor."""
        if i == 0:
            assert self._incoming is not None, "torch gathered a weight of the block before the first one"
            self._current, self._incoming, self._gathered_stub = self._incoming, None, outputs[0]
            self._pool.release_unused()
            for (rows, fp8_dtype, on_gathered), view in zip(self._weights, self._views(self._current)):
                n, k = rows.global_shape
                on_gathered(view.view(fp8_dtype).view(-1, k)[:n])
        rows = self._weights[i].rows
        return None if out is not None else (Released(rows.global_shape, dtype, rows.values.device), ())


class Fp8WeightGather:
    """FP8 gather for torch's FSDP. `blocks` are the weights of each module that is sharded as one unit.

    `shards` are this rank's bytes of each weight, in this order, to be written between two `synchronize` calls.
    `arrivals` has a function for each block that waits for bytes from replicas, and returns whether it had to.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[GatheredWeight]],
        transport: Transport,
        ranks: int,
        device: torch.device,
        arrivals: Sequence[Callable[[], bool]] | None = None,
    ) -> None:
        self.shards, self._transport = transport.shards, transport
        self._pool, start = _BufferPool(device), 0
        self._blocks = []
        for weights, arrive in zip(blocks, arrivals or [lambda: False] * len(blocks), strict=True):
            indices = range(start, start := start + len(weights))
            self._blocks.append(_Block(weights, indices, transport, self._pool, ranks, arrive))

    def arrive(self) -> None:
        """Wait for the bytes of all blocks from replicas."""
        arrived = [block.arrive() for block in self._blocks]
        if any(arrived):
            self._transport.synchronize()

    def synchronize(self) -> None:
        """Order work of all ranks on the current stream: work queued before completes before work queued after."""
        self._transport.synchronize()
        self.record_reads()

    def record_reads(self) -> None:
        """Make the following gathers wait for all work queued on the current stream instead of earlier events.

        Work that is captured in a CUDA graph cannot wait for an event from before the capture.
        """
        self._pool.record_reads()
