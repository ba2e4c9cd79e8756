"""Observers of the training loop, and the order in which the loop calls them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import yaml

from megafp8.fp8.health import FILE_NAME as FP8_REPORT
from megafp8.host.text_file import DiskErrorsLogged
from megafp8.training import expert_load
from megafp8.training.consistency import ConsistencyCheck
from megafp8.training.evaluation import Evaluation, TaskEvaluation
from megafp8.training.expert_load import ExpertLoadMetrics
from megafp8.training.inputs import RunInputs
from megafp8.training.metrics import Fp8ReportWriter, ReopenedToRepeat, UnlessDiskFull, open_writers
from megafp8.training.observer import Observer
from megafp8.training.pipeline_trace import PipelineTrace
from megafp8.training.profiling import Profiler
from megafp8.training.resilience.faults import Faults
from megafp8.training.resilience.hangs import StepMarks
from megafp8.training.resilience.recompute import RecomputeCheck
from megafp8.training.resilience.spikes import LossSpikes
from megafp8.training.resilience.stragglers import Stragglers
from megafp8.training.section_times import SectionTimer
from megafp8.training.trainer import RankTrainer


def open_observers(
    trainer: RankTrainer,
    inputs: RunInputs,
    folder: Path,
    step: int,
    last_step: int,
    *,
    faults: Faults,
    spikes: LossSpikes,
    tasks: TaskEvaluation | None,
) -> list[Observer]:
    """Return the observers of a loop from `step` to `last_step`, in the order in which the loop calls them.

    Args:
        trainer: Trainer of this rank.
        inputs: Tokenizer and data of the stage.
        folder: Folder for the files that observers write.
        step: Number of steps done before the loop.
        last_step: Last step of the loop.
        faults: Observer that injects the faults of `resilience.inject`.
        spikes: Observer that detects loss spikes.
        tasks: Evaluation that `training.evaluate` configures, or None.
    """
    config, parallel = trainer.config, trainer.parallel
    r, is_main, several = config.resilience, parallel.rank == 0, parallel.world_size > 1
    observers: list[Observer] = [
        Profiler(config.profile, folder, parallel),  # first, so that its trace begins at the start of a section
        StepMarks(),
    ]
    if r.recompute_interval:
        observers.append(RecomputeCheck(trainer, r.recompute_interval, faults))
    observers += [faults, spikes]
    if r.straggler_interval and several:
        observers.append(Stragglers(r.straggler_interval, parallel))
    if config.spec.has_experts:
        interval = config.logging.expert_load_interval
        path = folder / expert_load.FILE_NAME if is_main and interval else None
        observers.append(ExpertLoadMetrics(lambda: trainer.expert_load, path, interval))
    observers += [Evaluation(trainer, inputs, last_step, tasks), PipelineTrace(trainer, folder)]
    if is_main:
        observers += [SectionTimer(parallel.device), *_writers(trainer, folder, step)]
    if config.training.consistency_check_interval and several:
        observers.append(ConsistencyCheck(trainer, step, config.training.consistency_check_interval))
    return observers


def _writers(trainer: RankTrainer, folder: Path, step: int) -> list[Observer]:
    """Write the config to the run folder, and return the observers that write metrics. Call this on rank 0."""
    config, settings = trainer.config, trainer.config.model_dump(mode="json")
    name = "config.yaml" if not step else f"config-from-step-{step:08d}.yaml"
    with DiskErrorsLogged(name):
        (folder / name).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    last, device = config.training.last_step, trainer.parallel.device
    writers = open_writers(config.logging, folder, config.name, step, last, settings, device)
    if trainer.fp8.recorder is not None:
        in_report = partial(Fp8ReportWriter, folder / FP8_REPORT)
        writers.append(UnlessDiskFull(FP8_REPORT, ReopenedToRepeat(in_report, step)))
    if config.logging.metrics_port is not None:
        from megafp8.training.open_metrics import OpenMetricsWriter  # needs prometheus_client

        writers.append(OpenMetricsWriter(config.name, folder, config.logging.metrics_port))
    return writers
