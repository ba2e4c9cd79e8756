"""Goodput of a run: the part of its wall time that was spent in steps that count, and where the rest went.

A record of metrics.jsonl has the time when its step and the evaluation after it had ended. Before that lie, in this
order, `save_seconds` (stalls since the record before), `step_seconds` and `evaluation_seconds`; what is left up to the
record before it, or up to the launch, is start-up or other work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megafp8.training.metrics import counting, read_records

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


def goodput(records: Sequence[Mapping[str, Any]], launches: Sequence[Mapping[str, Any]]) -> Goodput:
    """The goodput of a run with these records of metrics.jsonl, all of them, in order of time, and of launches.jsonl.

    Without launches the run begins with its first step.
    """
    if not records:
        raise ValueError("goodput: there is no step")
    starts = sorted(_seconds(launch) for launch in launches)
    before = min([_seconds(records[0]) - _busy(records[0]), *starts[:1]])
    begin, end = before, _seconds(records[-1])
    seconds = dict.fromkeys(PARTS, 0.0)
    repeated = skipped = 0
    for record, counts in zip(records, counting([record["step"] for record in records])):
        now = _seconds(record)
        launched = [start for start in starts if before <= start <= now]
        starts = [start for start in starts if start > now]
        if launched:  # several: all but the last ended before their first step
            seconds["down"] += launched[-1] - before
            before = launched[-1]
        seconds["startup" if launched else "other"] += now - before - _busy(record)
        seconds["saves"] += record.get("save_seconds") or 0.0
        seconds["evaluation"] += record.get("evaluation_seconds") or 0.0
        step, waiting = record["step_seconds"], record.get("data_seconds") or 0.0
        if not counts:
            seconds["repeated"] += step
            repeated += 1
        elif record.get("skipped"):
            seconds["skipped"] += step
            skipped += 1
        else:
            seconds["training"] += step - waiting
            seconds["data"] += waiting
        before = now
    return Goodput(end - begin, seconds, len(launches), repeated, skipped)


def _seconds(record: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def _busy(record: Mapping[str, Any]) -> float:
    """Seconds of a step, of the saves before it and the evaluation after it."""
    return sum(record.get(key) or 0.0 for key in ("step_seconds", "save_seconds", "evaluation_seconds"))
