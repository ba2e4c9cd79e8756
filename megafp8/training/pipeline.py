"""The pipeline that a config describes: where stages lie, which layers each has, and what each rank does in a step."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import Config, ConfigError, Problem
from megafp8.pipeline_parallel.check import check_schedule
from megafp8.pipeline_parallel.communication import with_communication
from megafp8.pipeline_parallel.registry import training_schedule
from megafp8.pipeline_parallel.schedules import Placement, Schedule, forward_only, in_a_v, in_turns
from megafp8.pipeline_parallel.simulate import simulate
from megafp8.planner.stages import layers_of_stages


@dataclass(frozen=True)
class PipelinePlan:
    """`layers` are those of each stage; `train` and `evaluate` are proven schedules with their communication."""

    placement: Placement
    layers: list[range]
    train: Schedule
    evaluate: Schedule

    @property
    def last_rank(self) -> int:
        """Who computes the loss."""
        return self.placement.homes[-1][0]


def num_microbatches(config: Config, world_size: int) -> int:
    """Of a step, on each data-parallel rank of `world_size` ranks in all."""
    p, t = config.parallel, config.training
    return t.global_batch_size * p.tensor * p.pipeline * p.context // (t.micro_batch_size * world_size)


def stages_of(config: Config) -> tuple[Placement, list[range]]:
    """Where the stages are, and the layers of each."""
    p = config.parallel
    placement = in_a_v(p.pipeline) if p.in_a_v else in_turns(p.pipeline, p.virtual_pipeline)
    return placement, layers_of_stages(config, placement)


def plan_pipeline(config: Config, num_microbatches: int) -> PipelinePlan:
    """The pipeline of `config`. Pure. Raises ConfigError where its schedule is not fit to run."""
    placement, layers = stages_of(config)
    source = config.parallel.schedule
    try:
        train, evaluate = (
            training_schedule(source, placement, num_microbatches),
            forward_only(placement, num_microbatches),
        )
        schedules = [with_communication(compute, placement) for compute in (train, evaluate)]
        for schedule in schedules:
            check_schedule(schedule, placement)
    except ValueError as error:
        problem = Problem("parallel.schedule", source, str(error), "try another schedule, or correct this one")
        raise ConfigError("config", [problem]) from None
    return PipelinePlan(placement, layers, *schedules)


def describe_schedule(config: Config, plan: PipelinePlan) -> str:
    """A line about bubble and memory, as simulated with the three parts of a micro-batch's work equally long."""
    p = config.parallel
    timeline = simulate(plan.train, plan.placement)
    held = max(timeline.peak_held) / plan.placement.num_chunks
    return (
        f"schedule: {p.schedule}, stages a rank: {p.virtual_pipeline}; simulated with forward, input gradients and "
        f"weight gradients equally long: bubble {timeline.bubble_fraction:.1%}, at most {held:g} micro-batches a rank"
    )
