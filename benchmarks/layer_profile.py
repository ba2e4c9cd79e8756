"""Where the time of an iteration goes, kernel by kernel, and how much of it the GPU is busy.

The busy share is kernel time over wall time. The two come from different runs of the same iteration: the profiler slows
the host down, though not the kernels, so the wall time is that of runs without it. What is missing to 100% is waiting
for the host (or, where the queue never runs dry, the gaps of about a microsecond between kernels).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel in an iteration (of one operation on a CPU)."""

    name: str
    count: int
    microseconds: float


def kernel_times(iteration: Callable[[], object], on_cuda: bool) -> list[KernelTime]:
    """What one `iteration` spends its time on, longest first. Replayed kernels are seen like any others."""
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        iteration()
        if on_cuda:
            torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or []:
        if on_cuda and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spent[event.name].append(event.time_range.elapsed_us())
        elif not on_cuda and event.device_type == DeviceType.CPU:
            spent[event.name].append(event.self_cpu_time_total)
    kernels = [KernelTime(name, len(times), sum(times)) for name, times in spent.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def print_kernels(kernels: list[KernelTime], variant: str, iteration_ms: float, on_cuda: bool) -> None:
    """`iteration_ms`: wall time of an iteration without the profiler."""
    total = sum(kernel.microseconds for kernel in kernels)
    count = sum(kernel.count for kernel in kernels)
    where = "kernels" if on_cuda else "operations"
    print(f"\n{variant}: one iteration of {iteration_ms:.3f} ms, {total / 1e3:.3f} ms in {count} {where}")
    if on_cuda:
        print(f"GPU busy {total / 1e3 / iteration_ms:.1%}")
    print(f"{'µs':>12}{'share':>8}{'count':>7}  name")
    for kernel in kernels:
        share = kernel.microseconds / total if total else 0.0
        print(f"{kernel.microseconds:>12.1f}{share:>8.1%}{kernel.count:>7}  {kernel.name[:100]}")
