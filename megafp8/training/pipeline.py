"""Pipeline of a config: placement of stages, their layers, and the schedules of training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import Config, ConfigError, Problem
from megafp8.parallel.pipeline.actions import Schedule, StagePlacement
from megafp8.parallel.pipeline.check import check_schedule
from megafp8.parallel.pipeline.communication import with_communication
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.registry import training_schedule
from megafp8.parallel.pipeline.simulate import simulate
from megafp8.planner.stages import stages_of


@dataclass(frozen=True)
class PipelinePlan:
    """Placement, layers and schedules of a pipeline.

    Attributes:
        placement: Stages of each pipeline rank.
        layers: Range of layers of each stage.
        train: Schedule of a training step, checked, including communication.
        evaluate: Schedule of the forward passes of an evaluation, checked, including communication.
    """

    placement: StagePlacement
    layers: list[range]
    train: Schedule
    evaluate: Schedule

    @property
    def last_rank(self) -> int:
        """Pipeline rank that computes the loss."""
        return self.placement.homes[-1][0]


def num_microbatches(config: Config, world_size: int) -> int:
    """Return the number of micro-batches per step of each data-parallel rank, for `world_size` ranks in total."""
    p, t = config.parallel, config.training
    return t.global_batch_size * p.tensor * p.pipeline * p.context // (t.micro_batch_size * world_size)


def plan_pipeline(config: Config, num_microbatches: int) -> PipelinePlan:
    """Return the pipeline of `config`. Raises ConfigError if its schedule cannot run."""
    placement, layers = stages_of(config)
    source = config.parallel.schedule
    try:
        computes = training_schedule(source, placement, num_microbatches), forward_only(placement, num_microbatches)
        schedules = [with_communication(compute, placement) for compute in computes]
        for schedule in schedules:
            check_schedule(schedule, placement)
    except ValueError as error:
        problem = Problem("parallel.schedule", source, str(error), "try another schedule, or correct this one")
        raise ConfigError("config", [problem]) from None
    return PipelinePlan(placement, layers, *schedules)


def describe_schedule(config: Config, plan: PipelinePlan) -> str:
    """Return a log line with the bubble and the peak memory of the training schedule.

    The simulation assumes that forward passes, input gradients and weight gradients take equally long.
    """
    p = config.parallel
    timeline = simulate(plan.train, plan.placement)
    held_most = max(timeline.peak_saved) / plan.placement.num_chunks
    return (
        f"schedule: {p.schedule}, stages per rank: {p.virtual_pipeline}; simulated with forward, input gradients and "
        f"weight gradients equally long: bubble {timeline.bubble_fraction:.1%}, at most {held_most:g} micro-batches "
        "per rank"
    )
