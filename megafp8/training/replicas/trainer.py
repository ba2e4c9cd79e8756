"""The trainer of one of several replicas, which trains on its share of each global batch.

Replicas exchange the gradients of each step, or with outer steps their weights after a round of steps. With outer steps
each replica trains by itself: its losses and tokens are the losses and tokens of its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.optimizer.outer import OuterOptimizer
from megafp8.optimizer.step import StepResult
from megafp8.parallel import activity
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.loss import BatchLoss
from megafp8.training.trainer import Passes, RankTrainer

Exchange = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Sums the first tensors and maximizes the others over all replicas of the model, in place. Raises where one is lost;
then their values are undefined."""


class ReplicaTrainer(RankTrainer):
    """Trainer of a rank of one replica. Collective: build it on every rank of the replica.

    Args:
        config: Config of the run.
        parallel: Process groups of the replica.
        exchange: Combines a step with the other replicas; not called with outer steps, in which a replica is alone.

    Attributes:
        outer: Outer steps; None if replicas exchange gradients in each step.
    """

    def __init__(self, config: Config, parallel: ParallelState, exchange: Exchange) -> None:
        super().__init__(config, parallel)
        self._exchange = exchange
        self.outer: OuterOptimizer | None = None
        if (o := config.outer) is not None:
            self.outer = OuterOptimizer(self.optimizer, self.strategy.owned, o.learning_rate, o.momentum)

    def train_step(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        before_update: Callable[[], None] = lambda: None,
        loss_limit: float | None = None,
    ) -> tuple[BatchLoss, StepResult]:
        """Run one optimizer step on this replica's share of the global batch, with the other replicas.

        See `RankTrainer.train_step`. There are no `batches` while a peer sends this replica its state
        (`Membership.begin`).
        """
        if self._has_auxiliary_loss and any(batch.loss_mask is not None for batch in batches):
            raise ValueError(
                "resilience.replicas: auxiliary losses of experts are divided by the number of tokens that count in "
                "the global batch, which no replica knows before the backward pass where masks leave out some; set "
                "model.moe.aux_loss=0 and balance by moe.bias_update_rate, or train on all tokens"
            )
        if batches:
            return super().train_step(step, batches, before_update=before_update, loss_limit=loss_limit)
        self.fp8.begin_step(step + 1)
        activity.enter("forward and backward")
        self._begin_passes()
        self.strategy.complete()
        self.strategy.finish()
        passes = Passes(self._sum([]), {})
        return self._finish_step(
            step, batches, passes, sampled=False, before_update=before_update, loss_limit=loss_limit
        )

    def _finish_step(
        self, step: int, batches: Sequence[Batch], passes: Passes, **options: Any
    ) -> tuple[BatchLoss, StepResult]:
        if self.outer is None:
            passes = self._combined(passes)
        return super()._finish_step(step, batches, passes, **options)

    def _varies(self, batches: Sequence[Batch]) -> bool:
        # Replicas may train on fewer samples than the batch has, and one without samples must scale as the others do.
        return True

    def _combined(self, passes: Passes) -> Passes:
        """Combine what the passes of all replicas have left, in place.

        Nothing else has been changed when this raises; then the step may be begun again.
        """
        amaxes = self.fp8.newest_amaxes()
        counts = [passes.report, *self._index_losses]
        if self.load_collector is not None:
            counts += self.load_collector.own_sums
        maxima = amaxes if self.qk_clip is None else [*amaxes, *self.qk_clip.recorded]
        packed_counts, packed_maxima = (torch.cat([x.view(-1) for x in xs]) if xs else None for xs in (counts, maxima))
        try:
            self._exchange(
                [*self.strategy.owned, *([] if packed_counts is None else [packed_counts])],
                [] if packed_maxima is None else [packed_maxima],
            )
        except Exception:
            self.fp8.discard_step()
            raise
        for xs, packed in ((counts, packed_counts), (maxima, packed_maxima)):
            if packed is not None:
                for x, values in zip(xs, packed.split([x.numel() for x in xs])):
                    x.copy_(values.view(x.shape))
        return passes._replace(amaxes=amaxes)
