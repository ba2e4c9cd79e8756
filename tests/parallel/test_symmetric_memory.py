"""Symmetric memory on CPU ranks, which map files instead of each other's GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from megafp8.parallel import symmetric_memory
from megafp8.parallel.collectives import barrier
from megafp8.parallel.symmetric_memory import SymmetricBuffer, offsets, split
from tests.world import World


class _SharedFiles:
    """torch's functions for symmetric memory, with files that all processes map."""

    def __init__(self, folder: str, group: ProcessGroup) -> None:
        self.folder, self.group = folder, group
        self.sizes: list[int] = []

    def empty_strided_p2p(self, size: tuple[int], *_: Any) -> Tensor:
        self.sizes.append(*size)
        return torch.empty(0)

    def rendezvous(self, _: Tensor, group: ProcessGroup) -> _SharedFiles:
        made = _SharedFiles(self.folder, group)
        made.name = f"{self.folder}/{len(self.sizes)}"  # type: ignore[attr-defined]
        with open(f"{made.name}-{group.rank()}", "wb") as file:  # type: ignore[attr-defined]
            file.truncate(self.sizes[-1])
        barrier(group)
        return made

    def get_buffer(self, rank: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
        return torch.from_file(f"{self.name}-{rank}", shared=True, size=shape[0], dtype=dtype)  # type: ignore[attr-defined]

    def barrier(self) -> None:
        barrier(self.group)


def map_files(group: ProcessGroup, folder: str) -> None:
    """Make ranks map files instead of each other's GPUs."""
    shared = _SharedFiles(folder, group)
    symmetric_memory.symmetric_memory = type(  # type: ignore[assignment]
        "", (), {"_SymmetricMemory": shared, "rendezvous": shared.rendezvous}
    )


def test_tensors_in_a_buffer_are_aligned_to_256_bytes() -> None:
    assert offsets([1, 256, 257]) == [0, 256, 512, 1024]
    assert offsets([]) == [0]
    first, second = split(torch.arange(600), [3, 300])
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == list(range(256, 556))


def _read_all_ranks(folder: str) -> list[list[int]]:
    """What this rank reads from all ranks' second tensors, of which each has written its own."""
    group = groups.WORLD
    assert group is not None
    map_files(group, folder)
    buffer = SymmetricBuffer(512, group, torch.device("cpu"))
    views = buffer.views((8, 4))
    assert buffer.views((8, 4)) is views
    views[group.rank()][1].fill_(10 + group.rank())
    buffer.barrier()
    found = [of_rank[1].tolist() for of_rank in views]
    buffer.barrier()
    return found


def test_ranks_read_each_others_buffers(world2: World, tmp_path: Any) -> None:
    assert world2.run(_read_all_ranks, str(tmp_path)) == [[[10] * 4, [11] * 4]] * 2
