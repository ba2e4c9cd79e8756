"""Host memory for what a save in the background writes.

Training may change a tensor while a thread still writes it. So the values are copied to the host first, each rectangle
that this rank writes and no other, into one stretch of memory that is made at the first save and reused by all later
ones. It is as large as this rank's share of the checkpoint: 14 bytes a parameter (bf16 weights, fp32 masters and
moments) divided by the number of ranks.

On CUDA the memory is pinned, without which a copy would neither be fast (about 50 GB/s over PCIe 5) nor overlap with
anything, and the copies run on a stream of their own. Registering memory that is there already rounds nothing up, while
torch's allocator of pinned memory hands out powers of two.

Each copy is a tensor with a storage of its own: torch.distributed.checkpoint clones what is a part of a larger storage.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.dcp import SaveParts
from megafp8.checkpoint.rectangles import Rectangles
from megafp8.distributed.sharding import Shape

_ALIGNMENT = 64
_log = logging.getLogger(__name__)


class Slot(NamedTuple):
    """A rectangle at `offset` of the global tensor `name`, and its place on the host."""

    name: str
    offset: Shape
    source: Tensor
    target: Tensor


class HostMemory:
    """Room for this rank's share of a checkpoint of tensors on `device`, for one save at a time."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if device.type == "cuda" else None

    def slots(self, state: dict[str, Rectangles], parts: SaveParts) -> list[Slot]:
        """A place for each rectangle of `state` that this rank writes; what was there before is overwritten."""
        items = [item.index for item in parts.plan.items]
        views = [state[index.fqn].__get_tensor_shard__(index) for index in items]
        ends = list(itertools.accumulate(-(-view.nbytes // _ALIGNMENT) * _ALIGNMENT for view in views))
        self._reserve(ends[-1] if ends else 0)
        slots = []
        for index, view, start in zip(items, views, [0, *ends]):
            target = _with_own_storage(self._memory[start : start + view.nbytes], view)
            slots.append(Slot(index.fqn, tuple(index.offset or ()), view, target))
        return slots

    def _reserve(self, size: int) -> None:
        if self._memory.numel() == size:
            return
        pins = self._stream is not None
        if pins and self._memory.numel():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pins and size:
            error = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            if error:
                _log.warning("%.1f GiB of host memory could not be pinned: saving will stall longer", size / 2**30)

    def copy(self, slots: Iterable[Slot]) -> None:
        """Copy `slots`. What is queued on the device after this call may change them, and them alone."""
        for slot in slots:
            slot.target.copy_(slot.source, non_blocking=True)
        if self._ready is not None:
            self._ready.record()

    def copy_beside(self, slots: Iterable[Slot]) -> None:
        """Copy `slots` beside what else the device does, and return once these, and those of `copy`, are copied.

        For another thread. The values are those at the last call of `copy`, if nobody changes them before this returns.
        """
        if self._stream is None or self._ready is None:
            for slot in slots:
                slot.target.copy_(slot.source)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for slot in slots:
                slot.target.copy_(slot.source, non_blocking=True)
            self._stream.synchronize()


def copied_state(slots: Iterable[Slot], original: dict[str, Rectangles]) -> dict[str, Rectangles]:
    """What `slots` hold of `original`."""
    copies: dict[str, Rectangles] = {}
    for slot in slots:
        tensor = original[slot.name]
        copies.setdefault(slot.name, Rectangles(tensor.global_shape, tensor.dtype)).add(slot.offset, slot.target)
    return copies


def _with_own_storage(room: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` in the bytes `room`, with a storage that is just these bytes."""
    if not room.numel():
        return torch.empty_like(like, device="cpu")
    return torch.frombuffer(room.numpy().data, dtype=like.dtype).view(like.shape)
