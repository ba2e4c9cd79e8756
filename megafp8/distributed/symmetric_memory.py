"""Buffers of each rank that all ranks of a host have mapped: torch's symmetric memory, without multicast.

What is in another GPU's buffer is read and written by a copy like any other, which the GPU's copy engines do: no
multiprocessor has a part in it, and the other rank need not be there. A barrier of a few microseconds, which the GPUs
keep among themselves, says when it may be done.

*Multicast* (NVLS, NVLink SHARP) is something that torch sets up with symmetric memory unless told not to. Nothing here
uses it, and it can take a shared host's GPUs out of service, so it is switched off unless the environment says
otherwise (TORCH_SYMM_MEM_DISABLE_MULTICAST=0).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce

_ALIGNMENT = 256  # of what lies behind one another in a buffer


class Mapped:
    """A buffer of each rank of `group`, GPUs of one host, mapped here: `of[rank]`, uint8. Collective to build.

    `barrier()`, on the current stream, is the GPUs'. RuntimeError, on every rank alike, where it cannot be set up.
    """

    def __init__(self, size: int, group: ProcessGroup, device: torch.device) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        allocate = symmetric_memory._SymmetricMemory.empty_strided_p2p  # an allocation of its own, not one of a pool
        self._mine = _agreed(lambda: allocate((size,), (1,), torch.uint8, device), group, device)
        handle = _agreed(lambda: symmetric_memory.rendezvous(self._mine, group), group, device)
        self.barrier: Callable[[], Any] = handle.barrier
        self.of: list[Tensor] = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
        self._places: dict[tuple[int, ...], list[list[Tensor]]] = {}

    def places(self, sizes: tuple[int, ...]) -> list[list[Tensor]]:
        """On each rank, pieces of these many bytes, one behind the other: made once, for it takes the host longer than
        a copy's launch, and a model has few sizes."""
        if sizes not in self._places:
            self._places[sizes] = [pieces(whole, sizes) for whole in self.of]
        return self._places[sizes]


def pieces(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Of a buffer of bytes, pieces of these many, one behind the other."""
    return [whole[start : start + size] for start, size in zip(starts(sizes), sizes)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin, one behind the other; and where the last one ends."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return found


def _agreed(step: Callable[[], Any], group: ProcessGroup, device: torch.device) -> Any:
    """What `step` gives; RuntimeError on every rank where it failed on any."""
    result, reason = None, "another rank failed"
    try:
        result = step()
    except (RuntimeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    succeeded = torch.tensor(int(result is not None), device=device)
    if not all_reduce(succeeded, group, "min").item():
        raise RuntimeError(f"symmetric memory cannot be set up: {reason}")
    return result
