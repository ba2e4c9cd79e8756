"""Choice of the overlap of tensor-parallel communication with GEMMs (`parallel.overlap_tensor`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megafp8.config import ParallelConfig
from megafp8.distributed.tp_overlap import P2PRing, TPOverlap, default_overlap, sum_partials
from megafp8.parallel_state import Group, ParallelState

logger = logging.getLogger(__name__)


def on_one_host(group: Group, environment: Mapping[str, str]) -> bool:
    """Whether torchrun started all ranks of `group` on one host, whose ranks it numbers consecutively."""
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // local for rank in group.ranks}) == 1


def sum_partials_on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """The implementation of `sum_partials` for `device`."""
    if device.type != "cuda":
        return sum_partials
    from megafp8.kernels import sum_shards  # needs Triton, which comes with torch's CUDA builds

    return sum_shards.sum_partials


def build_tp_overlap(config: ParallelConfig, parallel: ParallelState, environment: Mapping[str, str]) -> TPOverlap:
    """The `TPOverlap` of all layers. Collective over the tensor group; logs when the requested one is unavailable."""
    mode, group = config.overlap_tensor, parallel.tensor.group
    default = default_overlap(group, sequence_parallel=config.sequence_parallel)
    if not config.sequence_parallel or group.size() == 1:
        return default
    if mode == "chunked":
        return P2PRing(group, sum_partials=sum_partials_on(parallel.device))
    if mode == "none" or (mode == "auto" and parallel.device.type != "cuda"):
        return default
    if not on_one_host(parallel.tensor, environment):
        logger.info(f"parallel.overlap_tensor = {mode}: a tensor-parallel group spans hosts; continuing with none")
        return default
    from megafp8.distributed.tp_symmetric import SymmetricMemory  # imports parts of torch that cost start-up time

    try:
        return SymmetricMemory(group, parallel.device, sum_partials_on(parallel.device))
    except RuntimeError as error:
        logger.info(f"parallel.overlap_tensor = {mode}: {error}; continuing with none")
        return default
