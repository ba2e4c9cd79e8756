"""Loss spikes: the limit, positions of samples, and whole jobs that skip or rewind, against jobs without the fault."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.config import LossSpikeConfig, load_config
from megafp8.training.metrics import read_metrics
from megafp8.training.resilience.spikes import (
    SpikeLimit,
    merged,
    position_of,
    read_skipped,
    saved_losses,
    write_skipped,
)
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.runs import run_job
from tests.training.test_job import inputs_of, log_of, options
from tests.world import World


def test_the_limit_is_mean_and_deviations_of_the_window() -> None:
    generator = np.random.default_rng(0)
    losses = generator.normal(3.0, 0.1, 50).tolist()
    spikes = SpikeLimit(LossSpikeConfig(window=8, sigmas=5.0))
    for i, loss in enumerate(losses):
        window = np.array(losses[max(0, i - 8) : i])
        expected = None if i < 4 else window.mean() + 5.0 * window.std(ddof=1)
        limit = spikes.limit()
        assert (limit is None) == (expected is None)
        assert expected is None or math.isclose(limit or 0.0, expected)
        spikes.add(loss)
    again = SpikeLimit(LossSpikeConfig(window=8, sigmas=5.0), spikes.losses)
    assert again.limit() == spikes.limit()
    spikes.add(math.nan)
    assert spikes.limit() == again.limit()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ("training.seq_length=64", False),
        ("training.global_batch_size=8", False),
        ("data.train=[other]", False),
        ("training.stop_after=5", True),
        ("parallel.zero=1", True),
    ],
)
def test_losses_count_where_batches_are_alike(change: str, counts: bool) -> None:
    saved = {"config": load_config(CONFIG).model_dump(mode="json"), "losses": [2.0, 3.0]}
    assert saved_losses(saved, load_config(CONFIG, [change])) == ([2.0, 3.0] if counts else [])


def test_positions_leave_ranges_out(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    for _ in range(50):
        bounds = np.sort(generator.choice(60, size=6, replace=False)).tolist()
        skipped = merged([(bounds[0], bounds[1]), (bounds[4], bounds[5])], [(bounds[2], bounds[3])])
        left = [i for i in range(200) if not any(start <= i < end for start, end in skipped)]
        assert [position_of(i, skipped) for i in range(100)] == left[:100]
        for start in (10, 30):  # a position that is known, as a checkpoint's
            later = [i for i in left if i >= start]
            assert [position_of(start + i, skipped, start) for i in range(100)] == later[:100]
    assert merged([(8, 12)], [(0, 4), (4, 6)], [(10, 20)]) == [(0, 6), (8, 20)]
    write_skipped(tmp_path, [(4, 8)])
    assert read_skipped(tmp_path, {"skipped_samples": [[8, 12], [20, 24]]}) == [(4, 12), (20, 24)]


@pytest.mark.parametrize("content", ["[" * 100_000, "[[1]]", '[["a", "b"]]', "{}", "["], ids=lambda text: text[:9])
def test_a_damaged_file_of_ranges(tmp_path: Path, content: str) -> None:
    (tmp_path / "skipped_samples.json").write_text(content)
    with pytest.raises(ValueError, match=r"skipped_samples.json is damaged: .*; restore it"):
        read_skipped(tmp_path, None)


def curve(run: Path) -> list[tuple[Any, ...]]:
    """What is equal in equal runs."""
    keys = ("step", "loss", "consumed_samples", "skipped", "validation_loss")
    return [tuple(record[key] for key in keys) for record in read_metrics(run / "quickstart" / "metrics.jsonl")]


def _jobs(jobs: list[list[str]]) -> None:
    """Run jobs of one process, one after the other."""
    for overrides in jobs:
        run_job(inputs_of(overrides))
        os.environ.pop("WORLD_SIZE", None)
        os.environ.pop("RANK", None)  # the world's group is gone; a job of one process makes its own


def _fault(kind: str, step: int) -> str:
    return f"resilience.inject=[{{kind: {kind}, rank: 0, step: {step}}}]"


INTERRUPTED = pytest.mark.parametrize("interrupted", [False, pytest.param(True, marks=pytest.mark.slow)])


@INTERRUPTED
def test_a_spike_is_skipped_like_a_step_that_is_not_finite(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, interrupted: bool
) -> None:
    def job(name: str, *more: str) -> list[str]:
        steps = ["training.steps=14", "training.eval_interval=0", "fp8.recipe=none"]
        steps.append("resilience.loss_spike={action: skip, window: 4, sigmas: 1.5}")
        return options(quickstart_data, tmp_path / name, *steps, *more)

    parts = job("parts", _fault("loss_spike", 12))
    jobs = [job("spike", _fault("loss_spike", 12)), job("nan", _fault("nan_gradient", 12))]
    jobs += [[*parts, "training.stop_after=10"], parts] if interrupted else []
    world2.run(_jobs, jobs, ranks=1)
    spike, nan = (curve(tmp_path / name) for name in ("spike", "nan"))
    skipped = [record[0] for record in spike if record[3]]
    assert 12 in skipped
    assert [record for record in spike if record[0] != 12] == [record for record in nan if record[0] != 12]
    if interrupted:
        assert curve(tmp_path / "parts") == spike
        limits = [
            [record["loss_limit"] for record in read_metrics(tmp_path / name / "quickstart" / "metrics.jsonl")]
            for name in ("spike", "parts")
        ]
        assert limits[0] == limits[1]
    (line,) = [line for line in log_of(tmp_path / "spike" / "quickstart") if "step     12/14" in line]
    assert "SKIPPED" in line
    assert "loss above " in line


@INTERRUPTED
def test_a_rewind_leaves_out_the_samples_since_the_checkpoint(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, interrupted: bool
) -> None:
    """As a run without these samples from the beginning, and as one that is `interrupted` after the rewind."""

    def job(name: str, *more: str) -> list[str]:
        steps = ["training.steps=16", "training.eval_interval=0", "checkpoint.interval=10"]
        spikes = ["resilience.loss_spike={action: rewind, window: 4, sigmas: 4}"]
        return options(quickstart_data, tmp_path / name, *steps, *spikes, *more)

    without = tmp_path / "without" / "quickstart"
    without.mkdir(parents=True)
    write_skipped(without, [(40, 48)])
    parts = job("parts", _fault("loss_spike", 12))
    jobs = [job("spike", _fault("loss_spike", 12)), job("without")]
    jobs += [[*parts, "training.stop_after=14"], parts] if interrupted else []
    world2.run(_jobs, jobs, ranks=1)
    assert curve(tmp_path / "spike") == curve(tmp_path / "without")
    if interrupted:
        assert curve(tmp_path / "parts") == curve(tmp_path / "spike")
    positions = [record[2] for record in curve(tmp_path / "spike")]
    assert positions == [4 * i for i in range(1, 11)] + [48 + 4 * i for i in range(1, 7)]
    lines = log_of(tmp_path / "spike" / "quickstart")
    assert "WARNING: loss spike in step 12: back to step 10, without samples 40 to 47" in lines
    assert read_skipped(tmp_path / "spike" / "quickstart", None) == [(40, 48)]
