"""Trainer of one of several replicas, which trains on its share of each global batch.

Replicas exchange gradients in each step, or weights after a round of steps (outer steps). With outer steps each replica
trains alone, and its losses and tokens are the losses and tokens of its share.
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
"""Function that sums the first tensors and takes the maximum of the second tensors over all replicas, in place.

It raises an error if a replica is lost; the values of the tensors are then undefined.
"""


class ReplicaTrainer(RankTrainer):
    """Trainer of one rank of a replica.

    Construction is collective: every rank of the replica must build its trainer.

    Args:
        config: Config of the run.
        parallel: Process groups of the replica.
        exchange: Function that combines tensors of a step with the other replicas. Not called with outer steps.

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
        """Run one optimizer step on this replica's share of the global batch, together with the other replicas.

        Arguments and results are described at `RankTrainer.train_step`. `batches` is empty while a peer sends its state
        to this replica (`Membership.begin`).
        """
        if self._has_auxiliary_loss and any(batch.loss_mask is not None for batch in batches):
            raise ValueError(
                "resilience.replicas: auxiliary losses of experts are divided by the number of unmasked tokens in "
                "the global batch, which no replica knows before the backward pass if masks leave out tokens; set "
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
        # Replicas may train on fewer samples than the batch has. A replica without samples must scale like the others.
        return True

    def _combined(self, passes: Passes) -> Passes:
        """Combine gradients, reports and statistics of the passes over all replicas, in place.

        If this raises an error, nothing else has been changed, and the step can be repeated.
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
