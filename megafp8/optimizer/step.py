"""The end of a training step: from the gradients of the micro-batches to the update.

    finish the data-parallel sum -> complete shared gradients -> scale -> norm -> clip -> update

Sharded weights are gathered by the caller (`ParamBuffer`), since those gathered in FP8 need the next step's scales.

Everything up to the norm is queued on the device before the host waits, once, for the norm. It decides whether there is
an update and whether gradients are clipped. A norm that is not finite skips the update: one bad batch costs one step,
not the run. The norm is the same on every rank, so either all ranks skip or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.distributed.sharding import FlatShard
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.optimizer.finalize import clip_, finalize_gradients, global_norm


@dataclass(frozen=True)
class StepResult:
    """`grad_norm`: the 2-norm of the whole model's gradient before clipping. `skipped`: it was not finite."""

    grad_norm: float
    skipped: bool


class Gradients(Protocol):
    """A `GradBuffer` or `FullySharded`.

    After `finish`, the gradients of `shards`, summed over data parallelism, are in `owned`, views of the fp32 `flat`.
    """

    @property
    def shards(self) -> Sequence[FlatShard]: ...

    @property
    def owned(self) -> Sequence[Tensor]: ...

    @property
    def flat(self) -> Tensor: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class OptimizerStep:
    """What a step needs that stays the same from step to step.

    `shared_params`: this stage's side of the tied weights (see `finalize_gradients`). `max_norm`: clip the gradient to
    this 2-norm; None does not clip. `shard_group`: over which gradients are sharded; None where each rank updates
    everything.
    """

    buffer: Gradients
    optimizer: MixedPrecisionAdamW
    tensor_group: ProcessGroup | None
    model_group: ProcessGroup | None
    embedding_group: ProcessGroup | None
    shared_params: Sequence[nn.Parameter]
    max_norm: float | None
    shard_group: ProcessGroup | None = None

    def __call__(self, lr: float, *, grad_scale: Tensor | float | None = None) -> StepResult:
        """Update the weights with learning rate `lr`; call when all backward passes of the step are done.

        `grad_scale`, the same on all ranks, multiplies the gradients first: nominal / true number of tokens where masks
        made them differ. The caller must `zero` the buffer before the next backward pass. A skipped step changes
        neither the weights nor the optimizer's state.
        """
        shards, gradients = self.buffer.shards, self.buffer.owned
        self.buffer.finish()
        finalize_gradients(
            shards,
            tensor_group=self.tensor_group,
            embedding_group=self.embedding_group,
            shared_params=self.shared_params,
        )
        if grad_scale is not None:
            for gradient in gradients:
                gradient.mul_(grad_scale)
        norm = global_norm(
            shards,
            tensor_group=self.tensor_group,
            model_group=self.model_group,
            shard_group=self.shard_group,
            device=self.buffer.flat.device,
        ).cpu()
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, skipped=True)
        if self.max_norm is not None:
            clip_(gradients, norm, self.max_norm)
        self.optimizer.step(lr)
        return StepResult(grad_norm, skipped=False)
