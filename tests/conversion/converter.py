"""A process that converts and is killed; `test_killed` starts it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from megafp8.conversion.target import Journal
from tools import convert_checkpoint


def _before_each_change_of_the_disk(action: Callable[[], None]) -> None:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            action()
            return function(*args, **options)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "truncate", "pwrite"):
        setattr(os, name, wrap(getattr(os, name)))


def _begin(action: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    Journal.__init__.__kwdefaults__["seconds"] = 0.02
    _before_each_change_of_the_disk(action)


def die_at(command: list[str], change: int) -> None:
    """Convert, and be killed right before the n-th change of the disk."""
    left = itertools.count(change, -1)

    def die() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _begin(die)
    assert convert_checkpoint.main(command) == 0


def slowly(command: list[str]) -> None:
    """Convert in about a second."""
    _begin(lambda: time.sleep(random.uniform(0, 0.01)))
    assert convert_checkpoint.main(command) == 0
