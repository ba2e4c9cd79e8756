"""The benchmark of norms of queries and keys, at a small size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_query_key_norms


def test_both_norms_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "norms.json"
    arguments = ["--device", "cpu", "--tokens", "3", "--rounds", "1", "--json", str(report)]
    assert bench_query_key_norms.main(arguments) == 0
    assert "OLMo-2-7B fused" in capsys.readouterr().out
    records = json.loads(report.read_text())
    assert [record["name"] for record in records] == ["fused", "separate"] * 2
    assert all(record["output_error"] < 1e-6 and record["gradient_error"] < 1e-6 for record in records)


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_query_key_norms.main(["--tokens", "0"]) == 2
    assert "--tokens: 0 is too few" in capsys.readouterr().err
