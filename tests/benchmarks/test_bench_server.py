"""bench_server: figures of a short soak, and answers that are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_server
from benchmarks.bench_server import Case, Tally, figures, percentiles


def test_percentiles() -> None:
    assert percentiles([i / 1000 for i in range(1, 1000)]) == "500.0 / 900.0 / 990.0"
    assert percentiles([1.0]) == "-"


def test_figures() -> None:
    sample = {f"megafp8_{key}": 0.0 for key in ("running", "waiting", "generated_tokens_total", "prompt_tokens_total")}
    sample |= {"megafp8_pages_used": 1.0, "megafp8_pages_free": 3.0, "process_resident_memory_bytes": 2.0**20}
    tally = Tally()
    tally.outcomes.update(["answered", "answered", "refused (429)"])
    found = figures(tally, [sample | {"megafp8_pages_used": 2.0}, sample | {"megafp8_generated_tokens_total": 8}], 4.0)
    assert (found["requests"], found["answered"], found["refused (429)"], found["wrong answers"]) == (3, 2, 1, 0)
    assert (found["tokens generated/s"], found["most pages used"], found["pages leaked"]) == (2.0, 2, 1)
    assert found["memory, MiB, start / warm / end"] == "1 / 1 / 1"


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seconds", "4", "--clients", "56", "--cases", "4", "--device", "cpu"]
    assert bench_server.main([*arguments, "--json", str(tmp_path / "figures.json")]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert (found["wrong answers"], found["pages leaked"], found["exit code after SIGTERM"]) == (0, 0, 0)
    assert min(found["answered"], found["refused (429)"], found["left by the client"], found["malformed (400)"]) > 0
    assert "between tokens, ms" in capsys.readouterr().out
    wrong = bench_server.make_cases
    monkeypatch.setattr(bench_server, "make_cases", lambda *x: [Case(y.body, "?", y.tokens) for y in wrong(*x)])
    assert bench_server.main([*arguments, "--server", ""]) == 1
