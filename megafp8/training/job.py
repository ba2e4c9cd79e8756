"""A whole run on one rank: join the job, resume, step, evaluate, log, save, and leave cleanly."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import yaml

from megafp8.checkpoint import BackgroundSaver, Destination, FolderLock, Saved
from megafp8.config import Config, ConfigError, Problem
from megafp8.data.blend import Blend
from megafp8.data.sampler import batches as batch_stream
from megafp8.data.samples import Batch, default_cache
from megafp8.fp8 import describe_path
from megafp8.fp8.health import FILE_NAME
from megafp8.models.flops import PEAK_FLOPS, flops_per_token
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    host_group,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.pipeline_parallel.trace import write_timeline
from megafp8.training import auto_filter
from megafp8.training import fp8_param_gather as fp8_parameters
from megafp8.training import fsdp as fully_sharded
from megafp8.training.determinism import describe_determinism
from megafp8.training.divergence import diverged
from megafp8.training.errors import TrainingError
from megafp8.training.fp8_config import build_fp8
from megafp8.training.garbage import collected_after_steps
from megafp8.training.init_from import check_init, load_init
from megafp8.training.inputs import Inputs, check_ranks_agree, describe_data
from megafp8.training.launches import record_launch
from megafp8.training.metrics import (
    Fp8ReportWriter,
    StepMetrics,
    Writer,
    memory_gib,
    open_writers,
    read_metrics,
    utc_now,
)
from megafp8.training.plots import plot_loss, print_loss
from megafp8.training.replicas import check_replicas
from megafp8.training.run_log import RunLog
from megafp8.training.state import (
    begin_save,
    check_resume,
    checkpoint_folder,
    find_checkpoint,
    load_state,
    save_state,
    saved_choice,
    tokenizer_copy,
)
from megafp8.training.stopping import StopRequest
from megafp8.training.trainer import Trainer

_logger = logging.getLogger(__name__)


def choose_device(config: Config) -> str:
    """`cuda` or `cpu`; raises ConfigError where CUDA is asked for and there is none."""
    found, rule = torch.cuda.is_available(), "torch sees no CUDA device here"
    if config.device == "cuda" and not found:
        raise ConfigError("config", [Problem("device", "cuda", rule, "try device=cpu or device=auto")])
    if config.training.cuda_graphs and not found:
        raise ConfigError("config", [Problem("training.cuda_graphs", True, rule, "try training.cuda_graphs=false")])
    if config.parallel.overlap_tensor == "symmetric" and not found:
        works = "try parallel.overlap_tensor=chunked"
        raise ConfigError("config", [Problem("parallel.overlap_tensor", "symmetric", rule, works)])
    return "cuda" if config.device != "cpu" and found else "cpu"


def run_folder(config: Config) -> Path:
    """Where a run keeps everything."""
    return Path(config.run_dir) / config.name


def check_run(inputs: Inputs) -> None:
    """Refuse what cannot train, or would harm an earlier run, before any process group exists. Raises ValueError."""
    config, folder = inputs.config, run_folder(inputs.config)
    _check_wandb(config)
    _check_index_cache(config)
    auto_filter.check(config, build_fp8(config, None), torch.device(choose_device(config)))
    check_init(config, folder, inputs.tokenizer)
    if config.checkpoint.resume:
        found = check_resume(config, folder, inputs.fingerprint)
        if found is not None:
            inputs.resumed(found.metadata)
    elif (folder / "metrics.jsonl").exists():
        rule = f"{folder} already holds a run, and checkpoint.resume is false"
        raise ConfigError("config", [Problem("name", config.name, rule, "choose another name, or resume it")])
    check_writable(config, checkpoint_folder(folder))


_PROBE_BYTES = 1 << 16


def _check_writable(folder: Path, key: str, value: object, refusal: str, works: str) -> None:
    """Make `folder` and write to it; raises ConfigError of `key`, "`refusal` folder: reason", where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        rule = f"{refusal} {folder}: {error.strerror}"
        raise ConfigError("config", [Problem(key, value, rule, works)]) from error


def check_writable(config: Config, folder: Path) -> None:
    """Make `folder`, in which the run saves, and write to it; raises ConfigError of run_dir where that fails."""
    works = "set run_dir to a folder that this user may write to, on a disk with space for checkpoints"
    _check_writable(folder, "run_dir", config.run_dir, "the run cannot write to", works)


def _check_wandb(config: Config) -> None:
    project = config.logging.wandb_project
    if project is not None and importlib.util.find_spec("wandb") is None:
        works = "run pip install -e '.[wandb]', or leave it out"
        raise ConfigError("config", [Problem("logging.wandb_project", project, "wandb is not installed", works)])


