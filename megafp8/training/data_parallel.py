"""Data-parallel strategy of the config section `parallel`, built around the stages of one rank.

Under FSDP the embedding is needed only in forward, unless it ends with a norm. The output layer is needed from its
forward pass until its backward pass, which follows directly. A weight that several layers of a stage share stays
gathered between their uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from megafp8.config import Config
from megafp8.layers.linear_weights import linear_weights
from megafp8.linear.deferred_wgrad import WgradStore
from megafp8.models.gpt import GPTStage
from megafp8.numerics.dtypes import DTYPES, state_dtype, sum_dtype
from megafp8.parallel.data.fp8_weight_shards import gathered_format
from megafp8.parallel.data.fsdp import ShardedStages, ShardGroups, Unit
from megafp8.parallel.data.grad_buffer import GradBuffer
from megafp8.parallel.data.strategy import DataParallelStrategy, FullySharded, Replicated, Zero1
from megafp8.parallel.parallel_state import ParallelState
from megafp8.parallel.sharding import set_spec, spec_of
from megafp8.parallel.tensor.random import initialize, initialize_parameters
from megafp8.training.overlap import on_one_host


def build_data_parallel(
    config: Config, parallel: ParallelState, model: nn.ModuleList, wgrads: WgradStore, environment: Mapping[str, str]
) -> DataParallelStrategy:
    """Return the data-parallel strategy of the stages in `model`, with initialized weights. Collective.

    Call this after `Fp8Manager.materialize`.

    Args:
        config: Config of the run.
        parallel: Process groups.
        model: Model stages of this rank. Under FSDP their blocks are on the meta device.
        wgrads: Store of weight gradients that the pipeline schedule defers.
        environment: Environment variables of this process.
    """
    p, params, stages = config.parallel, list(model.parameters()), [*model]
    dtype = DTYPES[config.training.precision]
    trained = [param for param in params if param.requires_grad]
    # Gradients of experts may be summed over other ranks than the gradients of the rest of the model.
    other_ranks = parallel.expert_data.ranks != parallel.data_context.ranks
    expert_group = parallel.expert_data.group if other_ranks and any(spec_of(x).expert for x in trained) else None
    shared = [stage.shared_weight for stage in stages if p.pipeline > 1 and stage.shared_weight is not None]
    tied = [weight for weight in shared if weight.requires_grad]
    candidates = ((weight, state, gathered_format(state)) for weight, state in linear_weights(model))
    fp8_weights = {weight: (state, fmt) for weight, state, fmt in candidates if fmt is not None}
    group = parallel.data_context.group
    options: dict[str, Any] = {
        "tied": tied, "fp8_weights": fp8_weights, "group": group, "expert_group": expert_group,
        "amax_group": parallel.amax.group, "overlaps_gather": p.overlap_param_gather,
    }  # fmt: skip

    def grad_buffer(
        members: Sequence[nn.Parameter], group: ProcessGroup | None, *, sharded: bool = False
    ) -> GradBuffer:
        return GradBuffer(
            members,
            data_parallel_group=group,
            bucket_elements=int(p.bucket_mib * 2**20 / 4),
            device=parallel.device,
            sharded=sharded,
            own_bucket=tied,
            fp8_bucket=fp8_weights.keys(),
            dtype=sum_dtype(dtype),
            reduce_dtype=state_dtype(config.optimizer.reduce_dtype, dtype),
            wgrads=wgrads,
            in_pairs=config.fp8.paired_wgrad,
        )

    if p.fsdp:
        experts = _modules_of_experts(stages) if experts_are_whole(config, parallel) else []
        whole = _unsharded_parameters(experts, parallel)
        sharded = _sharded(config, parallel, stages, whole, tied, fp8_weights.keys())
        learning = [param for param in whole if param.requires_grad]
        return FullySharded(
            sharded,
            whole,
            [grad_buffer(learning, parallel.expert_data.group, sharded=True)] if learning else [],
            experts=experts,
            replicas=parallel.fsdp_replicate.size,
            one_host={x.group for x in (parallel.fsdp_shard, parallel.expert_shard) if on_one_host(x, environment)},
            **options,
        )
    initialize_parameters(model, config.seed)
    reduced = [(group, trained)]
    if expert_group is not None:
        others = [param for param in trained if not spec_of(param).expert]
        reduced = [(group, others), (expert_group, [param for param in trained if spec_of(param).expert])]
    buffers = [grad_buffer(members, over, sharded=p.zero == 1) for over, members in reduced]
    if p.zero == 0:
        return Replicated(params, buffers, **options)
    return Zero1(params, buffers, overlapped=[unit for stage in stages for unit in stage.units], **options)


def experts_are_whole(config: Config, parallel: ParallelState) -> bool:
    """Return whether experts stay unsharded under FSDP, because each rank would hold all rows of its experts."""
    return config.parallel.fsdp and _experts_are_apart(parallel) and parallel.expert_shard.size == 1


def _experts_are_apart(parallel: ParallelState) -> bool:
    """Return whether the experts of a block are sharded over other ranks than the rest of the block."""
    return parallel.expert_shard.group != parallel.fsdp_shard.group


def _modules_of_experts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the submodules that directly own expert weights."""
    owners = (m for module in modules for m in module.modules())
    return [m for m in owners if any(spec_of(param).expert for param in m.parameters(recurse=False))]


