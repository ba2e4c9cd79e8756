"""Goodput of hand-made timelines, and which records count."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megafp8.training.goodput import PARTS, goodput, read_lines
from megafp8.training.metrics import counting, read_metrics

NOON = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)


def at(seconds: float) -> str:
    return (NOON + datetime.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def record(step: int, time: float, seconds: float = 10.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "time": at(time), "step_seconds": seconds, "data_seconds": 1.0} | more


def test_a_timeline_by_hand() -> None:
    """Two launches that train, one between them that does not get to a step."""
    records = [
        record(1, 42),  # 32 s of start-up
        record(2, 53),  # 1 s between steps
        record(3, 70, evaluation_seconds=7.0),
        record(4, 84, save_seconds=4.0),
        record(5, 94),  # crashes in step 6
        record(4, 350, seconds=20.0),  # launched at 300
        record(5, 365, save_seconds=2.0, evaluation_seconds=3.0),
        record(6, 375, skipped=True, loss=None),
        record(7, 385, data_seconds=4.0),
    ]
    launches = [{"time": at(0)}, {"time": at(200)}, {"time": at(300)}]
    found = goodput(records, launches)
    assert found.wall_seconds == 385
    assert (found.launches, found.repeated_steps, found.skipped_steps) == (3, 2, 1)
    expected = {
        "training": 9 + 9 + 9 + 19 + 9 + 6,
        "data": 1 + 1 + 1 + 1 + 1 + 4,
        "skipped": 10,
        "repeated": 10 + 10,
        "evaluation": 7 + 3,
        "saves": 4 + 2,
        "startup": 32 + 30,
        "down": 300 - 94,
        "other": 1,
    }
    assert found.seconds == pytest.approx(expected)
    assert sum(found.seconds.values()) == pytest.approx(385)
    assert found.fraction == pytest.approx(61 / 385)
    assert list(found.seconds) == list(PARTS)


def test_without_launches_it_begins_with_the_first_step() -> None:
    found = goodput([record(1, 42), record(2, 52)], [])
    assert found.wall_seconds == 20
    assert found.fraction == 18 / 20
    with pytest.raises(ValueError, match="no step"):
        goodput([], [])


def test_records_that_count_are_those_that_metrics_reads(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(50):
        steps, step = [], 0
        for _ in range(30):
            step = max(1, step + draw.choice([1, 1, 1, -3]))
            steps.append(step)
        lines = [json.dumps({"step": step, "loss": i}) for i, step in enumerate(steps)]
        path = tmp_path / "metrics.jsonl"
        path.write_text("\n".join([*lines[:3], '{"step": 4, "lo', "[]", *lines[3:]]))
        kept: list[int] = []  # a repeated step takes the place of all since it
        for i, step in enumerate(steps):
            while kept and steps[kept[-1]] >= step:
                kept.pop()
            kept.append(i)
        assert [r["loss"] for r in read_metrics(path)] == kept
        assert [i for i, counts in enumerate(counting(steps)) if counts] == [r["loss"] for r in read_metrics(path)]
        assert [r["loss"] for r in read_lines(path, "step", "loss")] == list(range(30))
    assert read_lines(tmp_path / "missing") == []
