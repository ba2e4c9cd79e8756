"""A checkpoint saved by real ranks under one layout is loaded under every other one, bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import CheckpointReader, Rectangle, Rectangles, load, save
from tests.checkpoint import toy
from tests.marks import slow_but
from tests.world import World


def _save(folder: str, tp: int, pp: int, dtype: torch.dtype) -> str:
    model = toy.make(dist.get_rank(), tp, pp, dtype)
    return str(save(folder, 3, model.state(), {**toy.METADATA, "parallel": {"tensor": tp, "pipeline": pp}}))


def _load(path: str, tp: int, pp: int, dtype: torch.dtype) -> bool:
    model = toy.make(dist.get_rank(), tp, pp, dtype)
    empty = model.zeroed()
    metadata = load(path, empty.state())
    return empty.equals(model) and metadata["step"] == 3


@pytest.mark.parametrize(
    ("tp", "pp", "ranks", "dtype"),
    slow_but(
        [(*layout, dtype) for layout in ((2, 1, 2), (2, 2, 4), (1, 2, 4)) for dtype in (torch.float32, torch.bfloat16)],
        (2, 1, 2, torch.float32),
        (2, 2, 4, torch.bfloat16),
    ),
    ids=str,
)
def test_a_checkpoint_fits_every_layout(
    world4: World, tmp_path: Path, dtype: torch.dtype, tp: int, pp: int, ranks: int
) -> None:
    path = world4.run(_save, str(tmp_path), tp, pp, dtype, ranks=ranks)[0]
    whole = toy.make(0, 1, 1, dtype)
    alone = whole.zeroed()
    load(path, alone.state())  # without torch.distributed
    assert alone.equals(whole)
    for tp, pp, ranks in [(1, 1, 2), (2, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 4), (2, 1, 4)]:
        assert all(world4.run(_load, path, tp, pp, dtype, ranks=ranks)), f"tp {tp}, pp {pp}, {ranks} ranks"


def test_replicated_rectangles_are_written_once_and_all_ranks_write(world4: World, tmp_path: Path) -> None:
    path = Path(world4.run(_save, str(tmp_path), 2, 1, torch.float32)[0])  # dp 2
    index = CheckpointReader(path).index
    rectangles = Counter((i.fqn, tuple(i.offset)) for i in index.storage_data)
    assert set(rectangles.values()) == {1}
    assert sum(name == "model.layers.0.norm" for name, _ in rectangles) == 1
    assert sum(name == "model.embedding" for name, _ in rectangles) == 2
    for name, entry in index.state_dict_metadata.items():
        assert sum(math.prod(c.sizes) for c in entry.chunks) == math.prod(entry.size), name
    assert len({stored.relative_path for stored in index.storage_data.values()}) == 4  # each rank writes a share


@pytest.mark.gpu
def test_tensors_on_the_gpu_come_back_bit_for_bit(tmp_path: Path) -> None:
    whole = toy.truth("w", (64, 48), torch.bfloat16).cuda()
    parts = [Rectangle((0, column), whole[:, column : column + 16]) for column in (0, 16, 32)]
    path = save(tmp_path, 1, {"w": Rectangles((64, 48), torch.bfloat16, parts), "step": torch.tensor(5).cuda()}, {})
    on_gpu, on_cpu = torch.zeros_like(whole), torch.zeros(64, 48, dtype=torch.bfloat16)
    step = torch.tensor(0).cuda()
    rows = [Rectangle((row, 0), on_gpu[row : row + 32]) for row in (0, 32)]
    load(path, {"w": Rectangles((64, 48), torch.bfloat16, rows), "step": step})
    load(path, {"w": on_cpu}, optional=lambda name: name == "step")
    assert torch.equal(on_gpu, whole)
    assert torch.equal(on_cpu, whole.cpu())
    assert step.item() == 5