def _check_index_cache(config: Config) -> None:
    """The folder of sample indices must be one that this rank can write to."""
    given = config.data.index_cache
    folder = default_cache() if given is None else Path(given)
    works = "name a folder on local disk that can be written to"
    _check_writable(folder, "data.index_cache", given, "sample indices cannot be written to", works)


def train(inputs: Inputs) -> None:
    """Run the job to its last step, or to a clean stop. `check_run` comes first.

    Raises FolderInUse where another job is at work in the run folder, before anything in it is changed; TrainingError,
    on all ranks, where training cannot go on.
    """
    config = inputs.config
    show_steps = config.logging.progress and not sys.stderr.isatty()
    with RunLog(int(os.environ.get("RANK", "0")), show_steps=show_steps) as log:
        try:
            _train(inputs, log)
        except TrainingError:
            destroy_model_parallel()  # all ranks are here
            raise
    destroy_model_parallel()


def _train(inputs: Inputs, log: RunLog) -> None:
    config = inputs.config
    device = initialize_distributed(choose_device(config), config.timeout_seconds)
    parallel = initialize_model_parallel(
        config.parallel.tensor,
        config.parallel.pipeline,
        config.parallel.virtual_pipeline,
        context_parallel_size=config.parallel.context,
        device=device,
        timeout_seconds=config.timeout_seconds,
    )
    with FolderLock(checkpoint_folder(run_folder(config))) as lock:
        Job(inputs, parallel, lock, log).run()


def _is_at(interval: int, step: int) -> bool:
    """Whether `step` is a multiple of `interval`; none is of 0."""
    return interval > 0 and step % interval == 0


