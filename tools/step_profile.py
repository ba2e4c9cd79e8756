"""How much of a training step the GPU communicates, and how much of that nothing hides.

A step is profiled once more after it was timed, with device activity only: the profiler then costs the host little and
the kernels nothing. Kernels are intervals. Those of NCCL, and copies between devices, are communication, all others
computation, and *exposed* communication is what of the first lies outside the second: time in which the GPU does
nothing but wait for others. A kernel of NCCL that waits for a late rank counts in full, so uneven ranks and pipeline
bubbles show here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepProfile:
    """Shares of a step's time: computing, communicating, and communicating with nothing else going on."""

    computing: float
    communicating: float
    exposed: float


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
    return StepProfile(
        length(computing) / duration, length(communicating) / duration, outside(communicating, computing) / duration
    )


def profile_step(step: Callable[[], object]) -> StepProfile | None:
    """Profile one call of `step`, which ends with a host synchronisation; None where there is no CUDA device."""
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        step()
        duration = time.perf_counter() - start
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return shares(found, duration * 1e6)
