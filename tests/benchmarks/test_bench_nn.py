"""bench_nn: a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_nn


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--tokens 16 --scale 128 --rounds 1 --steps 1 --recipes current"
    assert bench_nn.main(["--device", "cpu", *sizes.split(), "--json", str(tmp_path / "out.json")]) == 0
    records = json.loads((tmp_path / "out.json").read_text())
    assert [record["name"] for record in records] == [f"{module}, current, megafp8" for module in bench_nn.MODULES]
    assert all(record["ms"] > 0 for record in records)
    assert "LayerNormMLP, current, megafp8" in capsys.readouterr().out
    assert bench_nn.main(["--recipes", "fp4"]) == 2
    assert "--recipes: 'fp4' is none of bf16, delayed" in capsys.readouterr().err
