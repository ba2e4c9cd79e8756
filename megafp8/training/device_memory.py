"""The memory of the device that a rank will run on, against what its config needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megafp8.config import Config
from megafp8.planner.fits import check_memory
from megafp8.planner.memory import RankMemory, pipeline_memory
from megafp8.training.fp8_config import build_fp8
from megafp8.training.pipeline import PipelinePlan

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_under(plan: PipelinePlan, world_size: int) -> Callable[[Config], Sequence[RankMemory]]:
    """The memory of each pipeline rank, as a function of configs that all have the pipeline `plan`."""
    return lambda config: pipeline_memory(config, build_fp8(config, None), world_size, plan.placement, plan.train)


def check_device_memory(config: Config, plan: PipelinePlan, world_size: int, device: str, source: str) -> None:
    """Raise ConfigError where a rank needs more than the device, `cuda` or `cpu`, has in all.

    Needs no process group. What other processes hold now is not looked at: they may be about to end. On CPU the ranks
    of a host share its memory, and as they need not have equal parts, each may have twice its own.
    """
    if device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        limit, who_has = torch.cuda.get_device_properties(index).total_memory, "this GPU has"
    else:
        host, ranks = _host_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        limit, who_has = min(host, 2 * host // ranks), "this host has for it"
    check_memory(config, memory_under(plan, world_size), limit, who_has, source)


def _host_memory() -> int:
    """Bytes of this host, or of the container this runs in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            found.append(int(text))
    return min(found)
