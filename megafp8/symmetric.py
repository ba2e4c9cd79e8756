"""The `Exchange` that computes while the GPUs' copy engines carry tokens: torch's symmetric memory, without multicast.

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

*Multicast* (NVLS, NVLink SHARP) is something that torch sets up with symmetric memory unless told not to. Nothing here
uses it, and it can take a shared host's GPUs out of service, so it is switched off unless the environment says
otherwise (TORCH_SYMM_MEM_DISABLE_MULTICAST=0).

Shapes: m rows (tokens), n columns; t ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.collectives import DONE, all_reduce, barrier
from megafp8.exchange import Arriving, Product, Summed, add_shares, part_of

_ALIGNMENT = 256  # of what lies behind one another in a buffer


class _Buffer:
    """A buffer of each rank, mapped here: `of[rank]`, uint8. `mine` owns this rank's; `barrier` is the GPUs'."""

    def __init__(self, mine: Tensor, handle: Any, size: int, ranks: int) -> None:
        self.mine, self.barrier = mine, handle.barrier
        self.of = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks)]
        self._places: dict[tuple[int, ...], list[list[Tensor]]] = {}

    def places(self, sizes: tuple[int, ...]) -> list[list[Tensor]]:
        """On each rank, pieces of these many bytes, one behind the other: made once, for it takes the host longer than
        a copy's launch, and a model has few sizes."""
        if sizes not in self._places:
            starts = _starts(sizes)
            self._places[sizes] = [
                [whole[start : start + size] for start, size in zip(starts, sizes)] for whole in self.of
            ]
        return self._places[sizes]


class Symmetric:
    """Tokens are cut over `group`, whose ranks are GPUs of one host. Collective: build it on every rank.

    Buffers begin with `size` bytes each and grow; growing synchronizes. RuntimeError, on every rank alike, where
    symmetric memory cannot be set up.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, size: int = 2**20) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.group, self.device = group, device
        self._stream = torch.cuda.Stream(device)
        # Of one exchange, whose waits have all been queued when the next one records them again.
        self._computed, *self._moved = (torch.cuda.Event() for _ in range(group.size()))
        self._buffers: list[_Buffer] = []
        self._size = self._turn = 0
        self._busy = False
        self._grow(size)

    def gather(self, own: Sequence[Tensor]) -> Arriving:
        t, rank = self.group.size(), self.group.rank()
        own_bytes = [_flat(x) for x in own]
        sizes = tuple(x.numel() for x in own_bytes)
        buffer = self._next(_starts(sizes)[-1])
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
        pieces: list[tuple[slice, Callable[[], Any]]] = [(part_of(rank, m, t), DONE.wait)]
        with torch.cuda.stream(self._stream):
            for step, moved in enumerate(self._moved, 1):
                sender = (rank + step) % t
                for part, place in zip(parts[sender], places[sender]):
                    part.copy_(place)
                moved.record(self._stream)
                pieces.append((part_of(sender, m, t), partial(self._wait, moved, current, last=step == t - 1)))
        for part, x in zip(parts[rank], own_bytes):
            part.copy_(x)
        return Arriving([y.view(x.dtype).view(-1, *x.shape[1:]) for x, y in zip(own, whole)], pieces)

    def sum(self, product: Product) -> Summed:
        t, rank = self.group.size(), self.group.rank()
        m = product.arriving.wait()[0].shape[0]
        share_bytes = m // t * product.n * product.dtype.itemsize
        buffer = self._next(t * share_bytes)
        current = torch.cuda.current_stream(self.device)
        sent = []
        for step in range(1, t):
            to = (rank + step) % t
            share = product.rows(part_of(to, m, t), None)
            self._computed.record(current)
            self._computed.wait(self._stream)
            with torch.cuda.stream(self._stream):
                buffer.of[to][rank * share_bytes : (rank + 1) * share_bytes].copy_(_flat(share))
            sent.append(share)
        shares_trn = buffer.of[rank][: t * share_bytes].view(product.dtype).view(t, m // t, product.n)
        product.rows(part_of(rank, m, t), shares_trn[rank])
        all_sent = self._moved[0]
        all_sent.record(self._stream)

        def result() -> Tensor:
            buffer.barrier()
            return add_shares(shares_trn)

        return Summed(_Waiting(partial(self._wait, all_sent, current, last=True)), result, sent)

    def _wait(self, event: torch.cuda.Event, current: torch.cuda.Stream, *, last: bool) -> None:
        event.wait(current)
        self._busy = self._busy and not last

    def _next(self, size: int) -> _Buffer:
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
        self._buffers = [self._allocate(size) for _ in range(2)]
        self._size = size

    def _allocate(self, size: int) -> _Buffer:
        allocate = symmetric_memory._SymmetricMemory.empty_strided_p2p  # an allocation of its own, not one of a pool
        mine = self._agreed(lambda: allocate((size,), (1,), torch.uint8, self.device))
        handle = self._agreed(lambda: symmetric_memory.rendezvous(mine, self.group))
        return _Buffer(mine, handle, size, self.group.size())

    def _agreed(self, step: Callable[[], Any]) -> Any:
        """What `step` gives; RuntimeError on every rank where it failed on any."""
        result, reason = None, "another rank failed"
        try:
            result = step()
        except (RuntimeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        succeeded = torch.tensor(int(result is not None), device=self.device)
        if not all_reduce(succeeded, self.group, "min").item():
            raise RuntimeError(f"symmetric memory cannot be set up: {reason}")
        return result


class _Waiting(NamedTuple):
    """A wait as a `Work`."""

    wait: Callable[[], Any]


def _flat(x: Tensor) -> Tensor:
    """A contiguous tensor as a vector of bytes."""
    return x.view(-1).view(torch.uint8)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin, one behind the other; and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts
