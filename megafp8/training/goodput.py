"""Goodput of a run: the fraction of its wall time that was spent in steps that count, and the uses of the other time.

A record of metrics.jsonl has the time at which its step and the evaluation after it had ended. Before this time come,
in this order, `save_seconds` (stalls since the previous record), `step_seconds` and `evaluation_seconds`. The remaining
time since the previous record or the launch is start-up or other work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megafp8.training.metrics import read_records

PARTS: Mapping[str, str] = {
    "training": "steps that count, without waiting for data",
    "data": "waiting for data in steps that count",
    "skipped": "skipped steps: gradients not finite, or a loss spike",
    "repeated": "steps that were lost and repeated",
    "evaluation": "evaluations",
    "saves": "stalls for checkpoints",
    "startup": "from a launch to its first step",
    "down": "from the last step before a launch to that launch: unfinished step, failure, queue",
    "other": "between steps: logs, checks, changes of stages",
}
"""Parts of the wall time in order, with their descriptions."""


@dataclass(frozen=True)
class Goodput:
    """Wall time of a run by use.

    Attributes:
        wall_seconds: Time from the first launch to the last record. A save after the last record is not included.
        seconds: Time of each of `PARTS`; the sum is `wall_seconds`.
        launches: Number of launches.
        repeated_steps: Number of steps that were lost in a crash and repeated.
        skipped_steps: Number of steps that count but made no update.
    """

    wall_seconds: float
    seconds: Mapping[str, float]
    launches: int
    repeated_steps: int
    skipped_steps: int

    @property
    def fraction(self) -> float:
        """Goodput, from 0 to 1."""
        return self.seconds["training"] / self.wall_seconds if self.wall_seconds > 0 else 0.0


def read_lines(path: Path, *required: str) -> list[dict[str, Any]]:
    """Return the result of `metrics.read_records`, or an empty list if the file does not exist."""
    return read_records(path, *required) if path.exists() else []


class _Step(NamedTuple):
    """Seconds of a step that counts, by part."""

    step: int
    training: float
    data: float
    skipped: float


class GoodputMeter:
    """Meter that computes the goodput of a run record by record.

    `launches` are all records of launches.jsonl. Without launches the run begins with its first step.
    """

    def __init__(self, launches: Sequence[Mapping[str, Any]]) -> None:
        self._starts = sorted(_seconds(launch) for launch in launches)
        self._launches = len(launches)
        self._begin = self._end = math.nan
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps: list[_Step] = []
        self._repeated = self._skipped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the next record of metrics.jsonl. Earlier records of the same or later steps count as repeated."""
        seconds, now = self._seconds, _seconds(record)
        if math.isnan(self._begin):
            self._begin = self._end = min([now - _busy(record), *self._starts[:1]])
        launched = [start for start in self._starts if self._end <= start <= now]
        self._starts = [start for start in self._starts if start > now]
        if launched:  # if there are several, all but the last one ended before their first step
            seconds["down"] += launched[-1] - self._end
            self._end = launched[-1]
        seconds["startup" if launched else "other"] += now - self._end - _busy(record)
        seconds["saves"] += record.get("save_seconds") or 0.0
        seconds["evaluation"] += record.get("evaluation_seconds") or 0.0
        while self._steps and self._steps[-1].step >= record["step"]:
            self._count(self._steps.pop(), -1)
        step, waiting = record["step_seconds"], record.get("data_seconds") or 0.0
        spent = (0.0, 0.0, step) if record.get("skipped") else (step - waiting, waiting, 0.0)
        self._steps.append(_Step(record["step"], *spent))
        self._count(self._steps[-1], 1)
        self._end = now

    def _count(self, step: _Step, times: int) -> None:
        """Add a step to the totals if `times` is 1, or move it to the repeated steps if `times` is -1."""
        for part in ("training", "data", "skipped"):
            self._seconds[part] += times * getattr(step, part)
        self._skipped += times * (step.skipped > 0)
        if times < 0:
            self._seconds["repeated"] += sum(step[1:])
            self._repeated += 1

    def result(self) -> Goodput:
        """Return the goodput up to the last record."""
        wall = self._end - self._begin
        return Goodput(wall, dict(self._seconds), self._launches, self._repeated, self._skipped)


def goodput(records: Sequence[Mapping[str, Any]], launches: Sequence[Mapping[str, Any]]) -> Goodput:
    """Return the goodput of a run, given all records of its metrics.jsonl, in order of time, and launches.jsonl."""
    if not records:
        raise ValueError("goodput: there is no step")
    meter = GoodputMeter(launches)
    for record in records:
        meter.add(record)
    return meter.result()


def _seconds(record: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def _busy(record: Mapping[str, Any]) -> float:
    """Return the seconds of a step, including the saves before it and the evaluation after it."""
    return sum(record.get(key) or 0.0 for key in ("step_seconds", "save_seconds", "evaluation_seconds"))
