"""Stop signals and Python's garbage collection in a rank's training process."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import active_children
from types import FrameType
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_reduce

Item = TypeVar("Item")

WAIT_SECONDS = 3.0
"""Longest wait for data after the process has been asked to stop."""


class StoppedWaiting(Exception):
    """The process was asked to stop while it waited for data, and the data did not arrive in time."""


class StopRequest:
    """Request to stop by SIGTERM or Ctrl-C, on which all ranks agree after the same step.

    Signals reach ranks at different times, or reach only some ranks. A signal therefore only sets a flag. After each
    step the ranks take the maximum of their flags, with gloo on a host tensor. This takes some tens of microseconds,
    and the host does not wait for the GPU. A second Ctrl-C ends the process at once.

    A step may never end because its data do not arrive. A signal therefore also limits the wait for data
    (`answering_stop`). When the limit is reached, this rank fails. It cannot save a checkpoint, because other ranks may
    have received their data and be inside the step.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._waits = False

    def install(self) -> None:
        """Catch SIGTERM and SIGINT in this process from now on."""
        global _installed
        _installed = self
        signal.signal(signal.SIGTERM, self._catch)
        signal.signal(signal.SIGINT, self._catch)
        signal.signal(signal.SIGALRM, self._end_wait)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.signal = number
        if self._waits:
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)

    def _end_wait(self, number: int, frame: FrameType | None) -> None:
        if self._waits and self.signal is not None:
            name = signal.Signals(self.signal).name
            _end_loaders()
            raise StoppedWaiting(
                f"stopped by {name} while it waited for data, which did not arrive within {WAIT_SECONDS:g} s; the run "
                "continues from its newest checkpoint when it is started again"
            )

    @contextmanager
    def limited_wait(self) -> Iterator[None]:
        """Limit a wait for data: raise StoppedWaiting `WAIT_SECONDS` after the process has been asked to stop."""
        self._waits = True
        if self.signal is not None:
            signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
        try:
            yield
        finally:
            self._waits = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def agreed(self, world: ProcessGroup) -> bool:
        """Return whether any rank has caught a signal. Collective: call it on all ranks after each step."""
        return bool(all_reduce(torch.tensor([float(self.signal is not None)]), world, "max").item())


_installed: StopRequest | None = None
"""Stop request that handles the signals of this process. A process has only one handler per signal."""


def _end_loaders() -> None:
    """Kill the loader processes, the only children of a training process.

    The loaders may hang as well, and torch would wait 5 s for each of them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise another error
    for child in active_children():
        child.kill()


def answering_stop(stream: Iterator[Item]) -> Iterator[Item]:
    """Yield the items of `stream`, and limit the wait for an item once the process has been asked to stop."""
    while True:
        with nullcontext() if _installed is None else _installed.limited_wait():
            try:
                item = next(stream)
            except StopIteration:
                return
        yield item


@contextmanager
def garbage_collected_after_steps(interval: int) -> Iterator[Callable[[int], None]]:
    """Collect Python's garbage only after every `interval`-th step; 0 leaves it to Python.

    The context manager yields a function. Call it after each step with the step's number.

    By default Python's collector runs when a rank has allocated enough objects. It then visits all objects, several
    hundred thousand once torch is imported, which takes 0.1 s or more. Each rank does this at a different time, and all
    other ranks wait for it in their next collective. Here all ranks collect after the same steps, and objects that
    exist on entry are never visited (`gc.freeze`).

    Cost: objects in reference cycles live for up to `interval` steps. Device tensors of a step are not in cycles.
    """

    def after_step(step: int) -> None:
        if interval and step % interval == 0:
            gc.collect()

    if not interval or not gc.isenabled():
        yield after_step
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield after_step
    finally:
        gc.enable()
        gc.unfreeze()
