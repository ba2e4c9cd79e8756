"""The training loop: faulty ranks, skipped steps, divergence, stopping early, and the files of a run.

Whole jobs, in worlds of real ranks or as a process. Faults are injected between real steps.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megafp8.checkpoint import complete_checkpoints
from megafp8.config import ConfigError, load_config
from megafp8.optimizer.step import StepResult
from megafp8.training.errors import TrainingError
from megafp8.training.init_from import complete_model
from megafp8.training.inputs import RunInputs, open_inputs
from megafp8.training.loss import BatchLoss
from megafp8.training.metrics import read_metrics
from megafp8.training.run import train
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import check_run
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.runs import ONE_RANK, run_job
from tests.training.test_resume import SMALL
from tests.world import World


def options(data: QuickstartData, folder: Path, *more: str) -> list[str]:
    return [*SMALL, *data.overrides, *ONE_RANK, f"run_dir={folder}", "training.global_batch_size=4", *more]


def inputs_of(overrides: list[str]) -> RunInputs:
    inputs = open_inputs(load_config(CONFIG, overrides, complete_model), str(CONFIG))
    check_run(inputs)
    return inputs


class FaultyTrainer(RankTrainer):
    """Real steps with faults between them. Steps count from 1.

    `flips`, `nans`: {step: rank}: after this step a bit of this rank's embedding flips, or its output layer has a NaN.
    `skipped`: steps with a gradient that is not finite.
    """

    flips: ClassVar[dict[int, int]] = {}
    nans: ClassVar[dict[int, int]] = {}
    skipped: ClassVar[tuple[int, ...]] = ()

    def train_step(self, step: int, batches: Any, **_: Any) -> tuple[BatchLoss, StepResult]:
        def spoil() -> None:
            if step + 1 in self.skipped:
                self.strategy.gradients[0][0] = torch.inf

        done = super().train_step(step, batches, before_update=spoil)
        first, last = (param.detach().view(-1) for param in (self.strategy.params[0], self.strategy.params[-1]))
        if self.flips.get(step + 1) == self.parallel.rank:
            first[:1].view(torch.uint8)[0] ^= 1
        if self.nans.get(step + 1) == self.parallel.rank:
            last[0] = torch.nan
        return done


def _jobs(
    jobs: list[list[str]], faults: dict[str, Any], run: Callable[[RunInputs], None] = run_job
) -> list[str | None]:
    """Run jobs one after the other with `faults`; return the error message of each, or None."""
    from megafp8.training import job

    messages: list[str | None] = []
    job.RankTrainer = type("Faulty", (FaultyTrainer,), faults)  # type: ignore[misc]
    for overrides in jobs:
        try:
            run(inputs_of(overrides))
            messages.append(None)
        except TrainingError as error:
            messages.append(str(error))
        os.environ.pop("WORLD_SIZE", None)
        os.environ.pop("RANK", None)  # the world's group is gone; a job of one process makes its own
    job.RankTrainer = RankTrainer  # type: ignore[misc]
    return messages


def saved(run: Path) -> list[int]:
    return [step for step, _ in complete_checkpoints(run / "checkpoints")]


def log_of(run: Path) -> list[str]:
    """The log's lines without the clock."""
    lines = (run / "log.txt").read_text().splitlines()
    return [re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", "", line) for line in lines]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("flips", "embedding.word.weight"), pytest.param("nans", "output.weight", marks=pytest.mark.slow)],
)
def test_a_faulty_rank_ends_the_job_before_it_is_saved(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, kind: str, name: str
) -> None:
    """A flipped bit is found at the next save, in step 6; a NaN causes step 6 to be skipped."""
    interval = 2 if kind == "flips" else 4
    job = options(quickstart_data, tmp_path, f"checkpoint.interval={interval}", "training.max_skipped_steps=1")
    answers = world2.run(_jobs, [job], {kind: {5: 1}})
    ((message,), (other,)) = answers
    assert message == other
    assert message.startswith("after step 6 ranks hold different bits of tensors that must be equal on all ranks.")
    host = socket.gethostname()
    assert f"rank 0 on {host}, rank 1 on {host}: no majority agrees on model.{name}." in message
    run = tmp_path / "quickstart"
    assert saved(run) == [4]
    assert log_of(run)[-len(message.splitlines()) :] == ("ERROR: " + message).splitlines()
    assert len(read_metrics(run / "metrics.jsonl")) == 6


