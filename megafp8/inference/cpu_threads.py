"""Which cores the threads of a process run on.

Kernels divide their work equally over the threads, so the slowest one counts: two threads on the logical CPUs of one
core, or a thread that another process of the job interrupts, delay all. So a process runs one thread on each of its
physical cores, and the processes of a host have different cores, next to each other: as many processes as there are
NUMA nodes have a node each, whose memory their weights are allocated in.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch

_SYSTEM = Path("/sys/devices/system")


def physical_cores(cpus: Collection[int], system: Path = _SYSTEM) -> list[int]:
    """One logical CPU of each physical core among `cpus`, those of a NUMA node together. Linux's, by its `system`."""
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
    """The CPUs that a list such as 0-3,8 names."""
    cpus = list[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1) if part else []
    return cpus


def share(cores: list[int], rank: int, ranks: int) -> list[int]:
    """The cores of a process of `ranks` on a host; all, if there are fewer than processes."""
    if len(cores) < ranks:
        return cores
    return cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]


def bind_threads(threads: int | None = None) -> None:
    """Run this process, one of those that torchrun started on the host, or the only one, on cores of its own.

    `threads`: None: one on each of them. Call it before the first operation on tensors: threads that exist stay where
    they are. Raises ValueError for more threads than cores.
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
