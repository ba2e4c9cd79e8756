"""The watch of real ranks: a rank that sleeps is named by all, with stacks of all; progress and pauses are no hang."""

from __future__ import annotations

import faulthandler
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from megafp8.config import Config
from megafp8.parallel import activity
from megafp8.parallel.collectives import all_reduce, barrier
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.errors import HUNG
from megafp8.training.resilience import hangs
from megafp8.training.resilience.hangs import HangWatch, StepMarks, progress_watched
from tests.marks import slow_but
from tests.world import World


def _hang(folder: Path, sleeper: int, silent: bool) -> tuple[list[int], list[str]]:
    """Steps, in the third of which `sleeper` sleeps; codes and messages of the watch on this rank.

    `silent`: its watch does not run either, as if its process had been stopped.
    """
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    faulthandler.register(signal.SIGUSR2)  # as `run_and_report` does
    codes: list[int] = []
    messages: list[str] = []
    rank, group = parallel.rank, parallel.data.group
    with activity.recorded() as record:
        settings = {"seconds": 2.0, "seconds_elsewhere": 30.0, "record": messages.append, "end": codes.append}
        watch = HangWatch(folder, parallel, record, **settings)  # type: ignore[arg-type]
        if not (silent and rank == sleeper):
            watch.__enter__()
        for step in (1, 2, 3, 4):
            record.begin_step(step)
            record.enter("forward and backward")
            if step == 3 and rank == sleeper:
                deadline = time.monotonic() + 60
                while not (list(folder.glob("hangs/*/verdict.txt")) or time.monotonic() > deadline):
                    time.sleep(0.05)
            all_reduce(torch.ones(1), group)
            record.enter("update")
            time.sleep(0.4)
        if watch._thread.ident is not None:
            watch._thread.join(20)
    barrier(dist.group.WORLD)
    return codes, messages


@pytest.mark.parametrize("silent", slow_but([False, True], False))
def test_a_rank_that_sleeps_is_named(world4: World, tmp_path: Path, silent: bool) -> None:
    start = time.time_ns()
    found = world4.run(_hang, tmp_path, 1, silent, ranks=3)
    assert [codes for codes, _ in found] == [[HUNG], [] if silent else [HUNG], [HUNG]]
    (folder,) = tmp_path.glob("hangs/*")
    verdict = (folder / "verdict.txt").read_text()
    first, second, third, *_ = verdict.splitlines()
    assert first.startswith("no progress for ")
    assert first.endswith(" s in step 3")
    how = "does not report" if silent else "hangs in step 3, forward and backward, outside of collectives: "
    assert second.startswith("rank 1 on ")
    assert how in second
    assert third == "ranks 0, 2: wait in all_reduce number 3, step 3, forward and backward"
    assert found[0][1] == [verdict]
    stacks = {path.name: path.read_text() for path in folder.glob("*.stacks.txt")}
    assert len(stacks) == (2 if silent else 3)
    assert "in all_reduce" in stacks["rank_00000.stacks.txt"]
    begun = {}
    for path in folder.glob("collectives_rank_*"):
        entries = pickle.loads(path.read_bytes())["entries"]
        own = [entry["profiling_name"] for entry in entries if entry["time_created_ns"] >= start]
        begun[int(path.name[-5:])] = own.count("gloo:all_reduce")
    assert begun == ({0: 3, 2: 3} if silent else {0: 3, 1: 2, 2: 3})


def _slow(folder: Path) -> list[int]:
    """Steps with progress, each shorter than the limit, and a save that is longer, in which no rank waits."""
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    codes: list[int] = []
    with activity.recorded() as record:
        settings = {"seconds": 1.0, "seconds_elsewhere": 1.0, "record": str, "end": codes.append}
        with HangWatch(folder, parallel, record, **settings):  # type: ignore[arg-type]
            for step in range(1, 6):
                record.begin_step(step)
                record.enter("update")
                time.sleep(0.2)
            record.enter("save")
            time.sleep(2.0)
    return codes


def test_progress_is_no_hang(world2: World, tmp_path: Path) -> None:
    assert world2.run(_slow, tmp_path) == [[], []]
    assert not list(tmp_path.glob("hangs/*"))


def _before_the_first_step(folder: Path, waits_for: str) -> list[int]:
    """Codes of the watch of a rank that waits for another, or for the data of the first step of a resumed run."""
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    codes = list[int]()
    config = cast(Config, SimpleNamespace(hang_seconds=0.5, timeout_seconds=2.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hangs, "HangWatch", partial(HangWatch, end=codes.append))
        with progress_watched(config, folder, parallel, str):
            observer = StepMarks()
            deadline = time.monotonic() + 20
            time.sleep(1.0)  # reads a model, in which no rank waits
            assert not codes
            if waits_for == "data":
                observer.before_step(8)
            while not codes and time.monotonic() < deadline and (waits_for == "data" or parallel.rank == 1):
                time.sleep(0.05)
            all_reduce(torch.ones(1), parallel.data.group)
            while not codes and time.monotonic() < deadline:
                time.sleep(0.05)
    return codes


@pytest.mark.parametrize("waits_for", ["data", "a rank"])
def test_hangs_before_the_first_step_end_the_job(world2: World, tmp_path: Path, waits_for: str) -> None:
    assert world2.run(_before_the_first_step, tmp_path, waits_for) == [[HUNG], [HUNG]]
    (verdict,) = tmp_path.glob("hangs/*/verdict.txt")
    assert (" data, " in verdict.read_text()) == (waits_for == "data")
