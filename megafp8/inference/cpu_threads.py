"""Binding of a process and its threads to CPU cores.

Kernels divide their work equally over the threads, so the slowest thread determines the time. Two threads on the
logical CPUs of one core, or a thread that another process of the job interrupts, delay all threads. Each process
therefore runs one thread on each of its physical cores. The processes of a host have different cores, and the cores of
a process are next to each other. With one process per NUMA node, each process has the cores of one node, and its
weights are allocated in that node's memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch

_SYSTEM = Path("/sys/devices/system")


def physical_cores(cpus: Collection[int], system: Path = _SYSTEM) -> list[int]:
    """Return one logical CPU of each physical core among `cpus`, sorted by NUMA node.

    `system` is the folder in which Linux describes its CPUs.
    """
    node_of = {
        cpu: int(node.name.removeprefix("node"))
        for node in system.glob("node/node[0-9]*")
        for cpu in _cpus((node / "cpulist").read_text())
    }
    cores = dict[int, int]()
    for cpu in sorted(cpus):
        siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        core = min(_cpus(siblings.read_text())) if siblings.is_file() else cpu
        cores.setdefault(core, cpu)
    return sorted(cores.values(), key=lambda cpu: (node_of.get(cpu, 0), cpu))


def _cpus(text: str) -> list[int]:
    """Return the CPUs in a list such as 0-3,8."""
    cpus = list[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1) if part else []
    return cpus


def share(cores: list[int], rank: int, ranks: int) -> list[int]:
    """Return the cores of one of `ranks` processes on a host, or all cores if there are fewer cores than processes."""
    if len(cores) < ranks:
        return cores
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]


def bind_threads(threads: int | None = None) -> None:
    """Bind this process to cores that no other process of the job on this host uses.

    The processes of a host are those that torchrun started, or only this one. `threads` is the number of threads; None
    means one on each core. Call this function before the first tensor operation, because existing threads do not move.
    Raises ValueError for more threads than cores.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        if threads is not None:
            torch.set_num_threads(threads)
        return
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    own_cores = share(physical_cores(os.sched_getaffinity(0)), rank, ranks)
    if threads is not None and not 1 <= threads <= len(own_cores):
        raise ValueError(f"threads = {threads}: must be between 1 and {len(own_cores)}, the cores of this process")
    os.sched_setaffinity(0, own_cores)
    torch.set_num_threads(threads or len(own_cores))
