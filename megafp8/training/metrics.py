"""Writers of step metrics: metrics.jsonl, TensorBoard, Weights & Biases, log lines and a progress bar.

metrics.jsonl is authoritative: one JSON object per step, appended and flushed when the step ends. A resumed run appends
to it, and so does a process that goes back to a checkpoint after a loss spike. A repeated step is therefore in the file
twice, and `read_metrics` keeps the later record. Other writers are reopened before a step is repeated, and drop their
records of this step and of later steps (`ReopenedToRepeat`). Non-finite numbers are written as null, because JSON has
no such numbers.

Steps sampled for the FP8 health report also have FP8 records. fp8_report.jsonl gets all records. TensorBoard and wandb
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
from megafp8.host.text_file import DiskErrorsLogged, JsonLines, last_integer, replace_text
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.run_log import STEPS

METRICS = "metrics.jsonl"

logger, _steps_logger = logging.getLogger(__name__), logging.getLogger(STEPS)


def memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated on a GPU, or resident on the host for a CPU run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def utc_now() -> str:
    """Return the present time in UTC as ISO 8601 with milliseconds."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl file in order, each step once."""
    return read_steps(path, "loss")


def read_steps(path: Path, required: str) -> list[dict[str, Any]]:
    """Return the records with the key `required` from a file of JSON lines, in order, each step once.

    After a crash a run repeats the steps since its checkpoint. The later record of a repeated step counts. Records
    after it that the crash made obsolete are left out until their steps are repeated too. Lines that are not the
    object of a step are ignored.
    """
    records = [record for record in read_records(path, "step", required) if isinstance(record["step"], int)]
    flags = counting([record["step"] for record in records])
    return [record for record, counts in zip(records, flags, strict=True) if counts]


def read_records(path: Path, *required: str) -> list[dict[str, Any]]:
    """Return the JSON objects with all keys `required` from a file with one object per line.

    Other lines are ignored, such as a line truncated by a kill.
    """
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and all(key in record for key in required):
            records.append(record)
    return records


def counting(steps: Sequence[int]) -> list[bool]:
    """Return for each record whether it counts, given the records' `steps` in order.

    A record counts if all later records have later steps. The other records were made obsolete by a crash.
    """
    flags: list[bool] = []
    earliest = math.inf
    for step in reversed(steps):
        flags.append(step < earliest)
        earliest = min(step, earliest)
    return flags[::-1]


def fp8_scalars(records: Sequence[Fp8Record]) -> dict[str, float]:
    """Return the finite FP8 scalars of a sampled step by name.

    The names are `fp8/<operand>/{min_snr_db,max_underflow,max_saturated}` for extremes over the layers, and
    `fp8/<layer>/<operand>/{snr_db,amax}`.
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
    """Writer that is reopened when steps are repeated, as after a loss spike.

    Args:
        make: Function that opens the writer after a given step and drops its records of later steps.
        step: Last step done.
    """

    def __init__(self, make: Callable[[int], Observer], step: int) -> None:
        self._make, self._writer, self._step = make, make(step), step

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Write a step. Reopen the writer first if the step was written before."""
        if metrics.step <= self._step:
            self._writer.close()
            self._writer = self._make(metrics.step - 1)
        self._writer.write(metrics, records)
        self._step = metrics.step

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


class UnlessDiskFull(Observer):
    """Wrapper of `writer` that logs file-system errors instead of ending the run (`DiskErrorsLogged`).

    `what` names the written file in the log.
    """

    def __init__(self, what: str, writer: Observer) -> None:
        self._writer, self._errors_logged = writer, DiskErrorsLogged(what)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Write a step, and log file-system errors."""
        with self._errors_logged:
            self._writer.write(metrics, records)

    def close(self) -> None:
        """Close the writer, and log file-system errors."""
        with self._errors_logged:
            self._writer.close()


class JsonlWriter(Observer):
    """Writer that appends every step to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Append the metrics of a step as one JSON line."""
        self._lines.append(
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in metrics.as_dict().items()
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class Fp8ReportWriter(Observer):
    """Writer that appends the FP8 records of sampled steps after `step` to fp8_report.jsonl."""

    def __init__(self, path: Path, step: int) -> None:
        self.report = ReportWriter(path, step)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Append the FP8 records of a step."""
        self.report.write(records)

    def close(self) -> None:
        """Close the file."""
        self.report.close()


def scalars(metrics: StepMetrics, records: Sequence[Fp8Record]) -> dict[str, float]:
    """Return all known numbers of a step by name, without the step number itself."""
    values = {**metrics.as_dict(), **fp8_scalars(records)}
    return {k: float(v) for k, v in values.items() if k != "step" and isinstance(v, (int, float))}


