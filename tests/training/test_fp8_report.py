"""A run that reports on its FP8 health: every tensor of every stage, once a sampled step, and the same training."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megafp8.fp8.health import EXACT_DB, FILE_NAME, OPERANDS, Fp8Record, read_report
from megafp8.training.metrics import read_metrics
from tests.marks import slow_but
from tests.quickstart_data import ROOT, QuickstartData
from tests.training.runs import ONE_RANK, train_job
from tests.world import World

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "training.seq_length=32",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "training.steps=4",
    "optimizer.warmup_steps=1",
    "training.eval_interval=3",
    "training.eval_steps=1",
    "checkpoint.interval=3",
    "fp8.amax_history_len=4",
]
LAYOUTS = {
    "one rank": (1, ONE_RANK),
    "tp2-sp-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}
KINDS = ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down")
LAYERS = [f"layers.{i}.{kind}" for i in range(2) for kind in KINDS]
KEYS = [(step, layer, operand) for step in (2, 4) for layer in LAYERS for operand in OPERANDS]


class Run:
    """A run folder, and what to start in it."""

    def __init__(self, world: World, folder: Path, ranks: int, overrides: list[str]) -> None:
        self.world, self.ranks = world, ranks
        self.folder = folder / "quickstart"
        self.overrides = [*SMALL, *overrides, f"run_dir={folder}"]

    def start(self, *more: str) -> None:
        self.world.run(train_job, [*self.overrides, *more], ranks=self.ranks)

    def curve(self) -> list[dict[str, Any]]:
        return [
            {key: step[key] for key in ("step", "loss", "grad_norm", "validation_loss")}
            for step in read_metrics(self.folder / "metrics.jsonl")
        ]

    def report(self) -> list[Fp8Record]:
        return read_report(self.folder / FILE_NAME)


CASES = list(itertools.product(("delayed", "current", "blockwise"), LAYOUTS))


@pytest.mark.parametrize(("recipe", "layout"), slow_but(CASES, ("delayed", "one rank")))
def test_all_tensors_once_and_the_same_training(
    tmp_path: Path, world4: World, quickstart_data: QuickstartData, recipe: str, layout: str
) -> None:
    ranks, options = LAYOUTS[layout]
    options = [*options, *quickstart_data.overrides, f"fp8.recipe={recipe}"]
    plain = Run(world4, tmp_path / "plain", ranks, options)
    plain.start("fp8.report_interval=0")
    assert not (plain.folder / FILE_NAME).exists()

    reporting = Run(world4, tmp_path / "reporting", ranks, options)
    reporting.start("fp8.report_interval=2")
    assert reporting.curve() == plain.curve()
    report = reporting.report()
    assert sorted((r.step, r.layer, r.operand) for r in report) == sorted(KEYS)
    assert [r.step for r in report] == [step for step, _, _ in KEYS]
    for r in report:
        assert r.amax, r
        assert r.snr_db is not None, r
        assert r.snr_db < EXACT_DB, r
        assert r.snr_db > 20 or r.saturated, r
        assert r.saturated == 0 or recipe == "delayed", r  # which clamps what grew since the step before

    shutil.rmtree(reporting.folder / "checkpoints" / "step_00000004")  # as if killed before it was saved
    reporting.start("fp8.report_interval=2")
    lines = (reporting.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert reporting.report() == report


@pytest.mark.slow
def test_switched_on_later_and_read(tmp_path: Path, world4: World, quickstart_data: QuickstartData) -> None:
    """A run in high precision reports nothing; resumed in FP8 it does, for the layers that are."""
    _, options = LAYOUTS["one rank"]
    job = Run(world4, tmp_path, 1, [*options, *quickstart_data.overrides])
    job.start("fp8.recipe=none", "fp8.report_interval=1")
    assert not (job.folder / FILE_NAME).exists()
    shutil.rmtree(job.folder / "checkpoints" / "step_00000004")
    job.start("fp8.recipe=current", "fp8.report_interval=4", 'fp8.exclude=["layers.1.*"]')
    assert {(r.step, r.layer) for r in job.report()} == {(4, layer) for layer in LAYERS[:4]}
    script = [sys.executable, str(ROOT / "tools" / "fp8_report.py"), str(job.folder)]
    shown = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "step 4: 12 tensors" in shown
