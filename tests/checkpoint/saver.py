"""A process that saves until it is killed; `test_killed` starts it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import BackgroundSaver, Destination, FolderLock, Saved, save

NAMES = [f"layers.{i}.weight" for i in range(20)]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell the step they were saved at."""
    return {name: torch.full((8, 8), float(step)) for name in NAMES}


def _on_each_change_of_the_disk(before: Callable[[], None]) -> None:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before()
            return function(*args, **options)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, wrap(getattr(os, name)))


def save_and_die_at(folder: str, step: int, change: int) -> None:
    """One save that removes the checkpoint before it, killed right before its n-th change of the disk."""
    torch.set_num_threads(1)
    left = itertools.count(change, -1)

    def die() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _on_each_change_of_the_disk(die)
    save(folder, step, tensors(step), {}, keep_last=1)


def save_forever(folder: str, done: str, background: bool) -> None:
    """Save step after step, slowly, keeping two; the file `done` gets a line for each step reported as saved."""
    torch.set_num_threads(1)
    _on_each_change_of_the_disk(lambda: time.sleep(random.uniform(0, 0.01)))

    def report(saved: Saved) -> None:
        with open(done, "a") as lines:
            lines.write(f"{int(saved.path.name.removeprefix('step_'))}\n")

    with FolderLock(folder) as lock:
        saver = BackgroundSaver(Destination(Path(folder), None, keep_last=2, lock=lock), torch.device("cpu"), report)
        for step in itertools.count(1):
            if background:
                saver.save(step, tensors(step), {})
                saver.wait_copied()
            else:
                report(Saved(save(folder, step, tensors(step), {}, keep_last=2, lock=lock), 0.0, 0.0))
