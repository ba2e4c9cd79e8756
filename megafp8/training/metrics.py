"""Figures of a step and where they go: metrics.jsonl, TensorBoard, Weights & Biases, a progress bar.

metrics.jsonl is the truth: one JSON object a step, appended and flushed as the step ends. A resumed run appends too, so
a step that was lost with a crash and run again stands there twice; `read_metrics` keeps the later one. Non-finite
numbers are written as null, since JSON has none.

A step whose FP8 health was sampled brings its records too. fp8_report.jsonl has them whole; curves are drawn of the
worst tensor of each operand, and of every tensor's SNR and amax.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from megafp8.config import LoggingConfig
from megafp8.fp8.report import OPERANDS, Record, ReportWriter


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Rates are per GPU (per process on CPU); `mfu` is None where the peak is not known."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    memory_gib: float
    step_seconds: float
    skipped: bool
    validation_loss: float | None = None


def memory_gib(device: torch.device) -> float:
    """Peak memory: allocated on the GPU, or resident on the host where there is none. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl in order, each once: where a step was run again after a crash, the later run."""
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a kill cut short
        steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)]


def fp8_scalars(records: Sequence[Record]) -> dict[str, float]:
    """Curves of a sampled step: `fp8/<operand>/{min_snr_db,max_underflow,max_saturated}` over the layers, and
    `fp8/<layer>/<operand>/{snr_db,amax}`. What was not finite is left out."""
    scalars = {}
    for operand in OPERANDS:
        own = [record for record in records if record.operand == operand]
        known = [record.snr_db for record in own if record.snr_db is not None]
        if known:
            scalars[f"fp8/{operand}/min_snr_db"] = min(known)
        if own:
            scalars[f"fp8/{operand}/max_underflow"] = max(record.underflow for record in own)
            scalars[f"fp8/{operand}/max_saturated"] = max(record.saturated for record in own)
    for record in records:
        for figure, value in (("snr_db", record.snr_db), ("amax", record.amax)):
            if value is not None:
                scalars[f"fp8/{record.layer}/{record.operand}/{figure}"] = value
    return scalars


class Writer(Protocol):
    """Somewhere figures go: a step's, and the FP8 health `records` of a step that was sampled."""

    def write(self, metrics: StepMetrics, records: Sequence[Record] = ()) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """Appends every step to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self.file = path.open("a", encoding="utf-8")
        if torn:  # a kill cut the last line short: do not glue the next object to it
            self.file.write("\n")

    def write(self, metrics: StepMetrics, records: Sequence[Record] = ()) -> None:
        record = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(metrics).items()
        }
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Fp8ReportWriter:
    """Appends the records of sampled steps to fp8_report.jsonl, from after `step` on."""

    def __init__(self, path: Path, step: int) -> None:
        self.report = ReportWriter(path, step)

    def write(self, metrics: StepMetrics, records: Sequence[Record] = ()) -> None:
        self.report.write(records)

    def close(self) -> None:
        self.report.close()


class TensorBoardWriter:
    """Scalars under the run folder."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(path))

    def write(self, metrics: StepMetrics, records: Sequence[Record] = ()) -> None:
        for key, value in (asdict(metrics) | fp8_scalars(records)).items():
            if key != "step" and value is not None:
                self.writer.add_scalar(key, float(value), metrics.step)

    def close(self) -> None:
        self.writer.close()


class WandbWriter:
    """Weights & Biases, online or offline as its own environment variables say."""

    def __init__(self, project: str, name: str, path: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "logging.wandb_project is set, but wandb is not installed: pip install 'megafp8[wandb]', or unset it"
            ) from None
        self.run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(path), config=config)

    def write(self, metrics: StepMetrics, records: Sequence[Record] = ()) -> None:
        figures = asdict(metrics) | fp8_scalars(records)
        self.run.log({k: v for k, v in figures.items() if v is not None}, step=metrics.step)

    def close(self) -> None:
        self.run.finish()


class ProgressWriter:
    """A bar on a terminal; elsewhere a line a step."""

    def __init__(self, first_step: int, total_steps: int, interval: int) -> None:
        self.interval, self.total = interval, total_steps
        self.bar = tqdm(total=total_steps, initial=first_step, unit="step") if sys.stderr.isatty() else None

    def write(self, metrics: StepMetrics, records: Sequence[Record] = ()) -> None:
        if self.bar is not None:
            self.bar.update(1)
        if metrics.step % self.interval and metrics.step != self.total:
            return
        rate = f"{metrics.tokens_per_second_per_gpu:,.0f} tok/s/gpu"
        mfu = "" if metrics.mfu is None else f"  mfu {metrics.mfu:.1%}"
        note = "  SKIPPED: gradients not finite" if metrics.skipped else ""
        valid = "" if metrics.validation_loss is None else f"  validation {metrics.validation_loss:.4f}"
        text = (
            f"loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  lr {metrics.learning_rate:.2e}  {rate}{mfu}"
        )
        if self.bar is not None:
            self.bar.set_postfix_str(text)
            if note or valid:
                self.bar.write(f"step {metrics.step}: loss {metrics.loss:.4f}{valid}{note}", file=sys.stderr)
        else:
            print(f"step {metrics.step:>6}/{self.total}  {text}{valid}{note}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def open_writers(
    config: LoggingConfig, folder: Path, name: str, first_step: int, total_steps: int, settings: dict[str, Any]
) -> Sequence[Writer]:
    """The writers that the config asks for, for the one rank that logs."""
    writers: list[Writer] = [JsonlWriter(folder / "metrics.jsonl")]
    if config.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard"))
    if config.wandb_project is not None:
        writers.append(WandbWriter(config.wandb_project, name, folder, settings))
    if config.progress:
        writers.append(ProgressWriter(first_step, total_steps, config.interval))
    return writers
