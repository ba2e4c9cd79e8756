"""Metrics of a step and their writers: metrics.jsonl, TensorBoard, Weights & Biases, log lines, a progress bar.

metrics.jsonl is authoritative: one JSON object per step, appended and flushed when the step ends. A resumed run appends
to it, so a step that was lost in a crash and repeated is there twice; `read_metrics` keeps the later one. So does a
process that goes back to a checkpoint after a loss spike. Other writers are opened again before a step is repeated, and
drop what they have of it and of later steps (`ReopenedToRepeat`). Non-finite numbers are written as null, since JSON
has none.

Steps sampled for the FP8 health report also have its records. fp8_report.jsonl has all of them; TensorBoard and wandb
get curves of the worst tensor of each operand, and of the SNR and amax of every tensor.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import resource
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megafp8.config import LoggingConfig
from megafp8.fp8.health import OPERANDS, Fp8Record, ReportWriter
from megafp8.host.redaction import redact_tree
from megafp8.host.text_file import DiskErrorsLogged, JsonLines, replace_text
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.run_log import STEPS

METRICS = "metrics.jsonl"

logger, _steps_logger = logging.getLogger(__name__), logging.getLogger(STEPS)


def memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the GPU, or resident on the host if there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl in order, each once."""
    return read_steps(path, "loss")


def read_steps(path: Path, required: str) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, one a step, that have the key `required`; in order, each step once.

    After a crash a run repeats the steps since its checkpoint: of these the later record counts, and steps that came
    after them before the crash are left out until they are repeated too.

    Lines that are not the object of a step are ignored.
    """
    records = [record for record in read_records(path, "step", required) if isinstance(record["step"], int)]
    flags = counting([record["step"] for record in records])
    return [record for record, counts in zip(records, flags, strict=True) if counts]


def read_records(path: Path, *required: str) -> list[dict[str, Any]]:
    """The JSON objects with the keys `required` of a file with one in each line.

    Other lines are ignored, such as one truncated by a kill.
    """
    return _parsed(path.read_text(encoding="utf-8", errors="replace"), required)


def _parsed(text: str, required: Sequence[str]) -> list[dict[str, Any]]:
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and all(key in record for key in required):
            records.append(record)
    return records


def last_step(path: Path, most_bytes: int = 1 << 20) -> int:
    """Return the step of the last record of a metrics.jsonl, read from its end; 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most_bytes))
        steps = [x["step"] for x in _parsed(file.read().decode(errors="replace"), ("step",))]
    return steps[-1] if steps and isinstance(steps[-1], int) else 0


def counting(steps: Sequence[int]) -> list[bool]:
    """Whether each record of a run counts, by their `steps`: if all later records are of later steps.

    The others were lost in a crash.
    """
    flags: list[bool] = []
    earliest = math.inf
    for step in reversed(steps):
        flags.append(step < earliest)
        earliest = min(step, earliest)
    return flags[::-1]


def fp8_scalars(records: Sequence[Fp8Record]) -> dict[str, float]:
    """Scalars of a sampled step, without those that are not finite.

    `fp8/<operand>/{min_snr_db,max_underflow,max_saturated}` over the layers, `fp8/<layer>/<operand>/{snr_db,amax}`.
    """
    scalars = {}
    for operand in OPERANDS:
        operand_records = [record for record in records if record.operand == operand]
        known = [record.snr_db for record in operand_records if record.snr_db is not None]
        if known:
            scalars[f"fp8/{operand}/min_snr_db"] = min(known)
        if operand_records:
            scalars[f"fp8/{operand}/max_underflow"] = max(record.underflow for record in operand_records)
            scalars[f"fp8/{operand}/max_saturated"] = max(record.saturated for record in operand_records)
    for record in records:
        for figure, value in (("snr_db", record.snr_db), ("amax", record.amax)):
            if value is not None:
                scalars[f"fp8/{record.layer}/{record.operand}/{figure}"] = value
    return scalars


class ReopenedToRepeat(Observer):
    """Writer that is opened again when steps are repeated, as after a loss spike.

    Args:
        make: Function that opens the writer to continue after a step, without what it has of later steps.
        step: Last step done.
    """

    def __init__(self, make: Callable[[int], Observer], step: int) -> None:
        self._make, self._writer, self._step = make, make(step), step

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        if metrics.step <= self._step:
            self._writer.close()
            self._writer = self._make(metrics.step - 1)
        self._writer.write(metrics, records)
        self._step = metrics.step

    def close(self) -> None:
        self._writer.close()


