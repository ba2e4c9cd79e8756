"""How the tensor-parallel layers of a run exchange tokens: what `parallel.overlap_tensor` says, or the next best."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megafp8.config import ParallelConfig
from megafp8.distributed.tp_overlap import P2PRing, TPOverlap, default_overlap
from megafp8.parallel_state import Group, ParallelState


def on_one_host(group: Group, environment: Mapping[str, str]) -> bool:
    """Whether torchrun started all ranks of `group` on one host; it numbers a host's ranks one after the other."""
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // local for rank in group.ranks}) == 1


def token_exchange(
    config: ParallelConfig, parallel: ParallelState, environment: Mapping[str, str], say: Callable[[str], None]
) -> TPOverlap:
    """The one that all layers share. Collective over the tensor group; `say` hears it where it is not the one that is
    fastest, or was asked for."""
    mode, group = config.overlap_tensor, parallel.tensor.group
    at_once = default_overlap(group, sequence_parallel=config.sequence_parallel)
    if not config.sequence_parallel or group.size() == 1:
        return at_once
    if mode == "chunked":
        return P2PRing(group)
    if mode == "none" or (mode == "auto" and parallel.device.type != "cuda"):
        return at_once
    if not on_one_host(parallel.tensor, environment):
        say(f"parallel.overlap_tensor = {mode}: a tensor-parallel group spans hosts; going on with none")
        return at_once
    from megafp8.distributed.tp_symmetric import SymmetricMemory  # which needs parts of torch that cost start-up time

    try:
        return SymmetricMemory(group, parallel.device)
    except RuntimeError as error:
        say(f"parallel.overlap_tensor = {mode}: {error}; going on with none")
        return at_once
