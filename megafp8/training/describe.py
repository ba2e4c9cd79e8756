"""Size of a run before it starts: layout of ranks, parameters, memory per rank, and the text of --dry-run.

Parameters are counted by building stages on torch's meta device with placeholders for the process groups. The numbers
come from the real constructors, but need neither memory nor a process group, at any world size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from megafp8.config import Config, ParallelConfig
from megafp8.config.frozen import frozen_run
from megafp8.data.hub import missing_folder
from megafp8.fp8 import Fp8Manager
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.layers.context import planning_context
from megafp8.layers.recompute import block_memory
from megafp8.models.build import build_stage
from megafp8.models.gpt import GPTStage
from megafp8.objectives.registry import loss_parts
from megafp8.optimizer.param_groups import check_groups
from megafp8.parallel.parallel_state import rank_groups
from megafp8.parallel.pipeline.actions import v_placement
from megafp8.parallel.sharding import spec_of
from megafp8.plan import LinearPlan, plans_table
from megafp8.planner.fits import NO_DEVICE_HAS, check_memory
from megafp8.planner.flops import describe_flops, matmul_parameters
from megafp8.planner.memory import RankMemory, memory_table, memory_unit, pipeline_memory, state_memory
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import predict
from megafp8.planner.stages import data_parallel_plans, gathers_blocks, stages_of
from megafp8.spec import ModelSpec
from megafp8.training import cuda_graphs
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import check_frozen, teacher_of
from megafp8.training.inputs import describe_planned_data, missing_data, planned_vocabulary
from megafp8.training.pipeline import PipelinePlan, describe_schedule, num_microbatches, plan_pipeline

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def planned_stage(config: Config, stage: int) -> GPTStage:
    """Build stage `stage` of the model on the meta device, as its first tensor-parallel rank will hold it."""
    return _stage_of(config, stages_of(config)[1][stage])


def _stage_of(config: Config, layers: range) -> GPTStage:
    context = planning_context(config, Fp8Manager(None, amax_group=None))
    return build_stage(config.spec, context, layers=layers, positions=config.position_rows)


def memory_under(
    plan: PipelinePlan, world_size: int, teacher: ModelSpec | None = None
) -> Callable[[Config], Sequence[RankMemory]]:
    """Return a function from a config to the memory of each pipeline rank. All configs must have the pipeline `plan`.

    `teacher` is the frozen model that the run also holds, or None.
    """
    return lambda config: pipeline_memory(
        model_outline(config, build_fp8(config, None), teacher), world_size, plan.placement, plan.train
    )


def check_device_memory(config: Config, plan: PipelinePlan, world_size: int, device: str, source: str) -> None:
    """Raise ConfigError if a rank needs more memory than the device, `cuda` or `cpu`, has in total.

    This needs no process group. Memory that other processes use now is ignored, because they may be about to end. On
    CPU the ranks of a host share its memory. They need not use equal parts, so each may use up to twice its share.
    """
    if device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        limit, who_has = torch.cuda.get_device_properties(index).total_memory, "this GPU has"
    else:
        host, ranks = _host_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        limit, who_has = min(host, 2 * host // ranks), "this host has for it"
    check_memory(config, memory_under(plan, world_size, teacher_of(config)), limit, who_has, source)


def _host_memory() -> int:
    """Return the memory of this host in bytes, or the limit of its container if that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def dry_run(config: Config, world_size: int, source: str, steps: int | None = None, *, verbose: bool = False) -> str:
    """Return the text of --dry-run for a config that passed `check_layout`.

    Inputs that are missing, such as a tokenizer, data sets or the checkpoint that the run starts from, are listed.
    Existing inputs are checked and described.

    Args:
        config: Config of the run, or of a stage of the run.
        world_size: Number of ranks.
        source: Name of the config in error messages.
        steps: Number of steps that the config is used for; None means all steps of the run.
        verbose: Whether to print the config with all defaults too.

    Raises:
        ValueError: For errors that can be found without data and devices (ConfigError if a config key is at fault).
    """
    config, tokenizer, missing = planned_vocabulary(config, source)
    plan = plan_pipeline(config, num_microbatches(config, world_size))
    no_data, start, distillation = missing_data(config), config.checkpoint.init_from, config.data.distillation
    missing += no_data
    if start is not None and (missing_start := missing_folder(start)) is not None:
        missing.append(f"checkpoint.init_from = {missing_start}")
    teacher: ModelSpec | None = None
    if distillation is not None and (missing_teacher := missing_folder(distillation.teacher)) is not None:
        missing.append(f"data.distillation.teacher = {missing_teacher}; memory and times do not include it")
    elif distillation is not None:
        check_frozen(config, world_size)
        teacher = teacher_of(config)
    memory_of = memory_under(plan, world_size, teacher)
    memory = memory_of(config)
    check_memory(config, lambda x: memory if x is config else memory_of(x), NO_DEVICE_HAS, "no device has", source)
    check_optimizer(config)
    fp8 = build_fp8(config, None)
    parts = [
        _describe(config, world_size, fp8, plan, teacher),
        memory_table(memory),
        *([] if config.device == "cpu" else [_predicted(config, fp8, world_size, teacher)]),
        f"linear layers:\n{plans_table(_plans(config, world_size, fp8))}",
        *([] if tokenizer is None else [f"tokenizer: {tokenizer.boundaries}"]),
        *([] if no_data else [describe_planned_data(config, steps)]),
        *(["needed before a start:\n" + "\n".join(f"  {line}" for line in missing)] if missing else []),
        *([_resolved(config)] if verbose else []),
    ]
    return "\n\n".join(parts)


