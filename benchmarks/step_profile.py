"""How much of a training step the GPU communicates, and how much of that nothing hides.

A step is profiled once more after it was timed, with device activity only: the profiler then costs the host little and
the kernels nothing. Kernels are intervals. Those of NCCL, and copies between devices, are communication, all others
computation, and *exposed* communication is what of the first lies outside the second: time in which the GPU does
nothing but wait for others. A kernel of NCCL that waits for a late rank counts in full, so uneven ranks and pipeline
bubbles show here too.

Kernels by name, with their total times, say where the rest of a step goes. Times of kernels that run side by side count
in full for each.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepProfile:
    """Shares of a step's time: computing, communicating, communicating with nothing else going on, nothing."""

    computing: float
    communicating: float
    exposed: float
    idle: float


class Kernel(NamedTuple):
    """All runs of a kernel in a step."""

    name: str
    count: int
    milliseconds: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Time covered."""
    return sum(end - start for start, end in union(intervals))


def outside(intervals: list[Interval], others: list[Interval]) -> float:
    """Time covered by `intervals` and not by `others`."""
    return length([*intervals, *others]) - length(others)


def is_communication(kernel: str) -> bool:
    """Whether a device activity of this name moves data between GPUs."""
    name = kernel.lower()
    return "nccl" in name or "ptop" in name or "symm_mem" in name


def shares(kernels: Iterable[tuple[str, float, float]], duration: float) -> StepProfile:
    """Of (name, start, end) in a step of `duration`, in one unit."""
    communicating: list[Interval] = []
    computing: list[Interval] = []
    for name, start, end in kernels:
        (communicating if is_communication(name) else computing).append((start, end))
    exposed = outside(communicating, computing)
    idle = duration - length(computing) - exposed
    return StepProfile(*(x / duration for x in (length(computing), length(communicating), exposed, idle)))


def by_name(kernels: Iterable[tuple[str, float, float]]) -> list[Kernel]:
    """Of (name, start, end) in µs; those that take longest first."""
    found: dict[str, list[float]] = {}
    for name, start, end in kernels:
        found.setdefault(_short(name), []).append(end - start)
    totals = [Kernel(name, len(times), sum(times) / 1e3) for name, times in found.items()]
    return sorted(totals, key=lambda kernel: -kernel.milliseconds)


def _short(name: str) -> str:
    """Without a C++ kernel's arguments, and no longer than a line."""
    name = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", "").removeprefix("void "))
    return name if len(name) <= 100 else f"{name[:97]}..."


def profile_step(step: Callable[[], object]) -> tuple[StepProfile, list[Kernel]] | None:
    """Profile one call of `step`, from an idle device to an idle device; None where there is no CUDA device."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        duration = time.perf_counter() - start
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return shares(found, duration * 1e6), by_name(found)
