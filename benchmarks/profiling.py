"""Profiles of GPU kernels: total time by name, and the exposed communication of a step.

Kernels are intervals. NCCL kernels and copies between devices are communication; all others are computation. *Exposed*
communication is communication that no computation overlaps, so that the GPU only waits for other ranks. An NCCL kernel
that waits for a late rank counts in full, so uneven ranks and pipeline bubbles are included.

Only device activity is recorded, so the profiler costs the host little and the kernels nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
Event = tuple[str, float, float]  # name, start, end


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel (or of one operation on a CPU). Kernels that run side by side count in full for each."""

    name: str
    count: int
    microseconds: float


@dataclass(frozen=True)
class StepProfile:
    """Fractions of a step's time: computation, communication, exposed communication, and idle time."""

    computing: float
    communicating: float
    exposed: float
    idle: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap, and return disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that intervals cover."""
    return sum(end - start for start, end in union(intervals))


def outside(intervals: list[Interval], others: list[Interval]) -> float:
    """Return the time covered by `intervals` and not by `others`."""
    return length([*intervals, *others]) - length(others)


def is_communication(kernel: str) -> bool:
    """Return whether a device activity of this name moves data between GPUs."""
    name = kernel.lower()
    return "nccl" in name or "ptop" in name or "symmetric_memory" in name


def step_profile(events: Iterable[Event], duration: float) -> StepProfile:
    """Return the fractions of a step of `duration`, in the unit of `events`."""
    communicating: list[Interval] = []
    computing: list[Interval] = []
    for name, start, end in events:
        (communicating if is_communication(name) else computing).append((start, end))
    exposed = outside(communicating, computing)
    idle = duration - length(computing) - exposed
    return StepProfile(*(x / duration for x in (length(computing), length(communicating), exposed, idle)))


def by_name(events: Iterable[Event]) -> list[Kernel]:
    """Return the totals of `events` in µs, longest first."""
    found: dict[str, list[float]] = {}
    for name, start, end in events:
        found.setdefault(_short(name), []).append(end - start)
    kernels = [Kernel(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def _short(name: str) -> str:
    """Return the name without a C++ kernel's arguments, and with at most 100 characters."""
    name = re.sub(r"\(.*", "", name.replace("(anonymous namespace)::", "").removeprefix("void "))
    return name if len(name) <= 100 else f"{name[:97]}..."


def record(run: Callable[[], object], on_cuda: bool) -> tuple[list[Event], float]:
    """Profile one call of `run`, from an idle device to an idle device; return its kernels and its duration in µs.

    Kernels replayed by CUDA graphs are included. On a CPU the events are torch's operations. Each starts at 0 and ends
    after the time that the operation took, excluding operations that it called.
    """
    if on_cuda:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        run()
        if on_cuda:
            torch.cuda.synchronize()
        duration = (time.perf_counter() - start) * 1e6
    events = profiler.events() or []
    if not on_cuda:
        return [(e.name, 0.0, e.self_cpu_time_total) for e in events if e.device_type == DeviceType.CPU], duration
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return [(e.name, e.time_range.start, e.time_range.end) for e in kernels], duration