class Job:
    """The loop around the trainer."""

    def __init__(self, inputs: Inputs, parallel: ParallelState, lock: FolderLock, log: RunLog) -> None:
        self.inputs, self.config, self.parallel = inputs, inputs.config, parallel
        self.folder, self.lock = run_folder(self.config), lock
        self.is_main = parallel.rank == 0
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            log.open(self.folder)
        self.stop = StopRequest()
        self.stop.install()
        resume = self.config.checkpoint.resume
        found = find_checkpoint(self.config, self.folder, parallel, inputs.fingerprint) if resume else None
        self.trainer = Trainer(self.config, parallel, saved_choice(self.config, found))
        self.step = 0 if found is None else load_state(self.trainer, found, say=_logger.info)
        _logger.info(f"run folder: {self.folder}")
        if not self.step and self.config.checkpoint.init_from is not None:
            load_init(self.trainer, self.config.checkpoint.init_from)
            _logger.info(f"weights from {self.config.checkpoint.init_from}")
        if found is not None:
            _logger.info(f"resumed from step {self.step}")
            self.inputs, changes = inputs.resumed(found.metadata)
            if changes:
                _logger.info(f"data changed since step {self.step}: {'; '.join(changes)}")
        check_ranks_agree(self.inputs, self.step * self.config.training.global_batch_size, parallel.world.group)
        _logger.info("data:\n" + describe_data(self.config, self.inputs.data_sets, self.inputs.progress))
        _logger.info(f"optimizer: {self.trainer.optimizer.reason}")
        _logger.info(describe_path(self.trainer.fp8.recipe, parallel.device, self.config.fp8.gemm_backend))
        weights, sharded = self.trainer.weights, self.trainer.sharded
        if weights is not None and weights.fp8_data:
            _logger.info(fp8_parameters.report(weights, parallel.data_context.size))
        if sharded is not None:
            _logger.info(fully_sharded.report(sharded, self.trainer.released, parallel.data_context.size))
        for reason in self.trainer.auto_filter.reasons:
            _logger.info(reason)
        if self.config.deterministic:
            _logger.info(describe_determinism(parallel.device.type))
        self.saved_step = self.step
        self.tokenizer = tokenizer_copy(self.config) if self.is_main else {}
        self.save_postponed = False
        self.skipped_in_a_row = 0
        self.save_seconds = 0.0
        record_launch(self.folder, parallel, self.step)
        self.saver = self._make_saver() if self.config.checkpoint.async_save else None

    def _make_saver(self) -> BackgroundSaver:
        keep = self.config.checkpoint
        group = host_group(self.config.timeout_seconds)
        folder = checkpoint_folder(self.folder)
        to = Destination(folder, group, keep.keep_last, keep.keep_every, self.lock, self.tokenizer)
        return BackgroundSaver(to, self.parallel.device, self._say_saved)

    def run(self) -> None:
        """Train from where the run stands to its end, which comes once all is saved."""
        with (
            self.saver or contextlib.nullcontext(),
            collected_after_steps(self.config.training.gc_interval) as after_step,
        ):
            self._run(after_step)

    def _run(self, after_step: Callable[[int], None]) -> None:
        last = self.config.training.last_step
        if self.step >= last:
            limit = "training.steps" if last == self.config.training.steps else "training.stop_after"
            _logger.info(f"nothing to do: the run has done {self.step} steps, and {limit} is {last}")
            return
        self._check_replicas()
        with contextlib.ExitStack() as stack:
            writers = self._open_writers()
            for writer in writers:
                stack.callback(writer.close)
            stopped = self._train(writers, after_step)
        self._report(stopped)

    def _train(self, writers: Sequence[Writer], after_step: Callable[[int], None]) -> bool:
        """Step until the run ends; whether it was asked to stop before that."""
        last = self.config.training.last_step
        stream = self._batches(self.inputs.train, self.step * self.config.training.global_batch_size)
        stopped = False
        while self.step < last and not stopped:
            metrics = self._one_step(stream)
            after_step(self.step)
            self._write_timeline()
            for writer in writers:
                writer.write(metrics, self.trainer.fp8_records)
            self._stop_if_diverged(metrics)
            if self.saver is not None:
                self.saver.poll()
            stopped = self.stop.agreed(self.parallel.world.group)
            comm = stopped or self.step == last
            if self._save_is_due(comm):
                self._check_replicas()
                self._save(comm)
            elif _is_at(self.config.training.replica_check_interval, self.step) or self.skipped_in_a_row == 1:
                self._check_replicas()
        return stopped

    def _open_writers(self) -> Sequence[Writer]:
        if not self.is_main:
            return []
        settings = self.config.model_dump(mode="json")
        name = "config.yaml" if not self.step else f"config-from-step-{self.step:08d}.yaml"
        (self.folder / name).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        config = self.config
        last, device = config.training.last_step, self.parallel.device
        writers = open_writers(config.logging, self.folder, config.name, self.step, last, settings, device)
        if self.trainer.fp8.recorder is None:
            return writers
        return [*writers, Fp8ReportWriter(self.folder / FILE_NAME, self.step)]

    def _write_timeline(self) -> None:
        """Once a step has been traced."""
        timeline, self.trainer.timeline = self.trainer.timeline, None
        if timeline is not None and self.is_main:
            path = self.folder / "pipeline_trace.json"
            write_timeline(timeline, self.trainer.plan.placement, path)
            draw = f"python tools/plot_schedule.py --measured {path} --png schedule.png"
            _logger.info(f"pipeline trace of step {self.step}: {path}; to draw it: {draw}")

    def _batches(self, dataset: Blend, consumed_samples: int) -> Iterator[list[Batch]]:
        t, d = self.config.training, self.config.data
        return batch_stream(
            dataset,
            consumed_samples=consumed_samples,
            global_batch_size=t.global_batch_size,
            micro_batch_size=t.micro_batch_size,
            data_parallel_rank=self.parallel.data.rank,
            data_parallel_size=self.parallel.data.size,
            num_workers=d.num_workers,
            eod_id=self.inputs.eod_id,
            reset_at_documents=d.reset_at_documents,
            mask_eod_loss=d.mask_eod_loss,
            pin_memory=self.parallel.device.type == "cuda",
        )

    def _one_step(self, stream: Iterator[list[Batch]]) -> StepMetrics:
        saving = self.save_seconds
        start = time.perf_counter()
        batches = next(stream)
        data_seconds = time.perf_counter() - start
        loss, result = self.trainer.train_step(self.step, batches, before_update=self._before_update)
        seconds = time.perf_counter() - start - (self.save_seconds - saving)
        learning_rate = self.trainer.learning_rate(self.step)
        self.step += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        t = self.config.training
        tokens = t.global_batch_size * t.seq_length
        per_gpu = tokens / seconds / self.parallel.world_size
        flops = per_gpu * flops_per_token(self.config.model, t.seq_length)
        peak = PEAK_FLOPS["fp8" if self.config.fp8.recipe != "none" else t.precision] if self._peak_is_known() else None
        start = time.perf_counter()
        evaluate = _is_at(t.eval_interval, self.step) or (t.eval_interval > 0 and self.step == t.last_step)
        validation_loss = self._evaluate() if evaluate else None
        evaluation_seconds = time.perf_counter() - start if evaluate else 0.0
        save_seconds, self.save_seconds = self.save_seconds, 0.0
        return StepMetrics(
            step=self.step,
            loss=loss.mean,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tokens=self.step * tokens,
            tokens_per_second_per_gpu=per_gpu,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / peak if peak else None,
            memory_gib=memory_gib(self.parallel.device),
            step_seconds=seconds,
            skipped=result.skipped,
            time=utc_now(),
            consumed_samples=self.step * t.global_batch_size,
            data_seconds=data_seconds,
            evaluation_seconds=evaluation_seconds,
            save_seconds=save_seconds,
            skipped_in_a_row=self.skipped_in_a_row,
            validation_loss=validation_loss,
        )

    def _stop_if_diverged(self, metrics: StepMetrics) -> None:
        limit = self.config.training.max_skipped_steps
        if limit and metrics.skipped_in_a_row >= limit:
            self._check_replicas()  # one broken replica spoils the gradients of all
            raise diverged(self.trainer, metrics, self.saved_step)

    def _check_replicas(self) -> None:
        if self.config.training.replica_check_interval:
            check_replicas(self.trainer, self.step)

    def _peak_is_known(self) -> bool:
        device = self.parallel.device
        return (
            device.type == "cuda"
            and any(chip in torch.cuda.get_device_name(device) for chip in ("H100", "H200"))
            and self.config.training.precision == "bf16"
        )

    def _evaluate(self) -> float:
        """Mean loss over the same first validation samples each time."""
        assert self.inputs.validation is not None
        stream = self._batches(self.inputs.validation, 0)
        losses = [self.trainer.evaluate(next(stream)) for _ in range(self.config.training.eval_steps)]
        return math.fsum(x.mean * x.tokens for x in losses) / max(1, sum(x.tokens for x in losses))

    def _before_update(self) -> None:
        if self.saver is not None:
            start = time.perf_counter()
            self.saver.wait_copied()
            self.save_seconds += time.perf_counter() - start

    def _save_is_due(self, comm: bool) -> bool:
        """Whether to save this step, the last one if the run `comm`.

        No step is saved that was skipped, but the last one: the checkpoint would be another copy of the weights of an
        earlier step, and in a run that has diverged would push the last good one out of keep_last. It waits for the
        next step that is not skipped.
        """
        at_interval = _is_at(self.config.checkpoint.interval, self.step)
        if comm or ((at_interval or self.save_postponed) and not self.skipped_in_a_row):
            self.save_postponed = False
            return True
        if at_interval and not self.save_postponed:
            self.save_postponed = True
            if self.is_main:
                _logger.warning(f"step {self.step} is not saved, as it was skipped; the next one that is not will be")
        return False

    def _save(self, comm: bool) -> None:
        """Save this step; at once where the run `comm`, as there is nothing left to do meanwhile."""
        if self.saved_step == self.step:
            return
        start = time.perf_counter()
        self.saved_step = self.step
        data = self.inputs.record(self.step * self.config.training.global_batch_size)
        if self.saver is not None and not comm:
            begin_save(self.trainer, self.saver, self.step, self.inputs.fingerprint, data)
        else:
            if self.saver is not None:
                self.saver.finish()
            path = save_state(
                self.trainer,
                self.folder,
                self.step,
                self.inputs.fingerprint,
                self.lock,
                data=data,
                files=self.tokenizer,
                keep_all=self.skipped_in_a_row > 0,
            )
            _logger.info(f"saved {path} in {time.perf_counter() - start:.1f} s")
        self.save_seconds += time.perf_counter() - start

    def _say_saved(self, saved: Saved) -> None:
        _logger.info(f"saved {saved.path}: stalled {saved.stalled_seconds:.1f} s, {saved.total_seconds:.1f} s in all")

    def _report(self, stopped: bool) -> None:
        if not self.is_main:
            return
        records = read_metrics(self.folder / "metrics.jsonl")
        plot_loss(records, self.folder / "loss.png", self.config.name)
        if not stopped and self.step < self.config.training.steps:
            _logger.info(
                f"stopped after step {self.step} of {self.config.training.steps}, as training.stop_after says; to "
                "continue, start the same command with a later one, or without it"
            )
        if stopped:
            _logger.info(f"stopped on request after step {self.step}; start the same command again to continue")
            return
        if sys.stdout.isatty() or self.config.logging.progress:
            print_loss(records)
        print(f"run folder: {self.folder}\nloss curve: {self.folder / 'loss.png'}")
        report = self.folder / FILE_NAME
        if self.trainer.fp8.recorder is not None and report.stat().st_size:
            print(f"FP8 report: {report}; to read it: python tools/fp8_report.py {shlex.quote(str(self.folder))}")