class TensorBoardWriter(Observer):
    """Writer of TensorBoard scalars for the steps after `step`.

    TensorBoard hides the scalars that an earlier writer wrote for these steps.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self._path, self._purge_step = path, step + 1

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._path), purge_step=self._purge_step)

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Write all scalars of a step."""
        for key, value in scalars(metrics, records).items():
            self._writer.add_scalar(key, value, metrics.step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbWriter(Observer):
    """Writer of a Weights & Biases run, online or offline according to wandb's environment variables.

    If steps are repeated, after a loss spike or by a resumed run, their first version is removed from the wandb run.
    Older wandb servers do not support this; wandb then shows both versions over `step`, the axis of all metrics.

    Args:
        project: Name of the wandb project.
        name: Name of the run.
        folder: Run folder, which holds wandb's files and the id of the wandb run.
        config: Settings to show in wandb.
        step: Last step done.
    """

    def __init__(self, project: str, name: str, folder: Path, config: dict[str, Any], step: int = 0) -> None:
        import wandb

        begin = partial(wandb.init, project=project, name=name, dir=str(folder), config=config)
        run_id = wandb_id(folder, name)
        if last_integer(folder / METRICS, "step") <= step:
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
        """Log all scalars of a step to wandb."""
        self._step = max(self._step + 1, metrics.step)  # wandb ignores scalars of a step that it already has
        self.run.log({"step": metrics.step, **scalars(metrics, records)}, step=self._step)

    def close(self) -> None:
        """Finish the wandb run."""
        self.run.finish()


def wandb_id(folder: Path, name: str) -> str:
    """Return the id of the wandb run of a run folder.

    The id is random, because runs of several sweeps or users may have the same name. A file in the folder keeps it for
    resumed runs. The file has the run's name, so a copy of the folder under another name gets another id. Runs from
    before these files existed have their names as ids.
    """
    own_files = folder / "wandb"
    path, began_before = own_files / f"{name}.id", own_files.is_dir() and not any(own_files.glob("*.id"))
    if not path.exists():
        own_files.mkdir(exist_ok=True)
        replace_text(path, name if began_before else secrets.token_hex(8))
    return path.read_text(encoding="utf-8")


def short_number(number: int) -> str:
    """Return a count with four digits: `1.234K` for 1234, `15.00T` for 15 trillion; unchanged below 1000."""
    for unit in ("", "K", "M", "B", "T"):
        if number < 999.95 or unit == "T":
            break
        number = number / 1000  # type: ignore[assignment]
    return f"{number:#.4g}{unit}" if unit else str(number)


class LogWriter(Observer):
    """Writer of a log line every `interval` steps, and for every step that was evaluated or skipped.

    Step time, tokens per second and MFU are means over the steps since the previous line. If at least a tenth of this
    time was spent waiting for data, the line shows this share. The estimated time to `last_step` uses the mean wall
    time, including evaluations and saves, of up to `_WINDOW` latest steps of this process. The first step is left out
    because it is slower.

    Args:
        first_step: Number of steps done before.
        last_step: Last step of the run.
        interval: Number of steps between log lines.
        per: Unit of rates, `gpu` or `process`.
        bar: Show a progress bar too.
        clock: Function that returns the time in seconds.
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
        """Log a line if one is due for this step, and advance the progress bar."""
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
        if metrics.loss_tokens_per_second_per_gpu is not None:
            counted = 0.0
            for step in self._since:
                in_loss = step.loss_tokens_per_second_per_gpu
                counted += (step.tokens_per_second_per_gpu if in_loss is None else in_loss) * step.step_seconds
            parts[-1] += f" ({counted / seconds:,.0f} in the loss)"
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
        """Close the progress bar."""
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
    """Return the writers that the config enables. Call this only on the rank that logs."""
    writers: list[Observer] = [UnlessDiskFull(METRICS, JsonlWriter(folder / METRICS))]
    if config.tensorboard:
        in_tensorboard = partial(TensorBoardWriter, folder / "tensorboard")
        writers.append(UnlessDiskFull("tensorboard", ReopenedToRepeat(in_tensorboard, first_step)))
    if config.wandb_project is not None:
        in_wandb = partial(WandbWriter, config.wandb_project, name, folder, redact_tree(settings))
        writers.append(ReopenedToRepeat(in_wandb, first_step))
    per, bar = "gpu" if device.type == "cuda" else "process", config.progress and sys.stderr.isatty()
    return [*writers, LogWriter(first_step, last_step, config.interval, per=per, bar=bar)]
