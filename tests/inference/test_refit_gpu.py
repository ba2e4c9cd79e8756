"""Refits between GPUs over NCCL: from layout to layout in one job, and from one job to another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_refit_ranks


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_nccl(tmp_path: Path, ranks: int) -> None:
    """All tensors of the generator are the trainer's, FP8 scales too."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    file = tmp_path / "refits.json"
    bench_refit_ranks.main(
        ["--device", "cuda", "--ranks", str(ranks), "--shapes", "small", "--rounds", "2", "--json", str(file)]
    )
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows if not row["exact"]] == []
    assert len(rows) == sum(map(len, bench_refit_ranks.CASES[ranks]))
