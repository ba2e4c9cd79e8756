"""What every layer of the model is built with: the groups it is cut over, the FP8 manager, dtype and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megafp8.distributed.tp_overlap import TPOverlap
from megafp8.fp8 import Fp8Manager


@dataclass(frozen=True)
class BuildContext:
    """Handed down through the constructors; layers read nothing else of the job.

    `sequence_parallel` is what the config says; with a tensor group of one rank it has no effect. `context_parallel`:
    the ranks that hold the tokens of the same sequences between them; None where this rank has whole ones.
    `tp_overlap`:
    how linear layers exchange tokens with the tensor group; None: by one collective at a time. `blocks_on_meta`:
    weights of blocks are given memory later, by someone else.
    """

    tensor: ProcessGroup
    fp8: Fp8Manager
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool
    context_parallel: ProcessGroup | None = None
    tp_overlap: TPOverlap | None = None
    blocks_on_meta: bool = False

    @property
    def cuts_sequence(self) -> bool:
        """Activations between tensor-parallel regions hold only this rank's slice of the sequence."""
        return self.sequence_parallel and self.tensor.size() > 1