def _predicted(config: Config, fp8: Fp8Manager, world_size: int, teacher: ModelSpec | None) -> str:
    """Return the step time that the planner predicts on H100 GPUs, as text."""
    gpu = GPUS["h100-80gb"]
    try:
        forecast = predict(model_outline(config, fp8, teacher), Cluster(gpu, world_size))
    except ValueError as error:  # the planner has no cost model for this config
        return f"no predicted time of a step: {error}"
    return (
        f"predicted on H100-80GB, 8 per node: {forecast.seconds * 1e3:,.0f} ms per step, "
        f"{forecast.tokens_per_second:,.0f} tokens/s per GPU (docs/planning.md shows the accuracy; megafp8 plan finds "
        "faster layouts)"
    )


def _resolved(config: Config) -> str:
    return "config, with all defaults:\n" + yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip()


def check_optimizer(config: Config) -> None:
    """Raise ValueError if a pattern of `optimizer.groups` does not fit the model. Needs no process group."""
    if not config.optimizer.groups:
        return
    whole = config.model_copy(update={"parallel": ParallelConfig()})
    stage = build_stage(
        config.spec,
        planning_context(whole, Fp8Manager(None, amax_group=None)),
        layers=config.spec.indices,
        positions=config.position_rows,
    )
    check_groups((spec_of(param) for param in stage.parameters()), config.optimizer.groups)


