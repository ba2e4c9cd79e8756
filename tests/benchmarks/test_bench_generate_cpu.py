"""bench_generate_cpu: a tiny Llama through our engine and transformers', each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_generate_cpu as bench

TINY = bench.Shape(64, 128, 1, 4, 2)


@pytest.mark.slow
def test_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    given = ["--shapes", "tiny", "--engines", "ours-bf16,transformers-bf16", "--batches", "1,2", "--prompt", "4"]
    given += ["--tokens", "3", "--rounds", "2", "--threads", "1", "--folder", str(tmp_path)]
    report = tmp_path / "report.json"
    assert bench.main([*given, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["engine"], row["batch"]) for row in rows] == [
        (engine, batch) for engine in ("ours-bf16", "transformers-bf16") for batch in (1, 2)
    ]
    assert all(row["first_token_ms"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert "tiny, ours-bf16, batch 2" in capsys.readouterr().out


def test_best_of_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each time by itself; an engine that cannot run says why, and is run once."""
    found = iter([[bench._result(1, 0.3, 0.01)], "needs a Xeon", [bench._result(1, 0.2, 0.02)]])
    monkeypatch.setattr(bench, "prepare", lambda *_: tmp_path)
    monkeypatch.setattr(bench, "run_engine", lambda *_: next(found))
    given = ["--shapes", "0.2b", "--engines", "ours-bf16,xft-bf16", "--xft-python", "python", "--rounds", "2"]
    rows = bench.measure("0.2b", bench.parse_arguments(given))
    assert rows == [
        {"shape": "0.2b", "engine": "ours-bf16", "batch": 1, "first_token_ms": 200.0, "tokens_per_s": 100.0},
        {"shape": "0.2b", "engine": "xft-bf16", "why_not": "needs a Xeon"},
    ]


@pytest.mark.parametrize(
    "option", [["--engines", "vllm"], ["--engines", "xft-bf16"], ["--shapes", "70b"], ["--tokens", "1"]]
)
def test_bad_options(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_arguments(option)
