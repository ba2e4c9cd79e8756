"""Stopping cleanly: SIGTERM (a scheduler) and Ctrl-C become a request that all ranks honour after the same step.

Signals reach ranks at different moments, or only some of them. So a signal only sets a flag, and once a step the ranks
agree on the maximum of their flags, over gloo on a host tensor, which costs some tens of microseconds and never makes
the host wait for the GPU. A second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import signal
from types import FrameType

import torch
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce


class StopRequest:
    """Asked for by a signal, agreed upon by all ranks."""

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
        """True on all ranks once any rank was asked to stop. A collective: call it on all ranks after each step."""
        return bool(all_reduce(torch.tensor([float(self.signal is not None)]), world, "max").item())
