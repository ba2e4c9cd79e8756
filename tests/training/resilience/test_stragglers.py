"""The slowest rank, from times by section, and on real ranks one of which sleeps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.parallel import activity
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.resilience import stragglers
from megafp8.training.resilience.stragglers import GPU_TEST, SectionTimes, Slowest, Stragglers, slowest
from tests.world import World


def times(*by_rank: tuple[int, float, float], gpu: tuple[float, ...] = ()) -> list[SectionTimes]:
    """`by_rank`: stage, seconds of data and of the update."""
    found = []
    for rank, (stage, data, update) in enumerate(by_rank):
        device = {GPU_TEST: gpu[rank]} if gpu else {}
        found.append(SectionTimes(rank, f"node{rank}", stage, {"data": data, "update": update, **device}))
    return found


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (times((0, 1, 3), (0, 1, 3), (0, 3, 3)), Slowest(2, "node2", 1.5, "data", 2)),
        (times((0, 1, 3), (0, 1, 7), (0, 1, 3), (0, 1, 3)), Slowest(1, "node1", 2.0, "update", 4)),
        (times((0, 1, 1), (0, 1, 1), (1, 8, 8), (1, 8, 10)), Slowest(3, "node3", 1.125, "update", 2)),
        (times((0, 1, 1), (1, 9, 9)), None),  # stages do different work
        (times((0, 1, 1), (0, 1, 1), (0, 1, 1), gpu=(2.0, 3.0, 2.0)), Slowest(1, "node1", 1.5, GPU_TEST, 1.0)),
    ],
)
def test_the_slowest_rank_of_a_stage(own: list[SectionTimes], expected: Slowest | None) -> None:
    assert slowest(own) == expected


@pytest.mark.parametrize(
    ("compared", "warnings"),
    [
        ([(0.4, 1.0), (0.4, 1.0)], 1),
        ([(0.4, 1.0), (0.4, 0.4)], 0),  # once
        ([(0.4, 1.0), (1.0, 0.4)], 0),  # another rank
        ([(0.04, 0.10), (0.04, 0.10)], 0),  # 6 ms a step
        ([(1.0, 1.15), (1.0, 1.15)], 0),
    ],
)
def test_a_warning_needs_two_slow_comparisons_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compared: list[tuple[float, float]],
    warnings: int,
) -> None:
    parallel: Any = SimpleNamespace(
        rank=0, device=torch.device("cpu"), pipeline=SimpleNamespace(rank=0), world=SimpleNamespace(group=None)
    )
    observer = Stragglers(10, parallel)
    for step, pair in zip((10, 20), compared):
        found = times(*((0, 0.0, seconds) for seconds in pair))
        monkeypatch.setattr(stragglers, "gather_objects", lambda own, group, found=found: found)
        assert not caplog.messages
        with activity.recorded():
            observer.after_step(step, 0.0, False)
    assert len(caplog.messages) == warnings
    assert all(text.startswith("slow rank: rank 1 on node1 took 2.50 times") for text in caplog.messages)


def _steps(sleeper: int) -> tuple[int, str, bool] | None:
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    with activity.recorded() as record:
        record.enter("data")
        time.sleep(0.3 if parallel.rank == sleeper else 0.1)
        record.enter("update")
        observer = Stragglers(10, parallel)
        observer.after_step(10, 0.0, False)
    found = observer.slowest
    return None if found is None else (found.rank, found.section, found.ratio > 2)


def test_a_rank_that_sleeps_is_the_slowest(world4: World) -> None:
    assert world4.run(_steps, 2, ranks=3) == [(2, "data", True), None, None]
