"""Tensors that backward needs wait in the host's memory, and come back in time.

Autograd lets one replace what it saves (`saved_tensors_hooks`). Within `Forward.block` every saved tensor large enough
is copied to the host, and backward gets a copy of that copy. Views of one storage, such as q, k and v, travel together
once.

*Overlap.* Copies run on a stream of their own. A block's begin when its forward has been queued, and run beside the
next block. Backward meets the blocks in reverse: at the first tensor of a block that it asks for, the block before is
sent for, so that it arrives while this one computes. Where copying takes longer than computing, computing waits.

*Memory.* On the device there are at most two blocks' tensors at a time: forward gives up a block's when the next
block's forward has been queued, by letting the compute stream wait for the copies and dropping the references. So
memory is reused in the order of the compute stream, as all other memory, and nothing has to be recorded for the
allocator. A forward's last block stays until the next forward's first; if backward comes before that, it finds the
tensors in place and nothing is copied back. Pinned buffers are kept for the next micro-batch, since making them blocks
the host: as many bytes as the schedule ever has in flight.

*What it gives up.* In a pipeline, backward begins with a micro-batch whose last block was given up long ago, and waits
for that one's copies; so the last block of a stage is better left on the device.

*Waiting.* Streams wait for streams; the host waits for nothing.

What stays where it is: parameters, what the caller names, and tensors below `smallest` bytes, whose copies cost more
launches than they save. On a CPU the same happens with plain copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 2**18


class _Host:
    """Buffers of the host, by size, and the stream of copies to and from them.

    One stream: so a buffer that is given back may be taken at once, for whatever reads or writes it was queued before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Within, copies begin after what the current stream has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def done(self) -> torch.cuda.Event | None:
        """What says that all copies so far are done."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _Storage:
    """The bytes of a storage: on the device, on the host, or both. Lives as long as an autograd node refers to it."""

    def __init__(self, on_device: Tensor, block: _Block) -> None:
        self.on_device: Tensor | None = on_device
        self.block = block
        self.on_host: Tensor | None = None

    def __del__(self) -> None:
        if self.on_host is not None:
            self.block.host.give_back(self.on_host)


class _Saved(NamedTuple):
    """A saved tensor: a view of a storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Block:
    """What a block's forward has saved, after that of the block `before`."""

    def __init__(self, host: _Host, before: _Block | None) -> None:
        self.host, self.before = host, before
        self.storages: WeakSet[_Storage] = WeakSet()
        self._copied: torch.cuda.Event | None = None  # to the host, and later back
        self._is_back = False

    def send(self) -> None:
        """Start copying to the host."""
        with self.host.copying():
            for storage in self.storages:
                assert storage.on_device is not None
                storage.on_host = self.host.take(storage.on_device.numel())
                storage.on_host.copy_(storage.on_device, non_blocking=True)
        self._copied = self.host.done()

    def release(self) -> None:
        """Free the device's memory, unless backward uses it already."""
        if not self._is_back:
            self.host.wait(self._copied)
            for storage in self.storages:
                storage.on_device = None

    def fetch(self) -> None:
        """Start copying what is not on the device back to it."""
        gone = [storage for storage in self.storages if storage.on_device is None]
        for storage in gone:
            assert storage.on_host is not None
            storage.on_device = torch.empty_like(storage.on_host, device=self.host.device)
        with self.host.copying():
            for storage in gone:
                assert storage.on_device is not None
                assert storage.on_host is not None
                storage.on_device.copy_(storage.on_host, non_blocking=True)
        if gone:
            self._copied = self.host.done()

    def arrive(self) -> None:
        """Have everything on the device, and send for the block before."""
        if self._is_back:
            return
        self._is_back = True
        self.fetch()  # what has been sent for is there
        self.host.wait(self._copied)
        if self.before is not None:
            self.before.fetch()


class Forward:
    """The blocks of one forward pass of a stage, in order."""

    def __init__(self, owner: ActivationOffload, keep: Iterable[Tensor]) -> None:
        self._owner = owner
        self._last: _Block | None = None
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in keep}

    @contextmanager
    def block(self) -> Iterator[None]:
        """Within, a block's forward; what it saves goes to the host."""
        owner = self._owner
        block = self._last = _Block(owner.host, self._last)
        found: dict[int, _Storage] = {}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            size = tensor.numel() * tensor.element_size()
            address = tensor.untyped_storage().data_ptr()
            if isinstance(tensor, nn.Parameter) or address in self._keep or size < owner.smallest:
                return tensor
            if address not in found:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                found[address] = _Storage(flat, block)
                block.storages.add(found[address])
            offset = int(tensor.storage_offset())
            return _Saved(found[address], tensor.dtype, tensor.shape, tensor.stride(), offset)

        with saved_tensors_hooks(pack, _unpack):
            yield
        block.send()
        owner.replace_newest(block)


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    saved.storage.block.arrive()
    assert saved.storage.on_device is not None
    flat = saved.storage.on_device.view(saved.dtype)
    return flat.as_strided(saved.size, saved.stride, saved.offset)


class ActivationOffload:
    """Offloads a stage's blocks on `device`: `forward` for each micro-batch, and in it `Forward.block` for each block.

    `smallest`: bytes from which on a saved tensor is worth it.
    """

    def __init__(self, device: torch.device, smallest: int = SMALLEST) -> None:
        self.host, self.smallest = _Host(device), smallest
        self._newest: _Block | None = None  # whose tensors are on the device still

    def forward(self, keep: Iterable[Tensor]) -> Forward:
        """Begin a forward pass. The tensors `keep` stay on the device: others hold them there anyway."""
        return Forward(self, keep)

    def replace_newest(self, block: _Block) -> None:
        """Free the device's memory of the block before, whose copies had a whole block's forward to run beside."""
        if self._newest is not None:
            self._newest.release()
        self._newest = block
