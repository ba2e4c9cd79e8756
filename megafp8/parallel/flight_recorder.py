"""Access to torch's flight recorder, which keeps the last collectives of this process.

For each collective it records the group, number, sizes, state and stack. The process groups of NCCL and gloo write to
it unless `TORCH_FR_BUFFER_SIZE` is 0. They read this variable when the first group is made; its default depends on the
torch version. A record is a pickled dictionary. `torchfrtrace FOLDER -p collectives_rank_`, which comes with torch,
compares the records of all ranks, if they are NCCL records.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch

BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = "2000"
_PREFIX = "collectives_rank_"


def turn_on() -> None:
    """Record the collectives of all groups made from now on, unless the environment sets the buffer size."""
    os.environ.setdefault(BUFFER_SIZE, _ENTRIES)


def write_collectives(folder: Path, rank: int) -> Path | None:
    """Write the recorded collectives of this process to `folder`, and return the file; None if nothing was recorded."""
    functions = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # NCCL, other backends
        dump = getattr(functions, name, None)
        content = b"" if dump is None else dump()
        if content and pickle.loads(content).get("entries"):
            path = folder / f"{_PREFIX}{rank:05d}"
            path.write_bytes(content)
            return path
    return None
