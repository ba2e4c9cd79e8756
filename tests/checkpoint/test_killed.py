"""A save that is killed at any moment: what is visible is complete, and the next job cleans up, saves and loads."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import (
    BackgroundSaver,
    Destination,
    FolderLock,
    SavedCheckpoint,
    clean_incomplete,
    complete_checkpoints,
    latest,
    load,
    save,
)
from tests.checkpoint.killing import die_before, slow_down, start

NAMES = [f"layers.{i}.weight" for i in range(20)]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell the step they were saved at."""
    return {name: torch.full((8, 8), float(step)) for name in NAMES}


def save_and_die(folder: str, step: int, change: int) -> None:
    """One save that removes the checkpoint before it."""
    die_before(change)
    save(folder, step, tensors(step), {}, keep_last=1)


def save_forever(folder: str, done: str, background: bool) -> None:
    """Save step after step, slowly, keeping two; the file `done` gets a line for each step reported as saved."""
    slow_down()

    def report(saved: SavedCheckpoint) -> None:
        with open(done, "a") as lines:
            lines.write(f"{int(saved.path.name.removeprefix('step_'))}\n")

    with FolderLock(folder) as lock:
        saver = BackgroundSaver(Destination(Path(folder), None, keep_last=2, lock=lock), torch.device("cpu"), report)
        for step in itertools.count(1):
            if background:
                saver.save(step, tensors(step), {})
                saver.wait_copied()
            else:
                report(SavedCheckpoint(save(folder, step, tensors(step), {}, keep_last=2, lock=lock), 0.0, 0.0))


def _check_all_load(folder: Path) -> int:
    """Load every visible checkpoint, compare it with what its step must hold, and return the newest step."""
    found = complete_checkpoints(folder)
    for step, path in found:
        state = {name: torch.zeros(8, 8) for name in NAMES}
        assert load(path, state)["step"] == step
        assert all(bool((tensor == step).all()) for tensor in state.values())
    assert found
    assert latest(folder) == found[-1][1]
    return found[-1][0]


def _check_the_next_job(folder: Path, step: int) -> None:
    """The job that comes after a killed one cleans up, saves and loads."""
    save(folder, step, tensors(step), {}, keep_last=1)
    assert _check_all_load(folder) == step
    assert [path.name for path in folder.iterdir()] == [f"step_{step:08d}"]


def test_killed_at_each_change_of_the_disk(tmp_path: Path) -> None:
    newest = []
    for change in range(100):
        folder = tmp_path / str(change)
        save(folder, 1, tensors(1), {})
        process = start(save_and_die, str(folder), 2, change)
        process.join(60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        newest.append(_check_all_load(folder))
        _check_the_next_job(folder, 3)
    assert process.exitcode == 0, "the save was killed at every change, so it never ended"
    assert newest == sorted(newest)
    assert newest.count(1) >= 5  # killed while writing
    assert newest.count(2) >= 5  # killed while removing the one before


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, kills: int, background: bool) -> None:
    for case in range(kills):
        folder, done = tmp_path / str(case), tmp_path / f"{case}.done"
        process = start(save_forever, str(folder), str(done), background)
        deadline = time.monotonic() + 60
        while latest(folder) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.4))
        process.kill()
        process.join()
        assert process.exitcode == -9
        newest = _check_all_load(folder)
        reported = [int(line) for line in done.read_text().split()] if done.exists() else []
        assert newest >= max(reported, default=0)  # what was reported as saved is there
        with FolderLock(folder):  # that of a dead process
            hidden = [path for path in folder.iterdir() if path.name.startswith(".step")]
            assert sorted(clean_incomplete(folder)) == sorted(hidden)
            assert len(hidden) <= 2
        _check_the_next_job(folder, newest + 1)
