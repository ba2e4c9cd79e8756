"""Time by section of the training loop: waiting for data, passes, update, and the time between steps.

A section begins when the loop calls `parallel.activity.enter`. On a GPU the host only queues work, so the host's clock
is not meaningful. Instead a CUDA event on the device's main stream marks each beginning, and sections are measured on
the device's timeline. If the device waits for the host, the wait counts in the section in which it happens, so all
sections add up to the wall time. Nothing waits for the events of a section: they are read after they have passed, at
most one step later. A mark costs the host some microseconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from megafp8.parallel import activity
from megafp8.training.observer import Observer


class SectionTimer(Observer):
    """Observer that measures the sections of this process's recorded activity with the clock of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: deque[tuple[str, Any]] = deque()

    def __enter__(self) -> SectionTimer:
        if activity.record is not None:
            activity.record.listeners.append(self.enter)
        return self

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Return the seconds of all sections that have ended since the previous step."""
        activity.enter("after the step")  # ends the previous section, so that it counts
        return {"section_seconds": self.take()}

    def enter(self, section: str) -> None:
        """Mark the beginning of `section`, which ends the previous section."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((section, mark))

    def take(self) -> dict[str, float]:
        """Return the seconds by section for the sections that have ended since the last call."""
        seconds_by_section: dict[str, float] = {}
        while len(self._marks) > 1 and (not self._cuda or self._marks[1][1].query()):
            section, begin = self._marks.popleft()
            end = self._marks[0][1]
            seconds = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds_by_section[section] = seconds_by_section.get(section, 0.0) + seconds
        return seconds_by_section
