"""A whole run on one rank: join the job, resume, step, evaluate, log, save, and leave cleanly."""

from __future__ import annotations

import contextlib
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
from megafp8.data.samples import Batch
from megafp8.fp8 import describe_path
from megafp8.fp8.report import FILE_NAME
from megafp8.models.flops import PEAK_FLOPS, flops_per_token
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    host_group,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.pipeline_parallel.trace import write_timeline
from megafp8.training import auto_filter, fp8_parameters, fully_sharded
from megafp8.training.cuda_graphs import silent
from megafp8.training.determinism import describe_determinism
from megafp8.training.fp8_config import build_fp8
from megafp8.training.garbage import collected_after_steps
from megafp8.training.init_from import check_init, load_init
from megafp8.training.inputs import Inputs, check_ranks_agree, describe_data
from megafp8.training.metrics import Fp8ReportWriter, StepMetrics, Writer, memory_gib, open_writers, read_metrics
from megafp8.training.plots import plot_loss, print_loss
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


def check_writable(config: Config, folder: Path) -> None:
    """Make `folder`, in which the run saves, and write to it; raises ConfigError of run_dir where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        rule = f"the run cannot write to {folder}: {error.strerror}"
        works = "set run_dir to a folder that this user may write to, on a disk with space for checkpoints"
        raise ConfigError("config", [Problem("run_dir", config.run_dir, rule, works)]) from error


def train(inputs: Inputs) -> None:
    """Run the job to its last step, or to a clean stop. `check_run` comes first.

    Raises FolderInUse where another job is at work in the run folder, before anything in it is changed.
    """
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
        Job(inputs, parallel, lock).run()
    destroy_model_parallel()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Job:
    """The loop around the trainer."""

    def __init__(self, inputs: Inputs, parallel: ParallelState, lock: FolderLock) -> None:
        self.inputs, self.config, self.parallel = inputs, inputs.config, parallel
        self.folder, self.lock = run_folder(self.config), lock
        self.is_main = parallel.rank == 0
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.stop = StopRequest()
        self.stop.install()
        resume = self.config.checkpoint.resume
        found = find_checkpoint(self.config, self.folder, parallel, inputs.fingerprint) if resume else None
        say = _print if self.is_main else silent
        self.trainer = Trainer(self.config, parallel, saved_choice(self.config, found), say=say)
        self.step = 0 if found is None else load_state(self.trainer, found, say=say)
        self.say(f"run folder: {self.folder}")
        if not self.step and self.config.checkpoint.init_from is not None:
            load_init(self.trainer, self.config.checkpoint.init_from)
            self.say(f"weights from {self.config.checkpoint.init_from}")
        if found is not None:
            self.say(f"resumed from step {self.step}")
            self.inputs, changes = inputs.resumed(found.metadata)
            if changes:
                self.say(f"data changed since step {self.step}: {'; '.join(changes)}")
        check_ranks_agree(self.inputs, self.step * self.config.training.global_batch_size, parallel.world.group)
        self.say(describe_data(self.config, self.inputs.data_sets, self.inputs.progress))
        self.say(f"optimizer: {self.trainer.optimizer.reason}")
        self.say(describe_path(self.trainer.fp8.recipe, parallel.device, self.config.fp8.gemm_backend))
        weights, sharded = self.trainer.weights, self.trainer.sharded
        if weights is not None and weights.codes:
            self.say(fp8_parameters.report(weights, parallel.data_context.size))
        if sharded is not None:
            self.say(fully_sharded.report(sharded, self.trainer.hollow, parallel.data_context.size))
        for reason in self.trainer.auto_filter.reasons:
            self.say(reason)
        if self.config.deterministic:
            self.say(describe_determinism(parallel.device.type))
        self.saved_step = self.step
        self.tokenizer = tokenizer_copy(self.config) if self.is_main else {}
        self.saver = self._make_saver() if self.config.checkpoint.async_save else None

    def say(self, text: str) -> None:
        if self.is_main:
            _print(text)

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
        steps = self.config.training.steps
        if self.step >= steps:
            self.say(f"nothing to do: the run has done all {steps} steps")
            return
        writers = self._open_writers()
        stream = self._batches(self.inputs.train, self.step * self.config.training.global_batch_size)
        stopped = False
        while self.step < steps and not stopped:
            metrics = self._one_step(stream)
            after_step(self.step)
            self._write_timeline()
            for writer in writers:
                writer.write(metrics, self.trainer.fp8_records)
            if self.saver is not None:
                self.saver.poll()
            stopped = self.stop.agreed(self.parallel.world.group)
            interval = self.config.checkpoint.interval
            ends = stopped or self.step == steps
            if ends or (interval and self.step % interval == 0):
                self._save(ends)
        for writer in writers:
            writer.close()
        self._report(stopped)

    def _open_writers(self) -> Sequence[Writer]:
        if not self.is_main:
            return []
        settings = self.config.model_dump(mode="json")
        name = "config.yaml" if not self.step else f"config-from-step-{self.step:08d}.yaml"
        (self.folder / name).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        config = self.config
        writers = open_writers(config.logging, self.folder, config.name, self.step, config.training.steps, settings)
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
            self.say(f"pipeline trace of step {self.step}: {path}; to draw it: {draw}")

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
        start = time.perf_counter()
        loss, result = self.trainer.train_step(self.step, next(stream), before_update=self._before_update)
        seconds = time.perf_counter() - start
        learning_rate = self.trainer.learning_rate(self.step)
        self.step += 1
        t = self.config.training
        tokens = t.global_batch_size * t.seq_length
        per_gpu = tokens / seconds / self.parallel.world_size
        flops = per_gpu * flops_per_token(self.config.model, t.seq_length)
        peak = PEAK_FLOPS["fp8" if self.config.fp8.recipe != "none" else t.precision] if self._peak_is_known() else None
        evaluate = t.eval_interval and (self.step % t.eval_interval == 0 or self.step == t.steps)
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
            validation_loss=self._evaluate() if evaluate else None,
        )

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
            self.saver.wait_copied()

    def _save(self, ends: bool) -> None:
        """Save this step; at once where the run `ends`, as there is nothing left to do meanwhile."""
        if self.saved_step == self.step:
            return
        self.saved_step = self.step
        data = self.inputs.record(self.step * self.config.training.global_batch_size)
        if self.saver is not None and not ends:
            begin_save(self.trainer, self.saver, self.step, self.inputs.fingerprint, data)
            return
        if self.saver is not None:
            self.saver.finish()
        start = time.perf_counter()
        path = save_state(
            self.trainer, self.folder, self.step, self.inputs.fingerprint, self.lock, data, self.tokenizer
        )
        self.say(f"saved {path} in {time.perf_counter() - start:.1f} s")

    def _say_saved(self, saved: Saved) -> None:
        self.say(f"saved {saved.path}: stalled {saved.stalled_seconds:.1f} s, {saved.total_seconds:.1f} s in all")

    def _report(self, stopped: bool) -> None:
        if not self.is_main:
            return
        records = read_metrics(self.folder / "metrics.jsonl")
        plot_loss(records, self.folder / "loss.png", self.config.name)
        if stopped:
            self.say(f"stopped on request after step {self.step}; start the same command again to continue")
            return
        if sys.stdout.isatty() or self.config.logging.progress:
            print_loss(records)
        print(f"run folder: {self.folder}\nloss curve: {self.folder / 'loss.png'}")
        report = self.folder / FILE_NAME
        if self.trainer.fp8.recorder is not None and report.stat().st_size:
            print(f"FP8 report: {report}; to read it: python tools/fp8_report.py {shlex.quote(str(self.folder))}")
