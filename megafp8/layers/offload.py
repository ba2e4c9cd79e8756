"""Activations offloaded to pinned host memory.

Autograd can replace what it saves (`saved_tensors_hooks`). Within `Forward.block` each large saved tensor is copied to
the host, and backward gets a copy of the copy. Views of one storage, such as q, k and v, are copied once.

*Overlap.* Copies run on their own stream. A block's start when its forward has been queued, and overlap with the next
block. Backward runs through the blocks in reverse: when it asks for the first tensor of a block, the copies of the
previous block start, to overlap with this one. Where copying takes longer than computing, the compute stream waits.

*Memory.* The device holds at most two blocks' tensors at a time: when the next block's forward has been queued, the
compute stream waits for a block's copies and the references are dropped. So memory is reused in the order of the
compute stream, and nothing need be recorded for the allocator. The last block of a forward stays until the next
forward's first; if backward comes before that, nothing is copied back. Pinned buffers are reused by the next
micro-batch, since allocating them blocks the host: as many bytes as the schedule ever has in flight.

*Cost.* In a pipeline, backward starts with a micro-batch whose last block was offloaded long ago, and waits for its
copies: better leave the last block of a stage on the device. The host never waits, only streams do.

Not offloaded: parameters and views of them, tensors that the caller names, and those below `smallest` bytes, whose
copies cost more launches than they save. On a CPU the copies are ordinary ones.
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
    """Host buffers, by size, and the stream of copies to and from them.

    There is one stream, so a returned buffer can be reused at once: earlier copies precede later ones.
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

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Start copies (to, from), after what is queued on the current stream; the event of their completion."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _Storage:
    """Bytes of a storage: on the device, on the host, or both. An autograd node that refers to it keeps it alive."""

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
    """Storages that a block's forward has saved. `previous`: the block before it in the same forward."""

    def __init__(self, host: _Host, previous: _Block | None) -> None:
        self.host, self.previous = host, previous
        self.storages: WeakSet[_Storage] = WeakSet()
        self._copied: torch.cuda.Event | None = None  # to the host, and later back
        self._in_backward = False

    def offload(self) -> None:
        """Start copying to the host."""
        pairs = []
        for storage in self.storages:
            assert storage.on_device is not None
            storage.on_host = self.host.take(storage.on_device.numel())
            pairs.append((storage.on_host, storage.on_device))
        self._copied = self.host.copy(pairs)

    def release(self) -> None:
        """Free the device's memory, unless backward uses it already."""
        if not self._in_backward:
            self.host.wait(self._copied)
            for storage in self.storages:
                storage.on_device = None

    def prefetch(self) -> None:
        """Start copying back what is not on the device."""
        pairs = []
        for storage in self.storages:
            if storage.on_device is None:
                assert storage.on_host is not None
                storage.on_device = torch.empty_like(storage.on_host, device=self.host.device)
                pairs.append((storage.on_device, storage.on_host))
        if pairs:
            self._copied = self.host.copy(pairs)

    def begin_backward(self) -> None:
        """Have everything on the device, and start copying back the previous block."""
        if self._in_backward:
            return
        self._in_backward = True
        self.prefetch()  # usually done already
        self.host.wait(self._copied)
        if self.previous is not None:
            self.previous.prefetch()


class Forward:
    """The blocks of one forward pass of a stage, in order."""

    def __init__(self, owner: ActivationOffload, keep: Iterable[Tensor]) -> None:
        self._owner = owner
        self._last: _Block | None = None
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in keep}

    @contextmanager
    def block(self, module: nn.Module | None = None) -> Iterator[None]:
        """Context of a block's forward, whose saved tensors are offloaded. `module`: the block, whose weights are kept.

        Autograd saves views of weights too, where these are frozen. FSDP frees what it gathered before it is copied.
        """
        owner = self._owner
        kept = nn.Module() if module is None else module
        block = self._last = _Block(owner.host, self._last)
        storages: dict[int, _Storage] = {}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            size = tensor.numel() * tensor.element_size()
            address = tensor.untyped_storage().data_ptr()
            if isinstance(tensor, nn.Parameter) or address in self._keep or size < owner.smallest:
                return tensor
            if address not in storages:
                if any(address == _address(weight) for weight in kept.parameters()):
                    return tensor
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                storages[address] = _Storage(flat, block)
                block.storages.add(storages[address])
            offset = int(tensor.storage_offset())
            return _Saved(storages[address], tensor.dtype, tensor.shape, tensor.stride(), offset)

        with saved_tensors_hooks(pack, _unpack):
            yield
        block.offload()
        owner.replace_newest(block)


def _address(weight: Tensor) -> int:
    """Address of a weight's storage; 0 for one that is not gathered."""
    from torch.distributed.tensor import DTensor  # takes a second, and a dry run has no use for it

    return 0 if isinstance(weight, DTensor) else weight.untyped_storage().data_ptr()


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    saved.storage.block.begin_backward()
    assert saved.storage.on_device is not None
    flat = saved.storage.on_device.view(saved.dtype)
    return flat.as_strided(saved.size, saved.stride, saved.offset)


class ActivationOffload:
    """Offloads a stage's blocks on `device`: `forward` for each micro-batch, in it `Forward.block` for each block.

    `smallest`: bytes of the smallest saved tensor that is offloaded.
    """

    def __init__(self, device: torch.device, smallest: int = SMALLEST) -> None:
        self.host, self.smallest = _Host(device), smallest
        self._newest: _Block | None = None  # its tensors are still on the device

    def forward(self, keep: Iterable[Tensor]) -> Forward:
        """Begin a forward pass. The tensors `keep` stay on the device, since others hold them there anyway."""
        return Forward(self, keep)

    def replace_newest(self, block: _Block) -> None:
        """Free the device's memory of the previous block, whose copies overlapped with this block's forward."""
        if self._newest is not None:
            self._newest.release()
        self._newest = block
