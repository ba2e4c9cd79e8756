"""Loss of a training step: the value that backward differentiates, each rank's report, and means over the global batch.

The differentiated loss is the sum over a micro-batch's tokens, divided by the *nominal* number of tokens in the global
batch. In fp16 it is also multiplied by the loss scale. The gradients are summed over micro-batches, data-parallel and
context-parallel ranks, so they are the gradients of the mean over the whole batch in any layout. If masks leave out
tokens, the true number is known only after all ranks have counted. The gradients are then multiplied by nominal / true
once, before clipping.

An objective may have its own loss (`megafp8.objectives.ObjectiveLoss`), such as a loss of pairs of answers. The
gradients are then the gradients of the mean over the pairs of the whole batch.

The losses of multi-token prediction are divided by the same number (DeepSeek-V3, equation 24), although the last tokens
of a sample have no such loss. The loss of BERT's binary head is divided by this number too; a sample's binary loss
counts once for each token to predict in that sample.

Reported losses are in nats per token of the data. Each regularizer is reported as a separate metric, scaled as in the
gradient: the z-loss of the output layer, the router losses and the indexer losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.layers.head.op import LabelLosses
from megafp8.layers.head.parts import PartLoss, SummedLoss, TokenPart
from megafp8.models.gpt import GPTStage
from megafp8.objectives import ObjectiveLoss
from megafp8.parallel.pipeline.engine import StageOutput


@dataclass(frozen=True)
class BatchLoss:
    """Losses of a global batch.

    Attributes:
        mean: Mean cross-entropy of the unmasked tokens in nats, or the mean of the objective's own loss
            (`megafp8.objectives.ObjectiveLoss`).
        tokens: Number of unmasked tokens, or number of items that the objective's own loss counts.
        auxiliary: Mean of the model's further losses (`HeadSpec.extra_losses`): the loss of multi-token prediction
            over the tokens that have a token to predict, averaged over depths, or the loss of the binary head. None
            without further losses.
        z_loss: z-loss of the output layer per token, scaled as in the gradient; None without `training.z_loss`.
        metrics: Means of the metrics of the objective's own loss, by name.
    """

    mean: float
    tokens: int
    auxiliary: float | None = None
    z_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepLoss(Protocol):
    """Loss that a training step minimizes.

    Attributes:
        reads_logits: Whether the loss is computed from this rank's logits `[s, b, v/t]` instead of token losses.
        adds_up: Whether losses and reports of parts of the tokens add up to the values for all tokens.
        report_size: Length of the report of a micro-batch.
    """

    @property
    def reads_logits(self) -> bool:
        """Whether the loss is computed from this rank's logits `[s, b, v/t]` instead of token losses."""

    @property
    def adds_up(self) -> bool:
        """Whether losses and reports of parts of the tokens add up to the values for all tokens."""

    @property
    def report_size(self) -> int:
        """Length of the report of a micro-batch."""

    def __call__(self, output: Tensor | LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a micro-batch's losses, which backward differentiates, and the micro-batch's report.

        The report is float64 `[report_size]` and begins with the sum and the number of the losses. `output` is the
        output of the last stage.
        """
        ...

    def count(self, batch: Batch) -> Tensor:
        """Return the number of losses in a micro-batch of whole sequences, float64 `[]`."""
        ...

    def mean(self, report: Sequence[float]) -> BatchLoss:
        """Return the losses of a global batch, computed from the sum of its reports."""
        ...


@dataclass(frozen=True)
class LabelLoss:
    """Cross-entropy of the unmasked labels, plus the weighted mean of the model's further losses, plus the z-loss.

    The report holds the sum and the number of the token losses, the same pair for each further loss, and the z-loss.

    Args:
        further: Number of further losses: one for each depth of multi-token prediction, or one for the binary head.
        weight: Weight of the mean of the further losses.
        has_z_loss: Whether the output layer has a z-loss, which is then reported as a metric.
    """

    further: int
    weight: float
    has_z_loss: bool
    reads_logits: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    @property
    def report_size(self) -> int:
        """Length of the report of a micro-batch."""
        return 2 * (1 + self.further) + 1

    def __call__(self, output: Tensor | LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a micro-batch's losses and the micro-batch's report."""
        assert isinstance(output, LabelLosses)
        mask_sb, b = torch.ones_like(output.cross_entropy), len(microbatch.tokens)
        if microbatch.loss_mask is not None:
            mask_sb = microbatch.loss_mask.transpose(0, 1)
        masked_losses = (output.cross_entropy * mask_sb, output.z_loss * mask_sb)
        entropies, z_losses, counts = ([part.sum() for part in x.split(b, dim=1)] for x in (*masked_losses, mask_sb))
        loss, z_loss = self._weighted(entropies), self._weighted(z_losses)
        sums = [*(x for pair in zip(entropies, counts) for x in pair), z_loss]
        return loss, torch.stack([x.detach().double() for x in sums])

    def _weighted(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the token loss plus the weighted mean of the further losses."""
        loss, *further = losses
        return loss + self.weight * torch.stack(further).mean() if further else loss

    def count(self, batch: Batch) -> Tensor:
        """Return the number of unmasked tokens, float64 `[]`."""
        assert batch.loss_mask is not None
        return batch.loss_mask.sum(dtype=torch.float64)

    def mean(self, report: Sequence[float]) -> BatchLoss:
        """Return the losses of a global batch, computed from the sum of its reports."""
        loss, tokens, *further, z_loss = report
        count = max(tokens, 1.0)
        means = [loss_sum / max(number, 1.0) for loss_sum, number in zip(further[::2], further[1::2])]
        return BatchLoss(
            loss / count,
            int(tokens),
            auxiliary=sum(means) / len(means) if means else None,
            z_loss=z_loss / count if self.has_z_loss else None,
        )


@dataclass(frozen=True)
class OwnLoss:
    """Loss that the training objective itself defines, instead of cross-entropy."""

    objective: ObjectiveLoss

    @property
    def reads_logits(self) -> bool:
        """Whether the loss is computed from this rank's logits `[s, b, v/t]` instead of token losses."""
        return self.objective.reads_logits

    @property
    def adds_up(self) -> bool:
        """Whether losses and reports of parts of the tokens add up to the values for all tokens."""
        return self.objective.adds_up

    @property
    def report_size(self) -> int:
        """Length of the report of a micro-batch: loss, number of losses, and the objective's metrics."""
        return 2 + len(self.objective.metrics)

    def __call__(self, output: Tensor | LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a micro-batch's losses and the micro-batch's report."""
        return self.objective(output.cross_entropy if isinstance(output, LabelLosses) else output, microbatch)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of losses in a micro-batch of whole sequences, float64 `[]`."""
        return self.objective.count(batch)

    def mean(self, report: Sequence[float]) -> BatchLoss:
        """Return the loss and the metrics of a global batch, computed from the sum of its reports."""
        loss, number, *sums = report
        count = max(number, 1.0)
        metrics = {name: x / count for name, x in zip(self.objective.metrics, sums, strict=True)}
        return BatchLoss(loss / count, int(number), metrics=metrics)


@dataclass(frozen=True)
class TrainedStage:
    """Forward pass of a stage in training and evaluation, with the loss on the last stage.

    Args:
        stage: Model stage.
        loss: Loss that the step minimizes.
        nominal_tokens: Number of tokens in a global batch without masks. The loss is divided by it.
        loss_scale: Loss scale of fp16, fp32 `[]`, updated in place; None in other precisions.
    """

    stage: GPTStage
    loss: StepLoss
    nominal_tokens: int
    loss_scale: Tensor | None

    def __call__(self, x: Tensor | None, microbatch: Batch) -> StageOutput:
        """Return the stage's output, or on the last stage the scaled loss and the report of the micro-batch."""
        output: Tensor | SummedLoss = self.stage(x, microbatch, loss=self.part_loss(microbatch))
        return StageOutput(*output) if isinstance(output, SummedLoss) else StageOutput(output)

    def part_loss(self, microbatch: Batch) -> PartLoss:
        """Return the scaled loss of a micro-batch as a function of its parts."""
        return PartLoss(partial(self.of_part, microbatch), self.loss.reads_logits, self.loss.adds_up)

    def of_part(self, microbatch: Batch, output: Tensor | LabelLosses, part: TokenPart) -> tuple[Tensor, Tensor]:
        """Return the scaled loss of a part of a micro-batch, and its report."""
        loss, report = self.loss(output, microbatch.part(part) if self.loss.adds_up else microbatch)
        if self.loss_scale is not None:
            loss = loss * self.loss_scale
        return loss / self.nominal_tokens, report


@dataclass(frozen=True)
class ReferenceStage:
    """Forward pass of a stage of the frozen model that `loss` compares the trained model with."""

    stage: GPTStage
    loss: ObjectiveLoss

    def __call__(self, x: Tensor | None, microbatch: Batch) -> StageOutput:
        """Return the stage's output, and on the last stage also the reference output that the loss keeps."""

        def read(logits: Tensor, part: TokenPart) -> Tensor:
            return self.loss.reference_output(logits, microbatch.part(part))

        y: Tensor | LabelLosses = self.stage(x, microbatch, read=read if self.loss.reads_logits else None)
        if isinstance(y, LabelLosses):
            y = self.loss.reference_output(y.cross_entropy, microbatch)
        return StageOutput(y, None if self.stage.head is None else y)
