"""Symmetric memory: buffers that all ranks of a host have mapped (torch's implementation, without multicast).

Copies to or from another GPU's buffer run on the copy engines: they use no multiprocessors, and the other rank is not
involved. A device-side barrier of a few microseconds orders accesses.

torch sets up *multicast* (NVLS, NVLink SHARP) together with symmetric memory unless it is disabled. megafp8 does not
use it, and it can take a shared host's GPUs out of service, so it is disabled unless the environment says otherwise
(TORCH_SYMM_MEM_DISABLE_MULTICAST=0).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_reduce

_ALIGNMENT = 256  # alignment in bytes of the tensors packed into a buffer


class SymmetricBuffer:
    """Buffer of `size` bytes on each rank of `group` (GPUs of one host), mapped by all: `buffers[rank]`, uint8.

    The constructor is a collective. `barrier()` synchronizes the GPUs' current streams.

    Raises:
        RuntimeError: On every rank, if symmetric memory cannot be set up.
    """

    def __init__(self, size: int, group: ProcessGroup, device: torch.device) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        allocate = symmetric_memory._SymmetricMemory.empty_strided_p2p  # a separate allocation, not from a pool
        self._own = _on_all_ranks(lambda: allocate((size,), (1,), torch.uint8, device), group, device)
        handle = _on_all_ranks(lambda: symmetric_memory.rendezvous(self._own, group), group, device)
        self.barrier: Callable[[], Any] = handle.barrier
        self.buffers: list[Tensor] = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
        self._views: dict[tuple[int, ...], list[list[Tensor]]] = {}

    def views(self, sizes: tuple[int, ...]) -> list[list[Tensor]]:
        """Split each rank's buffer into tensors of `sizes` bytes.

        Views are cached, because making them takes longer than a kernel launch.
        """
        if sizes not in self._views:
            self._views[sizes] = [split(buffer, sizes) for buffer in self.buffers]
        return self._views[sizes]


def split(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return consecutive, aligned views of `sizes` bytes into a byte buffer."""
    return [buffer[start : start + size] for start, size in zip(offsets(sizes), sizes)]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the aligned start of each of several consecutive tensors of `sizes` bytes, then the total size."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _on_all_ranks(step: Callable[[], Any], group: ProcessGroup, device: torch.device) -> Any:
    """Return the result of `step`; raise RuntimeError on every rank if it failed on any rank."""
    result, reason = None, "another rank failed"
    try:
        result = step()
    except (RuntimeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    succeeded = torch.tensor(int(result is not None), device=device)
    if not all_reduce(succeeded, group, "min").item():
        raise RuntimeError(f"symmetric memory cannot be set up: {reason}")
    return result
