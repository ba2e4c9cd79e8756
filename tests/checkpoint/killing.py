"""Runs functions in processes that are killed right before a chosen change of the disk, or made slow."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

_context = mp.get_context("forkserver")  # imports torch once, then forks
_context.set_forkserver_preload(["tests.checkpoint.test_killed", "tests.conversion.test_killed"])


def start(function: Callable[..., None], *args: object) -> Any:
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def _before_each_disk_change(action: Callable[[], None]) -> None:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            action()
            return function(*args, **options)

        return call

    torch.set_num_threads(1)
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "truncate", "pwrite"):
        setattr(os, name, wrap(getattr(os, name)))


def die_before(change: int) -> None:
    """Let this process be killed right before its n-th change of the disk."""
    left = itertools.count(change, -1)
    _before_each_disk_change(lambda: os.kill(os.getpid(), signal.SIGKILL) if next(left) == 0 else None)


def slow_down() -> None:
    """Delay each change of the disk by up to 10 ms."""
    _before_each_disk_change(lambda: time.sleep(random.uniform(0, 0.01)))
