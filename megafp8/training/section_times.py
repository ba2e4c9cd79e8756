"""Time by section of the training loop: waiting for data, passes, update, and what is between steps.

A section begins where `parallel.activity` is told so. On a GPU the host only queues work, so its clock says little:
there a CUDA event marks each beginning on the device's main stream, and sections are measured on the device's timeline.
What the device waits for the host counts in the section in which it waits, so all sections add up to the wall time. The
events of a section are read when they have passed, a step later at most: nothing waits for them. A mark costs some
microseconds of the host.
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
    """Times the sections of this process's recorded activity, by the clock of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: deque[tuple[str, Any]] = deque()

    def __enter__(self) -> SectionTimer:
        if activity.record is not None:
            activity.record.listeners.append(self.enter)
        return self

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        activity.enter("after the step")  # ends the section before, which counts then
        return {"section_seconds": self.take()}

    def enter(self, section: str) -> None:
        """`section` begins, and the one before ends."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((section, mark))

    def take(self) -> dict[str, float]:
        """Seconds by section, of those that have ended since the last call."""
        seconds_by_section: dict[str, float] = {}
        while len(self._marks) > 1 and (not self._cuda or self._marks[1][1].query()):
            section, begin = self._marks.popleft()
            end = self._marks[0][1]
            seconds = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds_by_section[section] = seconds_by_section.get(section, 0.0) + seconds
        return seconds_by_section