def _unsharded_parameters(modules: Sequence[nn.Module], parallel: ParallelState) -> list[nn.Parameter]:
    """Replace the parameters of `modules` by uninitialized ones on this rank's device, and return them."""
    params = []
    for module in modules:
        for name, old in list(module.named_parameters(recurse=False)):
            new = nn.Parameter(torch.empty_like(old, device=parallel.device), requires_grad=old.requires_grad)
            setattr(module, name, set_spec(new, spec_of(old)))
            params.append(new)
    return params


def _sharded(
    config: Config,
    parallel: ParallelState,
    stages: Sequence[GPTStage],
    whole: Sequence[nn.Parameter],
    tied: Sequence[nn.Parameter],
    fp8: AbstractSet[nn.Parameter],
) -> ShardedStages:
    """Shard `stages` with FSDP, except the parameters `whole`, and initialize all weights."""
    dtype = DTYPES[config.training.precision]
    sharded = ShardedStages(
        [_units(stage, parallel) for stage in stages],
        replicate_group=parallel.fsdp_replicate.group,
        own_bucket=tied,
        fp8=fp8,
        dtype=dtype,
        reduce_dtype=state_dtype(config.optimizer.reduce_dtype, dtype),
        device=parallel.device,
        whole=frozenset(whole),
    )
    for param in whole:
        initialize(param, param, config.seed)
    for rows in sharded.row_shards.values():
        rounded = torch.empty(rows.values.shape, dtype=dtype, device=parallel.device)
        initialize(rows.param, rounded, config.seed)
        with torch.no_grad():
            rows.values.copy_(rounded)
    for stage in stages:
        if isinstance(stage.embedding, FSDPModule) and stage.embedding.norm is None:
            stage.embedding.set_unshard_in_backward(False)
        if isinstance(stage.head, FSDPModule):
            stage.head.set_reshard_after_forward(False)
    return sharded


def _units(stage: GPTStage, parallel: ParallelState) -> list[Unit]:
    """Return the FSDP units of a stage: embedding, blocks and output layer, and the stage itself.

    A module with a shared weight is not a unit; the stage holds its weights. Experts are inner units if they are
    sharded over other ranks.
    """
    groups = ShardGroups(parallel.fsdp_shard.group, parallel.fsdp_shard_backward.group)
    expert_groups = ShardGroups(parallel.expert_shard.group, parallel.expert_shard_backward.group)

    def unit(module: nn.Module) -> Unit:
        inner = _experts_are_apart(parallel) and expert_groups.gather.size() > 1
        return Unit(module, groups, [Unit(m, expert_groups) for m in _modules_of_experts([module]) if inner])

    def has_shared_weight(module: nn.Module) -> bool:
        return module in stage.shared or any(param is stage.shared_weight for param in module.parameters())

    return [*(unit(module) for module in stage.units if not has_shared_weight(module)), Unit(stage, groups)]
