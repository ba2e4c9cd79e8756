"""bench_recurrent: a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_recurrent


def test_runs_on_a_cpu(tmp_path: Path) -> None:
    sizes = ["--seq-length", "70", "--heads", "2", "--groups", "1", "--rounds", "1"]
    assert bench_recurrent.main(["--device", "cpu", *sizes, "--json", str(tmp_path / "out.json")]) == 0
    records = json.loads((tmp_path / "out.json").read_text())
    assert [record["kind"] for record in records] == ["mamba2", "gated_delta_net", "kimi_delta_attention"]
    for record in records:
        limit = 1e-6 if record["kind"] == "mamba2" else 1e-5
        assert max(record["output_error"], record["gradient_error"]) < limit


def test_groups_that_do_not_divide_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_recurrent.main(["--device", "cpu", "--heads", "3", "--groups", "2"]) == 2
    assert "--heads (3) is not a multiple of 2" in capsys.readouterr().err
