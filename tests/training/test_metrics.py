"""Figures of a step: what metrics.jsonl holds, and that a torn line or a repeated step harms nobody."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megafp8.config import ModelConfig
from megafp8.models.flops import flops_per_token, matmul_parameters
from megafp8.training.metrics import JsonlWriter, StepMetrics, TensorBoardWriter, read_metrics
from megafp8.training.plots import plot_loss, print_loss

STEP = StepMetrics(1, 5.0, 1.0, 1e-3, 128, 10.0, 0.5, None, 1.0, 0.1, False)


def write(path: Path, *steps: StepMetrics) -> None:
    writer = JsonlWriter(path)
    for step in steps:
        writer.write(step)
    writer.close()


def test_one_object_a_step_with_the_names_promised(tmp_path: Path) -> None:
    write(tmp_path / "m", STEP)
    record = json.loads((tmp_path / "m").read_text())
    promised = (
        "step loss grad_norm learning_rate tokens tokens_per_second_per_gpu tflops_per_gpu mfu memory_gib step_seconds"
    )
    assert set(promised.split()) <= record.keys()


def test_a_torn_line_and_a_repeated_step(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, STEP, dataclasses.replace(STEP, step=2, loss=4.0))
    path.write_text(path.read_text()[:-20])
    write(path, dataclasses.replace(STEP, step=2, loss=3.0), dataclasses.replace(STEP, step=3, loss=math.nan))
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 5.0), (2, 3.0), (3, None)]


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.write(STEP)
    writer.close()
    assert [p for p in tmp_path.iterdir() if "tfevents" in p.name and p.stat().st_size > 100]


def test_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        dataclasses.asdict(dataclasses.replace(STEP, step=i, loss=1 / i, validation_loss=0.5 if i == 4 else None))
        for i in range(1, 9)
    ]
    plot_loss(records, tmp_path / "loss.png", "test")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    print_loss(records)
    shown = capsys.readouterr().out
    assert "loss (nats per token)" in shown
    assert "\x1b" not in shown


def test_flops_of_llama3_8b_by_hand() -> None:
    llama = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
        vocab_size=128256,
    )  # fmt: skip
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert matmul_parameters(llama) == 32 * block + 4096 * 128256
    assert flops_per_token(llama, 8192) == 6 * (32 * block + 4096 * 128256) + 6 * 32 * 8192 * 4096