def _plans(config: Config, world_size: int, fp8: Fp8Manager) -> list[LinearPlan]:
    """Return the plans of all linear layers, as the first rank of each stage has them."""
    planned, p = fp8.unbuilt(), config.parallel
    experts = data_parallel_plans(config, world_size // (p.tensor * p.pipeline))[1]
    whole_experts = gathers_blocks(config) and not experts.gathers_blocks
    context = replace(planning_context(config, planned), whole_experts=whole_experts)
    for layers in stages_of(config)[1]:
        memory = block_memory(config.parallel, len(layers))
        build_stage(config.spec, context, layers=layers, positions=config.position_rows, memory=memory)
    return planned.plans


def _describe_replicas(config: Config, world_size: int) -> list[str]:
    """Return a line about replicas of `world_size` ranks each and their micro-batches; empty without replicas."""
    replicas, micro_batches = config.resilience.replicas, num_microbatches(config, world_size)
    if replicas is None:
        return []
    fewest = micro_batches // replicas.count
    most = fewest if replicas.batch == "shrink" else -(-micro_batches // replicas.min)
    return [
        f"replicas: {replicas.count}, each of {world_size} ranks; at least {replicas.min} train, and a rank computes "
        f"{f'{fewest} to {most}' if fewest < most else fewest} micro-batches per step"
    ]


def _describe(config: Config, world_size: int, fp8: Fp8Manager, plan: PipelinePlan, teacher: ModelSpec | None) -> str:
    """Return a text with the layout, the parameters and their state, and the process groups of a run.

    `fp8` knows which layers are FP8 according to the config.
    """
    p, t = config.parallel, config.training
    data = world_size // (p.tensor * p.pipeline * p.context)
    groups = rank_groups(world_size, p.tensor, p.pipeline, p.context, p.fsdp_replicas, p.expert, p.expert_tensor)
    outline = model_outline(config, fp8)
    parameters = [outline.parameters(span) for span in plan.layers]
    in_model = sum(x.in_model for stage_parameters in parameters for x in stage_parameters)
    memories = [state_memory(config, stage_parameters, data * p.context) for stage_parameters in parameters]
    states = [(x.weights, x.gradients, x.masters + x.moments) for x in memories]
    unit, scale = memory_unit(size for state in states for size in state)
    lines = [
        f"layout: {world_size} ranks = pipeline {p.pipeline} × data {data}"
        f"{f' × context {p.context}' if p.context > 1 else ''} × tensor {p.tensor}"
        f"{' with sequence parallelism' if p.sequence_parallel and p.tensor > 1 else ''}",
        *([describe_experts(config, world_size)] if config.spec.has_experts else []),
        *([_describe_shards(config, data * p.context)] if gathers_blocks(config) else []),
        f"micro-batches per step and rank: {num_microbatches(config, world_size)}"
        f" of {t.micro_batch_size} × {t.seq_length // p.context} tokens;"
        f" {t.global_batch_size * t.seq_length:,} tokens a step",
        *_describe_replicas(config, world_size),
        f"parameters: {in_model:,} in the model{_describe_active(config)};"
        f" {describe_flops(config, _compared(config, teacher))}",
        *describe_longrope(config),
        *(["only LoRA's parameters are trained"] if config.lora is not None else []),
        *([describe_schedule(config, plan)] if p.pipeline > 1 else []),
        *_describe_loss(config),
        cuda_graphs.describe(cuda_graphs.why_not(config, "cuda" if config.device == "auto" else config.device)),
        "",
        f"                                   {unit}/rank of",
        "stage  layers    parameters/rank  weights  gradients  optimizer  ranks",
    ]
    per_rank = data * p.context * p.tensor
    for stage, (stage_parameters, span, state) in enumerate(zip(parameters, plan.layers, states, strict=True)):
        rank, chunk = plan.placement.homes[stage]
        ranks = f"{rank * per_rank}-{(rank + 1) * per_rank - 1}{f', chunk {chunk}' if p.virtual_pipeline > 1 else ''}"
        on_rank = sum(x.elements for x in stage_parameters)
        weights, gradients, optimizer = (size / scale for size in state)
        lines.append(
            f"{stage:>5}  {span.start:>3}-{span.stop - 1:<4} {on_rank:>16,} {weights:>8.2f} {gradients:>10.2f}"
            f" {optimizer:>10.2f}  {ranks}"
        )
    lines += ["", "groups of rank 0:"]
    # With v placement the first and the last stage are on the same rank, so no group for the embedding is needed.
    embedding = () if plan.placement == v_placement(p.pipeline) else ("embedding",)
    context = ("context",) if p.context > 1 else ()
    replicas = ("fsdp_shard", "fsdp_replicate") if p.fsdp_replicas > 1 else ()
    experts = ("expert", "expert_data") if p.expert_ranks > 1 else ()
    expert_axes = ("expert_shard",) if experts and replicas else ()
    names = ("tensor", *context, "data", *experts, *replicas, *expert_axes, "pipeline", "amax", "model", *embedding)
    width = max(10, *map(len, names))
    for name in names:
        members = next(g for g in groups[name] if 0 in g)
        shown = ", ".join(map(str, members[:8])) + (", …" if len(members) > 8 else "")
        lines.append(f"  {name:<{width}} {len(members):>5} ranks: {shown}  ({len(groups[name])} such groups)")
    return "\n".join(lines)


def _describe_loss(config: Config) -> list[str]:
    """Return a line about the parts of a micro-batch whose logits exist at the same time; empty for a single part."""
    parts = loss_parts(config)
    if parts.number == 1:
        return []
    return [
        f"loss: in {parts.number} parts of a micro-batch; at most {parts.tokens:,} tokens have logits at the same time"
    ]


def _compared(config: Config, teacher: ModelSpec | None) -> Config | None:
    """Return the config of the model that each step compares the trained model with, or None."""
    frozen = frozen_run(config, teacher)
    if frozen is None and config.lora is not None and config.data.distillation is None and config.data.compares:
        return config  # the model without its adapters
    return frozen


def _describe_shards(config: Config, data: int) -> str:
    """Return a line with the number of ranks over which FSDP shards. `data` is the number of data-parallel ranks."""
    others, experts = data_parallel_plans(config, data)
    apart = config.spec.has_experts and experts.ranks != others.ranks
    expert_text = f", experts over {experts.weight_shards}" if apart else ""
    over = f"{others.weight_shards} ranks{expert_text}"
    if others.replicas == 1:
        return f"fsdp: weights, gradients and optimizer state sharded over {over}"
    return f"fsdp: weights and gradients sharded over {over}, optimizer state over all of {others.replicas} replicas"


def describe_experts(config: Config, world_size: int) -> str:
    """Return a line with the number and the layout of the experts."""
    p, ranks = config.parallel, config.parallel.expert_ranks
    parts = f", each sharded over {p.expert_tensor} ranks" if p.expert_tensor > 1 else ""
    kinds = config.spec.expert_records
    counts = " or ".join(
        f"{x.num_experts} per layer, {x.top_k} per token"
        + (f", {x.zero_experts} more without computation" if x.zero_experts is not None else "")
        + (f", in latents of {x.latent_size}" if x.latent_size is not None else "")
        for x in kinds
    )
    each = " or ".join(str(x.num_experts // p.expert) for x in kinds)
    on_ranks = f"; {each} on each of {p.expert} expert-parallel ranks" if p.expert > 1 else ""
    how = f"; tokens by {'all-gather' if config.gathers_tokens else 'all-to-all'}" if ranks > 1 else ""
    rounding = (
        "; tokens of several micro-batches come together, so FP8 scales of an expert's rows, and therefore losses, "
        "differ from other layouts by FP8 rounding"
        if config.fp8.recipe != "none" and p.tensor * p.context % ranks
        else ""
    )
    return (
        f"experts: {counts}{on_ranks}{parts}; each "
        f"{world_size // p.pipeline // ranks} times{how}; memory below assumes an even load{rounding}"
    )


def describe_longrope(config: Config) -> list[str]:
    """Return a line with the set of rotary frequencies that LongRoPE uses; empty without LongRoPE."""
    length = config.training.seq_length
    ropes = (getattr(layer.mixer, "longrope", None) for layer in config.spec.distinct_layers)
    rope = next(filter(None, ropes), None)
    if rope is None:
        return []
    original = rope.original_max_position_embeddings
    used, compared = ("long", "above") if rope.is_long(length) else ("short", "up to")
    return [f"longrope: {used}_factor, because sequences of {length} tokens are {compared} the original {original}"]


def _describe_active(config: Config) -> str:
    """Return the number of matrix parameters that are active for a token, as text; empty without experts."""
    return "" if not config.spec.has_experts else f", {matmul_parameters(config):,} matrix parameters per token"