class UnlessDiskFull(Observer):
    """`writer`, whose errors of the file system do not end the run (`DiskErrorsLogged`). `what`: it writes."""

    def __init__(self, what: str, writer: Observer) -> None:
        self._writer, self._errors_logged = writer, DiskErrorsLogged(what)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        with self._errors_logged:
            self._writer.write(metrics, records)

    def close(self) -> None:
        with self._errors_logged:
            self._writer.close()


class JsonlWriter(Observer):
    """Appends every step to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        self._lines.append(
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in metrics.as_dict().items()
            }
        )

    def close(self) -> None:
        self._lines.close()


class Fp8ReportWriter(Observer):
    """Appends the records of sampled steps after `step` to fp8_report.jsonl."""

    def __init__(self, path: Path, step: int) -> None:
        self.report = ReportWriter(path, step)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        self.report.write(records)

    def close(self) -> None:
        self.report.close()


def scalars(metrics: StepMetrics, records: Sequence[Fp8Record]) -> dict[str, float]:
    """All known numbers of a step by name, without the step itself."""
    values = {**metrics.as_dict(), **fp8_scalars(records)}
    return {k: float(v) for k, v in values.items() if k != "step" and isinstance(v, (int, float))}


class TensorBoardWriter(Observer):
    """Scalars in the run folder after `step`; TensorBoard hides what an earlier writer wrote of later steps."""

    def __init__(self, path: Path, step: int = 0) -> None:
        self._path, self._purge_step = path, step + 1

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._path), purge_step=self._purge_step)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        for key, value in scalars(metrics, records).items():
            self._writer.add_scalar(key, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(Observer):
    """Weights & Biases run after `step`, online or offline according to wandb's environment variables.

    Steps that are repeated, after a loss spike or by a run that resumes, are removed from wandb's run first. That is a
    recent feature of the server. Without it wandb shows both attempts, over `step`, the axis of all metrics.

    Args:
        folder: Run folder, where wandb's files and the id of the run are.
        config: Settings of the run to be shown.
    """

    def __init__(self, project: str, name: str, folder: Path, config: dict[str, Any], step: int = 0) -> None:
        import wandb

        begin = partial(wandb.init, project=project, name=name, dir=str(folder), config=config)
        run_id = wandb_id(folder, name)
        if last_step(folder / METRICS) <= step:
            self.run = begin(id=run_id, resume="allow")
        else:
            try:
                self.run = begin(resume_from=f"{run_id}?_step={step}")
            except wandb.Error as error:
                logger.warning(f"wandb shows steps after {step} twice, since it cannot remove the first ones: {error}")
                self.run = begin(id=run_id, resume="allow")
        self._step = self.run.starting_step - 1
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        self._step = max(self._step + 1, metrics.step)  # wandb ignores what is logged for a step that it has
        self.run.log({"step": metrics.step, **scalars(metrics, records)}, step=self._step)

    def close(self) -> None:
        self.run.finish()


def wandb_id(folder: Path, name: str) -> str:
    """Return the id of wandb's run of a run folder: random, since runs of several sweeps or users have the same names.

    It is kept in the folder for runs that resume, by name, so that a copy of the folder under another name has an id of
    its own. Runs that began before there were such files have their names as ids.
    """
    own_files = folder / "wandb"
    path, began_before = own_files / f"{name}.id", own_files.is_dir() and not any(own_files.glob("*.id"))
    if not path.exists():
        own_files.mkdir(exist_ok=True)
        replace_text(path, name if began_before else secrets.token_hex(8))
    return path.read_text(encoding="utf-8")


def short_number(number: int) -> str:
    """A count in four digits: 1234 as `1.234K`, 15 trillion as `15.00T`; unchanged below 1000."""
    for unit in ("", "K", "M", "B", "T"):
        if number < 999.95 or unit == "T":
            break
        number = number / 1000  # type: ignore[assignment]
    return f"{number:#.4g}{unit}" if unit else str(number)


class LogWriter(Observer):
    """A log line every `interval` steps, and for every step that was evaluated or skipped.

    Step time, tokens per second and MFU are means over the steps since the previous line. A line shows the share of
    these steps that waited for data if it is noticeable. The estimated time to `last_step` uses the mean wall time,
    including evaluations and saves, of up to `_WINDOW` latest steps of this process, without the first, which is
    slower. `per`: unit of rates, `gpu` or `process`. `bar`: show a progress bar too. `clock`: seconds.
    """

    _WINDOW = 1000
    _NOTICEABLE_WAIT = 0.1

    def __init__(
        self,
        first_step: int,
        last_step: int,
        interval: int,
        *,
        per: str,
        bar: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval, self._last, self._per, self._clock = interval, last_step, per, clock
        self._ends: deque[float] = deque(maxlen=self._WINDOW + 1)
        self._since: list[StepMetrics] = []
        self._bar = tqdm(total=last_step, initial=first_step, unit="step", file=sys.stderr) if bar else None

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        self._ends.append(self._clock())
        self._since.append(metrics)
        waited, seconds = metrics.data_seconds, metrics.step_seconds
        if len(self._ends) == 1 and waited >= max(1.0, self._NOTICEABLE_WAIT * seconds):
            logger.info(f"the first step waited for data for {waited:.1f} of its {seconds:.1f} s")
        if self._bar is not None:
            self._bar.update(1)
        ends = metrics.step == self._last
        if not (metrics.skipped or metrics.evaluated or ends or metrics.step % self._interval == 0):
            return
        line = f"step {metrics.step:>6}/{self._last}  {self._line(metrics)}"
        self._since = []
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {metrics.loss:.4f}")
        if metrics.skipped:
            row = f", {metrics.skipped_in_a_row} in a row" if metrics.skipped_in_a_row > 1 else ""
            logger.warning(f"{line}  SKIPPED{row}: {metrics.why_skipped}")
        elif metrics.evaluated:
            logger.info(line)
        else:
            _steps_logger.info(line)

    def _line(self, metrics: StepMetrics) -> str:
        seconds = sum(step.step_seconds for step in self._since)
        rate = sum(step.tokens_per_second_per_gpu * step.step_seconds for step in self._since) / seconds
        parts = [
            f"loss {metrics.loss:.4f}",
            *([] if metrics.mtp_loss is None else [f"mtp loss {metrics.mtp_loss:.4f}"]),
            *([] if metrics.binary_loss is None else [f"binary loss {metrics.binary_loss:.4f}"]),
            *([] if metrics.z_loss is None else [f"z-loss {metrics.z_loss:.4f}"]),
            *(f"{name} {value:.4f}" for name, value in metrics.objective.items()),
            f"grad norm {metrics.grad_norm:.3f}",
            f"lr {metrics.learning_rate:.2e}",
            *([] if metrics.loss_scale is None else [f"loss scale {metrics.loss_scale:g}"]),
            f"{seconds / len(self._since):.3f} s/step",
            f"{rate:,.0f} tok/s/{self._per}",
        ]
        waiting = sum(step.data_seconds for step in self._since) / seconds
        if waiting >= self._NOTICEABLE_WAIT:
            parts.append(f"{waiting:.0%} waiting for data")
        if metrics.mfu is not None:
            parts.append(f"mfu {sum((step.mfu or 0.0) * step.step_seconds for step in self._since) / seconds:.1%}")
        if metrics.expert_imbalance is not None:
            parts.append(f"imbalance {metrics.expert_imbalance:.2f}")
        parts.append(f"{short_number(metrics.tokens)} tokens")
        if metrics.step < self._last and len(self._ends) > 1:
            mean = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            parts.append(f"ETA {datetime.timedelta(seconds=round(mean * (self._last - metrics.step)))}")
        if metrics.validation_loss is not None:
            parts.append(f"validation {metrics.validation_loss:.4f}")
        losses = ((name, value) for name, value in metrics.evaluations.items() if name.startswith("valid/"))
        parts += [f"{name} {value:.4f}" for name, value in losses]
        return "  ".join(parts)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def open_writers(
    config: LoggingConfig,
    folder: Path,
    name: str,
    first_step: int,
    last_step: int,
    settings: dict[str, Any],
    device: torch.device,
) -> list[Observer]:
    """The writers that the config enables, for the one rank that logs."""
    writers: list[Observer] = [UnlessDiskFull(METRICS, JsonlWriter(folder / METRICS))]
    if config.tensorboard:
        in_tensorboard = partial(TensorBoardWriter, folder / "tensorboard")
        writers.append(UnlessDiskFull("tensorboard", ReopenedToRepeat(in_tensorboard, first_step)))
    if config.wandb_project is not None:
        in_wandb = partial(WandbWriter, config.wandb_project, name, folder, redact_tree(settings))
        writers.append(ReopenedToRepeat(in_wandb, first_step))
    per, bar = "gpu" if device.type == "cuda" else "process", config.progress and sys.stderr.isatty()
    return [*writers, LogWriter(first_step, last_step, config.interval, per=per, bar=bar)]
