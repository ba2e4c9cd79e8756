"""Buffers that ranks have mapped, on ranks that map files instead of each other's GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from megafp8.distributed import symmetric_memory as mapped
from megafp8.distributed.collectives import barrier
from megafp8.distributed.symmetric_memory import Mapped, pieces, starts
from tests.world import World


class _SharedFiles:
    """Symmetric memory of CPU processes: torch's functions, made of files that all of them map."""

    def __init__(self, folder: str, group: ProcessGroup) -> None:
        self.folder, self.group = folder, group
        self.sizes: list[int] = []

    def empty_strided_p2p(self, size: tuple[int], *_: Any) -> Tensor:
        self.sizes.append(*size)
        return torch.empty(0)

    def rendezvous(self, _: Tensor, group: ProcessGroup) -> _SharedFiles:
        self.name = f"{self.folder}/{len(self.sizes)}"
        with open(f"{self.name}-{group.rank()}", "wb") as file:
            file.truncate(self.sizes[-1])
        barrier(group)
        made = _SharedFiles(self.folder, group)
        made.name = self.name
        return made

    def get_buffer(self, rank: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
        return torch.from_file(f"{self.name}-{rank}", shared=True, size=shape[0], dtype=dtype)

    def barrier(self) -> None:
        barrier(self.group)


def map_files(group: ProcessGroup, folder: str) -> None:
    """Let ranks map files instead of each other's GPUs."""
    shared = _SharedFiles(folder, group)
    mapped.symmetric_memory = type("", (), {"_SymmetricMemory": shared, "rendezvous": shared.rendezvous})  # type: ignore[assignment]


def test_pieces_begin_at_multiples_of_256() -> None:
    assert starts([1, 256, 257]) == [0, 256, 512, 1024]
    assert starts([]) == [0]
    first, second = pieces(torch.arange(600), [3, 300])
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == list(range(256, 556))


def _read_from_each_other(folder: str) -> list[list[int]]:
    """What this rank sees in all ranks' second pieces, of which each has written its own."""
    group = groups.WORLD
    assert group is not None
    map_files(group, folder)
    buffer = Mapped(512, group, torch.device("cpu"))
    places = buffer.places((8, 4))
    assert buffer.places((8, 4)) is places
    places[group.rank()][1].fill_(10 + group.rank())
    buffer.barrier()
    found = [of_rank[1].tolist() for of_rank in places]
    buffer.barrier()
    return found


def test_ranks_read_from_each_other(world2: World, tmp_path: Any) -> None:
    assert world2.run(_read_from_each_other, str(tmp_path)) == [[[10] * 4, [11] * 4]] * 2
