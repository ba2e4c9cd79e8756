"""bench_experts: uneven choices of different experts, and a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_experts
from benchmarks.bench_experts import chosen_experts


def test_choices_are_different_and_uneven() -> None:
    chosen = chosen_experts(500, 16, 4, 1.0, seed=0)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    counts = chosen.flatten().bincount(minlength=16)
    assert counts.max() > 2 * counts.float().mean()
    even = chosen_experts(500, 16, 4, float("inf"), seed=0)
    assert all(len(set(row)) == 4 for row in even.tolist())
    assert set(even.flatten().bincount(minlength=16).tolist()) == {125}


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--tokens 32 --experts 4 --top-k 2 --hidden 16 --width 8 --recipes delayed --rounds 1"
    assert bench_experts.main(["--device", "cpu", *sizes.split(), "--json", str(tmp_path / "out.json")]) == 0
    records = json.loads((tmp_path / "out.json").read_text())
    both = [f"{recipe}, {name}" for recipe in ("bf16", "delayed") for name in ("forward", "forward and backward")]
    assert [record["name"] for record in records] == [*both, "rows to experts and back"]
    assert all(record["ms"] > 0 for record in records)
    assert "32 tokens to 2 of 4 experts, 16 -> 16" in capsys.readouterr().out
    assert bench_experts.main(["--device", "cpu", "--experts", "2", "--top-k", "3"]) == 2
    assert "--top-k: 3 is more than --experts (2)" in capsys.readouterr().err
