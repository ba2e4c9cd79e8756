"""Offloading of activations to pinned host memory.

Autograd lets a program replace the tensors that it saves (`saved_tensors_hooks`). Inside `Forward.block`, each large
saved tensor is copied to the host, and backward receives a copy of that copy. Views of one storage, such as q, k and v,
are copied once.

*Overlap.* Copies run on their own stream. The copies of a block start when its forward has been queued, and overlap
with the next block. Backward runs through the blocks in reverse order: when it asks for the first tensor of a block,
the copies of the previous block start and overlap with this block. If copying takes longer than computing, the compute
stream waits.

*Memory.* The device holds the tensors of at most two blocks at a time. When the next block's forward has been queued,
the compute stream waits for the copies of the current block, and the references are dropped. Memory is therefore reused
in the order of the compute stream, and the allocator needs no recorded streams. The last block of a forward pass stays
on the device until the first block of the next forward pass. If backward comes before that, nothing is copied back. The
next micro-batch reuses pinned buffers, because allocating them blocks the host. Their total size is the largest number
of bytes that the schedule ever has in flight.

*Cost.* In a pipeline, backward starts with a micro-batch whose last block was offloaded long ago, and waits for its
copies. It is better to leave the last block of a stage on the device. Only streams wait, never the host.

Three kinds of tensors are not offloaded: parameters and their views, tensors that the caller names, and tensors below
`smallest` bytes, for which the launch of a copy would cost more than the copy saves. On a CPU, copies are ordinary
copies.
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
    """Pool of host buffers by size, and the stream of copies to and from them.

    There is only one stream, so a returned buffer can be reused at once: earlier copies precede later ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        """Return a host buffer of `size` bytes, a free one if there is any."""
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        """Make a buffer available again."""
        self._free[buffer.numel()].append(buffer)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Start copies (target, source) after the current stream's queued work, and return their completion event."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class _Storage:
    """Bytes of one storage, on the device, on the host, or both.

    The autograd nodes that saved it keep it alive.
    """

    def __init__(self, on_device: Tensor, block: _Block) -> None:
        self.on_device: Tensor | None = on_device
        self.block = block
        self.on_host: Tensor | None = None

    def __del__(self) -> None:
        if self.on_host is not None:
            self.block.host.give_back(self.on_host)


class _Saved(NamedTuple):
    """Saved tensor, described as a view of a storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Block:
    """Storages that a block's forward has saved.

    `previous` is the block before it in the same forward pass.
    """

    def __init__(self, host: _Host, previous: _Block | None) -> None:
        self.host, self.previous = host, previous
        self.storages: WeakSet[_Storage] = WeakSet()
        self._copied: torch.cuda.Event | None = None  # completion of the copies to the host, later of those back
        self._in_backward = False

    def offload(self) -> None:
        """Start copying the storages to the host."""
        pairs = []
        for storage in self.storages:
            assert storage.on_device is not None
            storage.on_host = self.host.take(storage.on_device.numel())
            pairs.append((storage.on_host, storage.on_device))
        self._copied = self.host.copy(pairs)

    def release(self) -> None:
        """Free the device memory, unless backward already uses it."""
        if not self._in_backward:
            self.host.wait(self._copied)
            for storage in self.storages:
                storage.on_device = None

    def prefetch(self) -> None:
        """Start copying back the storages that are not on the device."""
        pairs = []
        for storage in self.storages:
            if storage.on_device is None:
                assert storage.on_host is not None
                storage.on_device = torch.empty_like(storage.on_host, device=self.host.device)
                pairs.append((storage.on_device, storage.on_host))
        if pairs:
            self._copied = self.host.copy(pairs)

    def begin_backward(self) -> None:
        """Bring all storages to the device, and start copying back the previous block."""
        if self._in_backward:
            return
        self._in_backward = True
        self.prefetch()  # usually done already
        self.host.wait(self._copied)
        if self.previous is not None:
            self.previous.prefetch()


class Forward:
    """Forward pass of a stage that offloads its blocks, in order."""

    def __init__(self, owner: ActivationOffload, keep: Iterable[Tensor]) -> None:
        self._owner = owner
        self._last: _Block | None = None
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in keep}

    @contextmanager
    def block(self, module: nn.Module | None = None) -> Iterator[None]:
        """Offload the tensors that autograd saves inside this context, the forward of one block.

        The weights of `module`, the block, stay on the device. Autograd also saves views of weights if they are frozen,
        and FSDP frees its gathered weights before they could be copied.
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
    """Return the address of a weight's storage, or 0 if the weight is not gathered."""
    from torch.distributed.tensor import DTensor  # the import takes a second, and a dry run does not need it

    return 0 if isinstance(weight, DTensor) else weight.untyped_storage().data_ptr()


def _unpack(saved: Tensor | _Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    saved.storage.block.begin_backward()
    assert saved.storage.on_device is not None
    flat = saved.storage.on_device.view(saved.dtype)
    return flat.as_strided(saved.size, saved.stride, saved.offset)


class ActivationOffload:
    """Offloading of a stage's activations on one device.

    Call `forward` for each micro-batch, and in it `Forward.block` for each block.

    Args:
        device: Device of the stage.
        smallest: Size in bytes of the smallest saved tensor that is offloaded.
    """

    def __init__(self, device: torch.device, smallest: int = SMALLEST) -> None:
        self.host, self.smallest = _Host(device), smallest
        self._newest: _Block | None = None  # its tensors are still on the device

    def forward(self, keep: Iterable[Tensor]) -> Forward:
        """Begin a forward pass; the tensors `keep` stay on the device, because other code holds them there anyway."""
        return Forward(self, keep)

    def replace_newest(self, block: _Block) -> None:
        """Free the device memory of the previous block; its copies overlapped with this block's forward."""
        if self._newest is not None:
            self._newest.release()
        self._newest = block
