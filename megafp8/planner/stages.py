"""Placement of the pipeline stages, and the layers of each, as the config says."""

from __future__ import annotations

from megafp8.config import Config
from megafp8.pipeline_parallel.actions import Placement
from megafp8.pipeline_parallel.registry import place_stages
from megafp8.pipeline_parallel.split import balanced, even, stage_layers
from megafp8.planner.flops import output_layer_in_blocks


def layers_of_stages(config: Config, placement: Placement) -> list[range]:
    """The last stage also has the layers of multi-token prediction."""
    layers, counts = config.model.num_blocks, config.parallel.layers_per_stage
    if counts is None:
        counts = even(layers, placement.num_stages)
    elif counts == "balanced":
        counts = balanced(layers, [rank for rank, _ in placement.homes], output_layer_in_blocks(config))
    assert (len(counts), sum(counts)) == (placement.num_stages, layers), "the config was not checked"
    return stage_layers([*counts[:-1], counts[-1] + config.model.mtp_num_layers])


def stages_of(config: Config) -> tuple[Placement, list[range]]:
    """The placement of the stages, and the layers of each."""
    p = config.parallel
    placement = place_stages(p.schedule, p.pipeline, p.virtual_pipeline, p.placement)
    return placement, layers_of_stages(config, placement)