def test_skipped_steps_are_logged_and_replace_no_checkpoint(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    more = ["checkpoint.interval=3", "checkpoint.keep_last=1", "training.max_skipped_steps=3", "logging.interval=100"]
    job = options(quickstart_data, tmp_path, *more)
    assert world2.run(_jobs, [job], {"skipped": (6, 7, 10)}) == [[None], [None]]
    run = tmp_path / "quickstart"
    assert saved(run) == [9, 10]  # step 10 was skipped, so step 9 stays although one is to be kept
    lines = log_of(run)
    steps = [re.sub("(?<=/10)  .*  ", " ... ", line) for line in lines if re.match(r"(WARNING: )?step +\d+/", line)]
    assert [re.sub(r"\d\.\d{4}$", "x", line) for line in steps] == [
        "step      4/10 ... validation x",
        "WARNING: step      6/10 ... SKIPPED: gradients not finite",
        "WARNING: step      7/10 ... SKIPPED, 2 in a row: gradients not finite",
        "step      8/10 ... validation x",
        "WARNING: step     10/10 ... SKIPPED: gradients not finite",
    ]
    assert "WARNING: step 6 was skipped and is not saved; the next step that is not skipped will be" in lines
    assert [re.search(r"step_0*(\d+)", line).group(1) for line in lines if line.startswith("saved ")] == [
        "3", "8", "9", "10",
    ]  # type: ignore[union-attr]  # fmt: skip
    records = read_metrics(run / "metrics.jsonl")
    assert [r["skipped_in_a_row"] for r in records] == [0, 0, 0, 0, 0, 1, 2, 0, 0, 1]


def test_logs_that_cannot_be_written_do_not_end_the_run(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of them is named once, and checkpoints are saved."""
    run, names = tmp_path / "quickstart", ["log.txt", "metrics.jsonl", "launches.jsonl", "config.yaml"]
    run.mkdir()
    for name in names:
        (run / name).symlink_to(tmp_path / "missing" / name)
    job = options(quickstart_data, tmp_path, "checkpoint.interval=2", "training.steps=4", "logging.progress=false")
    assert world2.run(_jobs, [job], {}, train, ranks=1) == [[None]]
    assert saved(run)[-1] == 4
    warnings = [line for line in capfd.readouterr().err.splitlines() if "No such file or directory" in line]
    assert len(warnings) == len(names) + 1
    for name in [*names, "the loss curve"]:
        assert len([line for line in warnings if f"{name} cannot be written" in line]) == 1


def test_a_diverged_run_ends_with_an_error(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """With a learning rate of 1e30."""
    rate = ["optimizer.learning_rate=1e30", "optimizer.min_learning_rate=0", "optimizer.clip_grad_norm=0.5"]
    keep = ["checkpoint.interval=1", "training.max_skipped_steps=4", "logging.interval=100", "training.steps=40"]
    job = options(quickstart_data, tmp_path, "fp8.recipe=none", *rate, *keep)
    ((error,),) = world2.run(_jobs, [job], {}, ranks=1)
    run = tmp_path / "quickstart"
    records = read_metrics(run / "metrics.jsonl")
    last, loss = records[-1]["step"], records[-1]["loss"]
    assert error.startswith(
        f"training has diverged: all 4 steps from {last - 3} to {last} were skipped (training.max_skipped_steps = 4). "
        f"In the last one the loss was {loss} and the gradient norm nan.\n"
        "Not finite: weights: none; gradients: layers.1.mlp.down.weight, "
    )
    assert " and 8 more.\n" in error
    assert f"The newest checkpoint is of step {last - 4}; it was not replaced." in error
    assert "optimizer.clip_grad_norm (now 0.5)" in error
    lines = log_of(run)
    assert sum("SKIPPED" in line for line in lines) == 4
    assert "\n".join(lines).endswith(f"ERROR: {error}")
    assert saved(run) == [last - 4]


def test_stopped_early_and_continued_is_one_run(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    whole, parts = (options(quickstart_data, tmp_path / name) for name in ("whole", "parts"))
    longer = [*parts, "training.steps=12", "optimizer.decay_until=10"]
    jobs = [whole, [*parts, "training.stop_after=6"], parts, longer]
    assert world2.run(_jobs, jobs, {}, ranks=1) == [[None] * 4]
    runs = [tmp_path / name / "quickstart" for name in ("whole", "parts")]
    expected, found = (read_metrics(run / "metrics.jsonl") for run in runs)
    assert [r["step"] for r in found] == list(range(1, 13))
    for key in ("loss", "grad_norm", "learning_rate", "tokens", "consumed_samples"):
        assert [r[key] for r in found[:10]] == [r[key] for r in expected], key
    assert {r["learning_rate"] for r in found[10:]} == {2e-4}  # the config's min_learning_rate
    lines = log_of(runs[1])
    assert sum(line.startswith("stopped after step 6 of 10 because of training.stop_after; ") for line in lines) == 1
    assert lines.count("resumed from step 6") == lines.count("resumed from step 10") == 1
    for record in expected:
        assert 0 < record["data_seconds"] < record["step_seconds"]
        assert (record["evaluation_seconds"] > 0) == (record["validation_loss"] is not None)
        assert (record["save_seconds"] > 0) == (record["step"] == 6)  # after the save of step 5
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record["time"])
        assert record["consumed_samples"] == 4 * record["step"]
    launches = [json.loads(line) for line in (runs[1] / "launches.jsonl").read_text().splitlines()]
    assert [launch["step"] for launch in launches] == [0, 6, 10]
    assert launches[0]["hosts"] == {socket.gethostname(): 1}
    assert {"time", "command", "directory", "commit", "megafp8_version", "torch_version", "ranks"} <= launches[0].keys()


def test_an_unwritable_cache_and_a_missing_package_are_one_message(
    tmp_path: Path, quickstart_data: QuickstartData, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    job = options(quickstart_data, tmp_path, f"data.index_cache={tmp_path / 'file' / 'cache'}")
    with pytest.raises(ConfigError, match=r"data\.index_cache = .*: sample indices cannot be written to .*: Not a "):
        inputs_of(job)
    import importlib.util

    find = importlib.util.find_spec
    missing = ("wandb", "prometheus_client")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    for option, package in (("wandb_project=mine", "wandb"), ("metrics_port=9400", "prometheus_client")):
        key, _, value = option.partition("=")
        job = options(quickstart_data, tmp_path, f"logging.{option}")
        message = rf"logging\.{key} = '?{value}'?: {package} is not installed; run pip install "
        with pytest.raises(ConfigError, match=message):
            inputs_of(job)
    assert not (tmp_path / "quickstart").exists()
