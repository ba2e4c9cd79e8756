"""torch's flight recorder: the last collectives of this process, each with its group, number, sizes, state and stack.

NCCL's and gloo's process groups write to it while `TORCH_FR_BUFFER_SIZE` is not 0, which they read when the first of
them is made; its default depends on torch's version. A record is a pickled dictionary. `torchfrtrace FOLDER -p
collectives_rank_`, which comes with torch, compares those of all ranks, if they are NCCL's.
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
    """Record the collectives of groups that are made from here on, unless the environment says how many."""
    os.environ.setdefault(BUFFER_SIZE, _ENTRIES)


def write_collectives(folder: Path, rank: int) -> Path | None:
    """Write what this process has recorded to `folder`; None if that is nothing."""
    functions = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # of NCCL, of other backends
        dump = getattr(functions, name, None)
        content = b"" if dump is None else dump()
        if content and pickle.loads(content).get("entries"):
            path = folder / f"{_PREFIX}{rank:05d}"
            path.write_bytes(content)
            return path
    return None
