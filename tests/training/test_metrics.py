"""Figures of a step: what metrics.jsonl holds, and that a torn line or a repeated step harms nobody."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megafp8.config import ModelConfig
from megafp8.fp8.report import Record
from megafp8.models.flops import flops_per_token, matmul_parameters
from megafp8.training.metrics import JsonlWriter, StepMetrics, TensorBoardWriter, WandbWriter, read_metrics
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


def test_fp8_health_becomes_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        Record(1, "layers.0.mlp.down", "input", amax=3.0, scale=1.0, underflow=0.25, saturated=0.0, snr_db=31.0),
        Record(1, "layers.1.mlp.down", "input", amax=2.0, scale=1.0, underflow=0.125, saturated=0.5, snr_db=20.0),
        Record(1, "layers.0.mlp.down", "grad_output", None, scale=1.0, underflow=0.0, saturated=0.0, snr_db=None),
    ]
    expected = {
        "fp8/input/min_snr_db": 20.0,
        "fp8/input/max_underflow": 0.25,
        "fp8/input/max_saturated": 0.5,
        "fp8/grad_output/max_underflow": 0.0,
        "fp8/grad_output/max_saturated": 0.0,
        "fp8/layers.0.mlp.down/input/snr_db": 31.0,
        "fp8/layers.0.mlp.down/input/amax": 3.0,
        "fp8/layers.1.mlp.down/input/snr_db": 20.0,
        "fp8/layers.1.mlp.down/input/amax": 2.0,
    }
    writer = TensorBoardWriter(tmp_path)
    writer.write(STEP, records)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {tag: at for tag, at in found.items() if tag.startswith("fp8/")} == {
        tag: [(1, value)] for tag, value in expected.items()
    }
    assert found["loss"] == [(1, 5.0)]

    logged = []
    run = SimpleNamespace(log=lambda figures, step: logged.append((step, figures)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    WandbWriter("project", "name", tmp_path, {}).write(STEP, records)
    ((step, figures),) = logged  # one call a step: a second would be of another
    assert step == 1
    assert {tag: value for tag, value in figures.items() if tag.startswith("fp8/")} == expected
    assert figures["loss"] == 5.0


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
