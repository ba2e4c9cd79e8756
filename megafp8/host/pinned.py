"""Pinned host memory, which a GPU copies at full speed and while the host continues.

Memory is registered with CUDA after its allocation, because torch's pinned allocator rounds sizes up to powers of two.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def pin(memory: Tensor, slow: str) -> None:
    """Pin `memory`, a contiguous tensor. If that fails, log a warning that says what becomes slow."""
    import torch

    if memory.nbytes and int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        logger.warning("%.1f GiB of host memory could not be pinned: %s", memory.nbytes / 2**30, slow)


def unpin(memory: Tensor) -> None:
    """Undo `pin`. Call this before the memory is freed, because torch does not know about the registration."""
    import torch

    if memory.nbytes:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
