"""parallel.fsdp: the model's weights sharded by `fully_shard`, gathered block by block in bf16 or in FP8.

With `fp8.param_gather` each rank quantizes its rows after the step and FP8 data is gathered: half the bytes, the same
bits, nothing to quantize in between. Without it, an FP8 layer quantizes what was gathered, rowwise in forward and
columnwise in backward. Neither keeps copies: these would be as large as what sharding saves.

The embedding is needed in forward only, unless it ends with a norm, and the output layer from its forward right to its
backward. A weight that several layers of a stage share stays gathered in between.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megafp8.data_parallel.fp8_weight_gather import (
    Collective,
    Fp8Weight,
    Fp8WeightGather,
    SymmetricMemory,
    Transport,
)
from megafp8.data_parallel.fp8_weight_shards import WeightShard
from megafp8.data_parallel.fsdp import FullySharded, ShardGroups, Unit
from megafp8.distributed.sharding import spec_of
from megafp8.fp8.formats import Format
from megafp8.fp8.linear_state import LinearState
from megafp8.models.gpt import GPTStage
from megafp8.models.moe import Experts
from megafp8.parallel_state import ParallelState
from megafp8.tensor_parallel.random import initialize
from megafp8.training.overlap import on_one_host

logger = logging.getLogger(__name__)


def shard(
    stages: Sequence[GPTStage], parallel: ParallelState, *, dtype: torch.dtype, reduce_dtype: torch.dtype, seed: int
) -> FullySharded:
    """Shard the weights of `stages`, with blocks on the meta device, and give them initial values."""
    units = [_units(stage, parallel) for stage in stages]
    sharded = FullySharded(
        units,
        replicate_group=parallel.fsdp_replicate.group,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        device=parallel.device,
    )
    for rows in sharded.row_shards.values():
        rounded = torch.empty(rows.values.shape, dtype=dtype, device=parallel.device)
        initialize(rows.param, rounded, seed)
        with torch.no_grad():
            rows.values.copy_(rounded)
    for stage in stages:
        if isinstance(stage.embedding, FSDPModule) and stage.embedding.norm is None:
            stage.embedding.set_unshard_in_backward(False)
        if isinstance(stage.head, FSDPModule):
            stage.head.set_reshard_after_forward(False)
    return sharded


def _units(stage: GPTStage, parallel: ParallelState) -> list[Unit]:
    """Embedding, blocks and output layer but for those with a shared weight, and the stage; experts are inner units if
    they are on other ranks."""
    groups = ShardGroups(parallel.fsdp_shard.group, parallel.fsdp_shard_backward.group)
    of_experts = ShardGroups(parallel.expert_shard.group, parallel.expert_shard_backward.group)

    def unit(module: nn.Module) -> Unit:
        experts = [m for m in module.modules() if isinstance(m, Experts)] if of_experts != groups else []
        return Unit(module, groups, [Unit(m, of_experts) for m in experts])

    modules = [module for module in stage.units if not _has(module, stage.shared_weight)]
    return [*map(unit, modules), Unit(stage, groups)]


def _has(module: nn.Module, weight: nn.Parameter | None) -> bool:
    return any(param is weight for param in module.parameters())


class Fp8Gather(NamedTuple):
    """Weights gathered in FP8: this rank's shards, to be quantized between two `synchronize`s of `gather`."""

    shards: list[WeightShard]
    gather: Fp8WeightGather


def gather_in_fp8(
    weights: Mapping[nn.Parameter, tuple[LinearState, Format]],
    sharded: FullySharded,
    parallel: ParallelState,
    environment: Mapping[str, str],
) -> Fp8Gather:
    """Gather `weights`, given with their layers and formats, in FP8 from here on. Collective."""
    units = [[param for param in unit if param in weights] for unit in sharded.units]
    params = [param for unit in units for param in unit]
    blocks = [
        [
            Fp8Weight(sharded.row_shards[param], weights[param][1].dtype, weights[param][0].set_gathered_data)
            for param in unit
        ]
        for unit in units
    ]
    transport = _transport([weight.nbytes for block in blocks for weight in block], parallel, environment)
    gather = Fp8WeightGather(blocks, transport, parallel.fsdp_shard.size, parallel.device)
    shards = []
    for param, own in zip(params, gather.own, strict=True):
        rows, (state, fmt) = sharded.row_shards[param], weights[param]
        data_mk = own.view(fmt.dtype).view(-1, rows.global_shape[1])
        shards.append(WeightShard(state, data_mk, 0, rows.values.view(-1), rows.param.dtype))
    return Fp8Gather(shards, gather)


def _transport(sizes: Sequence[int], parallel: ParallelState, environment: Mapping[str, str]) -> Transport:
    """Copies between the GPUs of one host where these can map each other's memory; else collectives."""
    group, device = parallel.fsdp_shard.group, parallel.device
    if sizes and device.type == "cuda" and group.size() > 1 and on_one_host(parallel.fsdp_shard, environment):
        try:
            return SymmetricMemory(sizes, group, device)
        except RuntimeError as error:
            logger.info(f"fp8.param_gather: {error}; FP8 weights are gathered by collectives")
    return Collective(sizes, group, device)


def report(
    sharded: FullySharded,
    in_fp8: Collection[nn.Parameter],
    parallel: ParallelState,
    environment: Mapping[str, str],
) -> str:
    """Memory of the weights on a rank, traffic of gathering all, and where the shards are; for the log.

    `in_fp8`: those of `sharded.params` that are gathered in FP8.
    """
    gib, held, values, gathered = 2**30, 0, 0.0, 0.0
    ranks, replicas = parallel.fsdp_shard.size, parallel.fsdp_replicate.size
    for rows in sharded.row_shards.values():
        fp8, size = rows.param in in_fp8, rows.param.element_size()
        received = rows.global_shape.numel() * (rows.ranks - 1) / rows.ranks
        held += rows.values.nbytes + rows.padded_rows * rows.global_shape[1:].numel() * fp8
        values += received * size
        gathered += received * (1 if fp8 else size)
    instead = f", {len(in_fp8)} of them in FP8, instead of {values / gib:.3f} without" if in_fp8 else ""
    lines = [
        f"parallel.fsdp: this rank holds {held / gib:.3f} GiB of {len(sharded.row_shards)} weights; all of them "
        f"gathered are {gathered / gib:.3f} GiB received{instead}"
    ]
    if any(spec_of(rows.param).expert for rows in sharded.row_shards.values()):
        as_values = ", and gathered in high precision" if in_fp8 else ""
        shards = parallel.expert_shard.size
        lines.append(f"parallel.fsdp: weights of experts have {shards} shard{'s' if shards > 1 else ''}{as_values}")
    if replicas > 1:
        hosts = "one host" if on_one_host(parallel.fsdp_shard, environment) else "several hosts"
        lines.append(f"parallel.fsdp_replicas: {replicas} replicas of the shards, each on {ranks} ranks of {hosts}")
    return "\n".join(lines)
