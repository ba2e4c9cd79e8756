"""Faults that a distributed trainer may have, each a context in which the ranks of a layout have it.

Each is a bug that a public framework has had, and passes without an error: losses fall all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.batch import Batch
from megafp8.layers.context import BuildContext
from megafp8.layers.experts.own_rows import own_rows
from megafp8.layers.head.parts import TokenPart
from megafp8.optimizer.step import OptimizerStep
from megafp8.training.history import History
from megafp8.training.loss import TrainedStage
from megafp8.training.trainer import RankTrainer

FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
"""By name."""


def fault(make: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    FAULTS[make.__name__] = contextmanager(make)
    return FAULTS[make.__name__]


@fault
def no_all_reduce_of_replicated() -> Iterator[None]:
    """Each tensor-parallel rank keeps its own part of the gradients of norms."""
    with patch.object(OptimizerStep, "reduce_shared_gradients", lambda self: None):
        yield


@fault
def average_per_microbatch() -> Iterator[None]:
    """Gradients are those of the mean of micro-batches' mean losses, however many tokens each has."""
    of_part = TrainedStage.of_part

    def averaged(self: TrainedStage, microbatch: Batch, output: Any, part: TokenPart) -> tuple[Tensor, Tensor]:
        loss, report = of_part(self, microbatch, output, part)
        counted = report[1] / len(microbatch.tokens) / microbatch.labels.shape[1]
        return loss / counted, report

    with patch.object(TrainedStage, "of_part", averaged):
        yield


@fault
def norm_over_one_stage() -> Iterator[None]:
    """The gradient norm of each rank is that of its own part of the model."""
    with patch.object(OptimizerStep, "_sum_over_ranks", lambda self, x: x):
        yield


@fault
def seed_of_the_rank() -> Iterator[None]:
    """Dropout depends on the rank."""

    def seeded(*args: Any, seed: int, **options: Any) -> BuildContext:
        return BuildContext(*args, seed=seed + dist.get_rank(), **options)

    with patch("megafp8.training.trainer.BuildContext", seeded):
        yield


@fault
def stale_fp8_weight() -> Iterator[None]:
    """FP8 copies of the weights stay when the optimizer has changed these."""
    with patch("megafp8.linear.state.LinearState.invalidate_weight", lambda self: None):
        yield


@fault
def positions_off_by_one() -> Iterator[None]:
    """Tokens of the second context-parallel rank are one position further."""
    shard = Batch.shard

    def moved(self: Batch, rank: int, ranks: int, **options: Any) -> Batch:
        batch = shard(self, rank, ranks, **options)
        positions = batch.position_ids
        return batch if rank == 0 or positions is None else replace(batch, position_ids=positions + 1)

    with patch.object(Batch, "shard", moved):
        yield


@fault
def wrong_expert_offset() -> Iterator[None]:
    """Tokens get to the neighbours of their experts."""

    def moved(experts_nk: Tensor, num_experts: int, *args: Any, **options: Any) -> Any:
        return own_rows((experts_nk + 1) % num_experts, num_experts, *args, **options)

    with patch("megafp8.layers.experts.module.own_rows", moved):
        yield


@fault
def tied_gradient_skipped() -> Iterator[None]:
    """The first and the last stage do not add up the gradients of the weight that they share."""
    reduce = OptimizerStep.reduce_shared_gradients
    with patch.object(OptimizerStep, "reduce_shared_gradients", lambda self: reduce(replace(self, shared_params=[]))):
        yield


@fault
def amax_of_one_rank() -> Iterator[None]:
    """Scales are those of a rank's own part of a tensor."""

    def own(amaxes: list[Tensor], group: object) -> Sequence[Tensor]:
        return amaxes

    with patch("megafp8.numerics.step._reduced", own):
        yield


@fault
def sampler_shifted_on_resume() -> Iterator[None]:
    """A resumed run begins with the sample after the next."""
    samples_at = History.samples_at

    def shifted(self: History, step: int, config: Any) -> int:
        resumed = self.step > 0 and step == self.step
        return samples_at(self, step, config) + resumed * config.training.micro_batch_size

    with patch.object(History, "samples_at", shifted):
        yield


@fault
def rank_hangs() -> Iterator[None]:
    """The last rank waits for a message that nobody sends."""
    passes = RankTrainer.run_passes

    def hanging(self: RankTrainer, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            dist.recv(torch.empty(1), src=0, tag=77)
        return passes(self, *args, **options)

    with patch.object(RankTrainer, "run_passes", hanging):
        yield
