"""What a run will be, before it is: the resolved config, the layout of ranks, parameters and their state per rank.

Parameters are counted by building each stage on torch's meta device with stand-ins for the groups, so the figure is
that of the real constructors and costs neither memory nor a process group, at any world size.
"""

from __future__ import annotations

import yaml

from megafp8.config import Config
from megafp8.distributed.sharding import spec_of
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import planning_context
from megafp8.models.flops import flops_per_token
from megafp8.models.gpt import GPTStage
from megafp8.models.recompute import block_memory
from megafp8.parallel_state import rank_groups
from megafp8.pipeline_parallel.actions import v_placement
from megafp8.plan import plans_table
from megafp8.planner.fits import NO_DEVICE_HAS, check_memory
from megafp8.planner.memory import fp8_parameters, memory_table, state_memory
from megafp8.training.device_memory import memory_under
from megafp8.training.fp8_config import build_fp8
from megafp8.training.inputs import describe_planned_data, with_vocabulary
from megafp8.training.pipeline import PipelinePlan, describe_schedule, num_microbatches, plan_pipeline, stages_of


def planned_stage(config: Config, stage: int, fp8: Fp8Manager | None = None) -> GPTStage:
    """Stage `stage` of the model as the first tensor rank will hold it, on the meta device.

    `fp8` plans its layers; None: in high precision.
    """
    context = planning_context(config, Fp8Manager(None, amax_group=None) if fp8 is None else fp8)
    _, layers = stages_of(config)
    memory = block_memory(config.parallel, len(layers[stage]))
    return GPTStage(config.model, context, layers=layers[stage], positions=position_rows(config), memory=memory)


def position_rows(config: Config) -> int:
    """Rows of the learned position table."""
    return config.model.max_position_embeddings or config.training.seq_length


def dry_run(config: Config, world_size: int, source: str) -> str:
    """The text of --dry-run of a config that `check_layout` has passed. Data sets are described where they are there.

    Raises ValueError (ConfigError where a key of the config is at fault) for what can be seen without data and devices.
    """
    config = with_vocabulary(config, source)
    plan = plan_pipeline(config, num_microbatches(config, world_size))
    memories = memory_under(plan, world_size)
    check_memory(config, memories, NO_DEVICE_HAS, "no device has", source)
    fp8 = build_fp8(config, None)
    described = _describe(config, world_size, fp8, plan)
    plans = f"linear layers:\n{plans_table(fp8.plans)}"
    return "\n\n".join([described, plans, memory_table(memories(config)), describe_planned_data(config)])


def _describe(config: Config, world_size: int, fp8: Fp8Manager, plan: PipelinePlan) -> str:
    """Config, layout, parameters and their state, groups; `fp8`: which layers are FP8, as the config says."""
    p, t = config.parallel, config.training
    data = world_size // (p.tensor * p.pipeline * p.context)
    groups = rank_groups(world_size, p.tensor, p.pipeline, p.context)
    microbatches = num_microbatches(config, world_size)
    stages = [planned_stage(config, stage, fp8) for stage in range(plan.placement.num_stages)]
    counts = [sum(x.numel() for x in stage.parameters()) for stage in stages]
    params = [param for stage in stages for param in stage.parameters() if not spec_of(param).is_copy]
    total = sum(x.numel() * (1 if spec_of(x).replicated_over_tp else p.tensor) for x in params)
    lines = [
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip(),
        "",
        f"layout: {world_size} ranks = pipeline {p.pipeline} × data {data}"
        f"{f' × context {p.context}' if p.context > 1 else ''} × tensor {p.tensor}"
        f"{' with sequence parallelism' if p.sequence_parallel and p.tensor > 1 else ''}",
        f"micro-batches per step and rank: {microbatches}"
        f" of {t.micro_batch_size} × {t.seq_length // p.context} tokens;"
        f" {t.global_batch_size * t.seq_length:,} tokens a step",
        f"parameters: {total:,} in the model; {flops_per_token(config.model, t.seq_length) / 1e9:.3f} GFLOP per token",
        *([describe_schedule(config, plan)] if p.pipeline > 1 else []),
        "",
        "                                   GiB/rank of",
        "stage  layers    parameters/rank  weights  gradients  optimizer  ranks",
    ]
    per_rank = data * p.context * p.tensor
    for stage, (count, span) in enumerate(zip(counts, plan.layers)):
        rank, chunk = plan.placement.homes[stage]
        shown = f"{rank * per_rank}-{(rank + 1) * per_rank - 1}" + (
            f", chunk {chunk}" if p.virtual_pipeline > 1 else ""
        )
        params = list(stages[stage].parameters())
        shared = [i for i, x in enumerate(params) if x is stages[stage].shared_weight and p.pipeline > 1]
        coded = fp8_parameters(config, fp8, span)
        memory = state_memory(config, [x.numel() for x in params], data * p.context, shared, coded)
        in_all = (memory.weights, memory.gradients, memory.masters + memory.moments)
        weights, gradients, optimizer = (x / 2**30 for x in in_all)
        lines.append(
            f"{stage:>5}  {span.start:>3}-{span.stop - 1:<4} {count:>16,} {weights:>8.2f} {gradients:>10.2f} "
            f"{optimizer:>10.2f}  {shown}"
        )
    lines += ["", "groups of rank 0:"]
    # In a V the first and the last stage are on one rank, which needs no group for the embedding.
    embedding = () if plan.placement == v_placement(p.pipeline) else ("embedding",)
    context = ("context",) if p.context > 1 else ()
    for name in ("tensor", *context, "data", "pipeline", "amax", "model", *embedding):
        ranks = next(g for g in groups[name] if 0 in g)
        shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
        lines.append(f"  {name:<10} {len(ranks):>5} ranks: {shown}  ({len(groups[name])} such groups)")
    return "\n".join(lines)
