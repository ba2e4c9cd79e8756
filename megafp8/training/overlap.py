"""Choice of the overlap of tensor- and expert-parallel collectives with GEMMs (`parallel.overlap_tensor`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megafp8.config import Config, ParallelConfig
from megafp8.parallel.parallel_state import Group, ParallelState
from megafp8.parallel.tp_overlap import NO_COMM, TPOverlap, default_overlap, sum_partials

logger = logging.getLogger(__name__)


def on_one_host(group: Group, environment: Mapping[str, str]) -> bool:
    """Return whether all ranks of `group` run on one host. torchrun numbers the ranks of a host consecutively."""
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // local for rank in group.ranks}) == 1


def sum_partials_on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the implementation of `sum_partials` for `device`."""
    if device.type != "cuda":
        return sum_partials
    from megafp8.kernels import sum_shards  # needs Triton, which comes with torch's CUDA builds

    return sum_shards.sum_partials


def build_tp_overlap(config: ParallelConfig, parallel: ParallelState, environment: Mapping[str, str]) -> TPOverlap:
    """Return the `TPOverlap` of all tensor-parallel layers. Log if the requested one is unavailable. Collective."""
    if config.sequence_parallel:
        return _build(config.overlap_tensor, parallel.tensor, "a tensor-parallel group", parallel.device, environment)
    return default_overlap(parallel.tensor.group, sequence_parallel=False)


def build_expert_overlap(config: Config, parallel: ParallelState, environment: Mapping[str, str]) -> TPOverlap:
    """Return the `TPOverlap` of the token all-gather over expert-parallel ranks. Collective.

    Log if the requested overlap is unavailable.
    """
    if not config.spec.has_experts or not config.gathers_tokens:
        return NO_COMM
    mode = config.parallel.overlap_tensor
    return _build(mode, parallel.expert, "an expert-parallel group", parallel.device, environment)


def _build(mode: str, group: Group, name: str, device: torch.device, environment: Mapping[str, str]) -> TPOverlap:
    default = default_overlap(group.group, sequence_parallel=True)
    if group.size == 1:
        return default
    if mode == "none" or (mode == "auto" and device.type != "cuda"):
        return default
    if not on_one_host(group, environment):
        logger.info(f"parallel.overlap_tensor = {mode}: {name} spans hosts; continuing with none")
        return default
    from megafp8.parallel.tp_symmetric import SymmetricMemory  # imports parts of torch that cost start-up time

    try:
        return SymmetricMemory(group.group, device, sum_partials_on(device))
    except RuntimeError as error:
        logger.info(f"parallel.overlap_tensor = {mode}: {error}; continuing with none")
        return default
