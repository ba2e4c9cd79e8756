"""Goodput of a run: the part of its wall time that was spent in steps that count, and where the rest went.

A record of metrics.jsonl has the time when its step and the evaluation after it had ended. Before that lie, in this
order, `save_seconds` (stalls since the record before), `step_seconds` and `evaluation_seconds`; what is left up to the
record before it, or up to the launch, is start-up or other work.
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
    "skipped": "steps whose gradients were not finite",
    "repeated": "steps that were lost in a crash and repeated",
    "evaluation": "evaluations",
    "saves": "stalls for checkpoints",
    "startup": "from a launch to its first step",
    "down": "from the last step before a launch to that launch: unfinished step, failure, queue",
    "other": "between steps: logs, checks, changes of stages",
}
"""Parts of the wall time, in order, and what they are."""


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went. `seconds`: of each of `PARTS`; their sum is `wall_seconds`.

    `wall_seconds`: from the first launch to the last record. A save after the last record is in none.
    """

    wall_seconds: float
    seconds: Mapping[str, float]
    launches: int
    repeated_steps: int
    skipped_steps: int

    @property
    def fraction(self) -> float:
        """The goodput, from 0 to 1."""
        return self.seconds["training"] / self.wall_seconds if self.wall_seconds > 0 else 0.0


def read_lines(path: Path, *required: str) -> list[dict[str, Any]]:
    """`metrics.read_records`; none if there is no file."""
    return read_records(path, *required) if path.exists() else []


class _Step(NamedTuple):
    """Seconds of a step that counts, by part."""

    step: int
    training: float
    data: float
    skipped: float


class GoodputMeter:
    """The goodput of a run, record by record. `launches`: of launches.jsonl, all of them.

    Without launches the run begins with its first step.
    """

    def __init__(self, launches: Sequence[Mapping[str, Any]]) -> None:
        self._starts = sorted(_seconds(launch) for launch in launches)
        self._launches = len(launches)
        self._begin = self._end = math.nan
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._steps: list[_Step] = []
        self._repeated = self._skipped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count the next record of metrics.jsonl; earlier ones of the same or of later steps do not count any more."""
        seconds, now = self._seconds, _seconds(record)
        if math.isnan(self._begin):
            self._begin = self._end = min([now - _busy(record), *self._starts[:1]])
        launched = [start for start in self._starts if self._end <= start <= now]
        self._starts = [start for start in self._starts if start > now]
        if launched:  # several: all but the last ended before their first step
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
        """Count a step, or -1 `times`, as repeated."""
        for part in ("training", "data", "skipped"):
            self._seconds[part] += times * getattr(step, part)
        self._skipped += times * (step.skipped > 0)
        if times < 0:
            self._seconds["repeated"] += sum(step[1:])
            self._repeated += 1

    def result(self) -> Goodput:
        """The goodput up to the last record."""
        wall = self._end - self._begin
        return Goodput(wall, dict(self._seconds), self._launches, self._repeated, self._skipped)


def goodput(records: Sequence[Mapping[str, Any]], launches: Sequence[Mapping[str, Any]]) -> Goodput:
    """The goodput of a run with all records of its metrics.jsonl, in order of time, and of its launches.jsonl."""
    if not records:
        raise ValueError("goodput: there is no step")
    meter = GoodputMeter(launches)
    for record in records:
        meter.add(record)
    return meter.result()


def _seconds(record: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def _busy(record: Mapping[str, Any]) -> float:
    """Seconds of a step, of the saves before it and the evaluation after it."""
    return sum(record.get(key) or 0.0 for key in ("step_seconds", "save_seconds", "evaluation_seconds"))
