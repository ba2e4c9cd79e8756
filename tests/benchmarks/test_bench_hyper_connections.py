"""bench_hyper_connections: a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_hyper_connections


def test_equals_pytorch(tmp_path: Path) -> None:
    sizes = ["--tokens", "6", "--hidden", "8", "--iterations", "3", "--rounds", "1"]
    assert bench_hyper_connections.main(["--device", "cpu", *sizes, "--json", str(tmp_path / "out.json")]) == 0
    records = json.loads((tmp_path / "out.json").read_text())
    assert [record["name"] for record in records] == ["megafp8", "PyTorch"]
    assert max(max(record["output_error"], record["gradient_error"]) for record in records) < 1e-5


def test_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_hyper_connections.main(["--device", "cpu", "--tokens", "0"]) == 2
    assert "--tokens" in capsys.readouterr().err
