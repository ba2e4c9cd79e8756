"""Published speeds: each has a config that runs, and those of dense models are predicted."""

from __future__ import annotations

import sys

import pytest

from benchmarks.planner_published import layout, main, predicted, published


def test_every_published_run_has_a_config_that_runs() -> None:
    layouts = {(run.model, run.source): layout(run.resolved()) for run in published()}
    assert layouts["Llama-3.1-405B", "Megatron Bridge 26.06"] == "TP8 PP8 VP8 CP2, MBS 1, GBS 1,536, s 8,192"
    assert layouts["gpt-oss-20b", "NeMo AutoModel of October 2025"] == "EP8 FSDP, MBS 2, GBS 256, s 4,096"


def test_dense_models_are_predicted() -> None:
    """Of another implementation, whose speed no constant of the planner was fitted to."""
    runs = [run for run in published() if run.model in ("Llama-3-8B", "Llama-3-70B") and "Bridge" in run.source]
    assert len(runs) == 3
    assert all(abs(run.error(predicted(run))) < 0.1 for run in runs)


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["planner_published", "--runs", "Llama-3-8B.*Bridge", "--explain"])
    assert main() == 0
    head, _, row, _, terms = capsys.readouterr().out.splitlines()
    assert len(head.split("|")) == len(row.split("|"))
    assert "| Llama-3-8B | 8 | FSDP, MBS 1, GBS 128, s 8,192 | FP8-CS | Megatron Bridge 25.11 | 14,451 |" in row
    assert "GEMMs" in terms
