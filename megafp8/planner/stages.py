"""Placement of the pipeline stages, the layers of each stage, and data-parallel plans, as the config specifies them."""

from __future__ import annotations

from megafp8.config import Config
from megafp8.parallel.data.plan import DataParallelPlan, Zero1Plan, plan_type
from megafp8.parallel.pipeline.actions import StagePlacement
from megafp8.parallel.pipeline.registry import place_stages
from megafp8.parallel.pipeline.split import balanced, even, stage_layers
from megafp8.planner.flops import output_layer_in_blocks


def layers_of_stages(config: Config, placement: StagePlacement) -> list[range]:
    """Return the layers of each stage. The last stage also has the layers of multi-token prediction."""
    layers, counts = config.spec.num_blocks, config.parallel.layers_per_stage
    if counts is None:
        counts = even(layers, placement.num_stages)
    elif counts == "balanced":
        counts = balanced(layers, [rank for rank, _ in placement.homes], output_layer_in_blocks(config))
    assert (len(counts), sum(counts)) == (placement.num_stages, layers), "the config was not checked"
    return stage_layers([*counts[:-1], counts[-1] + config.spec.num_prediction_layers])


def stages_of(config: Config) -> tuple[StagePlacement, list[range]]:
    """Return the placement of the stages, and the layers of each stage."""
    p = config.parallel
    placement = place_stages(p.schedule, p.pipeline, p.virtual_pipeline, p.placement)
    return placement, layers_of_stages(config, placement)


def data_parallel_plans(config: Config, data: int) -> tuple[DataParallelPlan, DataParallelPlan]:
    """Return the plan of parameters with gradients that `data` ranks sum, and the plan of experts' parameters.

    If FSDP would give one rank all rows of the experts, the experts are not sharded, but their state is.
    """
    p = config.parallel
    bucket_elements, expert_data = max(1, int(p.bucket_mib * 2**20 / 4)), max(1, data * p.tensor // p.expert_ranks)
    kind, replicas = plan_type(p.zero, p.fsdp), p.fsdp_replicas
    others = kind(data, p.tensor, bucket_elements, replicas)
    experts = kind(expert_data, p.expert_ranks, bucket_elements, replicas)
    if experts.gathers_blocks and experts.weight_shards == 1 < others.weight_shards:
        experts = Zero1Plan(expert_data, p.expert_ranks, bucket_elements, replicas)
    return others, experts


def gathers_blocks(config: Config) -> bool:
    """Return whether weights are gathered for each block and micro-batch."""
    return plan_type(config.parallel.zero, config.parallel.fsdp).gathers_blocks
