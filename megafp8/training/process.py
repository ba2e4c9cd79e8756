"""Control of a rank's process while it trains: stop signals and Python's garbage collection."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce


class StopRequest:
    """SIGTERM or Ctrl-C as a request to stop, on which all ranks agree after the same step.

    Signals reach ranks at different times, or only some of them. A signal therefore only sets a flag, and after each
    step the ranks take the maximum of their flags, over gloo on a host tensor: some tens of microseconds, and the host
    does not wait for the GPU. A second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def install(self) -> None:
        """Catch SIGTERM and SIGINT in this process from now on."""
        signal.signal(signal.SIGTERM, self._catch)
        signal.signal(signal.SIGINT, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self.signal = number

    def agreed(self, world: ProcessGroup) -> bool:
        """True on all ranks once any rank has caught a signal. Collective: call it on all ranks after each step."""
        return bool(all_reduce(torch.tensor([float(self.signal is not None)]), world, "max").item())


@contextmanager
def garbage_collected_after_steps(interval: int) -> Iterator[Callable[[int], None]]:
    """Context in which Python's garbage is collected only after every `interval`-th step; 0 leaves it to Python.

    Yields the function to call after each step, with its number. By default the collector runs once a rank has
    allocated enough objects. It then visits all objects, several hundred thousand once torch is imported, which takes
    0.1 s or more; each rank does so at another time, and all others wait for it in their next collective. Here all
    ranks collect after the same steps, and objects that exist on entry are never visited (`gc.freeze`).

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
