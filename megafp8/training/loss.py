"""The loss of a training step: what backward differentiates, what a rank reports, and the means over the global batch.

The differentiated loss is the sum over a micro-batch's tokens divided by the *nominal* number of tokens in the global
batch; in fp16, times the loss scale. Gradients summed over micro-batches, data-parallel and context-parallel ranks are
then the gradients of the mean over the whole batch, in any layout. If masks leave fewer tokens, the true number is
known only after all ranks have counted, and the gradients are multiplied by nominal / true once, before clipping.

An objective may have a loss of its own (`megafp8.objectives.ObjectiveLoss`), such as the loss of pairs of answers.
Gradients are then the gradients of the mean over the pairs of the whole batch.

The losses of multi-token prediction are divided by the same number (DeepSeek-V3, equation 24), though the last tokens
of a sample have none. So is the loss of BERT's binary head, which counts as often as its sample has tokens to predict.

A reported loss is nats per token of the data. Each regularizer is a metric of its own, as it enters the gradient: the
z-loss of the output layer, the losses of routers, the losses of indexers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.layers.head.op import LabelLosses
from megafp8.models.gpt import GPTStage
from megafp8.objectives import ObjectiveLoss
from megafp8.parallel.pipeline.engine import StageOutput


@dataclass(frozen=True)
class BatchLoss:
    """Losses of a global batch.

    Attributes:
        mean: Mean cross-entropy of the unmasked tokens in nats; or the mean of an objective's own loss
            (`megafp8.objectives.ObjectiveLoss`).
        tokens: Number of unmasked tokens, or of what the objective's loss counts.
        more: Mean of the model's other losses (`HeadSpec.extra_losses`): the loss of multi-token prediction over the
            tokens that have one to predict, averaged over depths, or the loss of the binary head.
        z_loss: z-loss of the output layer per token as it enters the gradient; None without `training.z_loss`.
        metrics: Means of the metrics of an objective's own loss, by name.
    """

    mean: float
    tokens: int
    auxiliary: float | None = None
    z_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepLoss(Protocol):
    """Loss that a training step minimizes.

    Attributes:
        reads_logits: Whether it reads this rank's logits `[s, b, v/t]`, not the losses of tokens.
        report_size: Length of its report.
    """

    @property
    def reads_logits(self) -> bool: ...

    @property
    def report_size(self) -> int: ...

    def __call__(self, output: Tensor | LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a micro-batch's losses, to be differentiated, and its report, float64 `[report_size]`.

        The report begins with the sum of losses and their number. `output` is the output of the last stage.
        """
        ...

    def count(self, batch: Batch) -> Tensor:
        """Return the number of losses of a micro-batch of whole sequences, float64 `[]`."""
        ...

    def mean(self, report: Sequence[float]) -> BatchLoss:
        """Return the losses of a global batch, given the sum of its reports."""
        ...


@dataclass(frozen=True)
class LabelLoss:
    """Cross-entropy of the labels that count, plus the weighted mean of the model's further losses, plus the z-loss.

    The report has the sum and the number of the losses of tokens, then of each further loss, and last the z-loss.

    Args:
        further: Number of further losses: one for each depth of multi-token prediction, or one of the binary head.
        weight: Weight of the mean of the further losses.
        has_z_loss: Whether the output layer has a z-loss, which is then a metric.
    """

    further: int
    weight: float
    has_z_loss: bool
    reads_logits: ClassVar[bool] = False

    @property
    def report_size(self) -> int:
        return 2 * (1 + self.further) + 1

    def __call__(self, output: Tensor | LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
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
        """Return the loss of tokens plus the weighted mean of the further losses."""
        loss, *further = losses
        return loss + self.weight * torch.stack(further).mean() if further else loss

    def count(self, batch: Batch) -> Tensor:
        assert batch.loss_mask is not None
        return batch.loss_mask.sum(dtype=torch.float64)

    def mean(self, report: Sequence[float]) -> BatchLoss:
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
    """The loss of an objective that has one of its own."""

    objective: ObjectiveLoss

    @property
    def reads_logits(self) -> bool:
        return self.objective.reads_logits

    @property
    def report_size(self) -> int:
        return 2 + len(self.objective.metrics)

    def __call__(self, output: Tensor | LabelLosses, microbatch: Batch) -> tuple[Tensor, Tensor]:
        return self.objective(token_output(output), microbatch)

    def count(self, batch: Batch) -> Tensor:
        return self.objective.count(batch)

    def mean(self, report: Sequence[float]) -> BatchLoss:
        loss, number, *sums = report
        count = max(number, 1.0)
        metrics = {name: x / count for name, x in zip(self.objective.metrics, sums, strict=True)}
        return BatchLoss(loss / count, int(number), metrics=metrics)


def token_output(output: Tensor | LabelLosses) -> Tensor:
    """Return the last stage's output as an objective's own loss reads it: logits, or the losses of tokens `[s, b]`."""
    return output.cross_entropy if isinstance(output, LabelLosses) else output


@dataclass(frozen=True)
class TrainedStage:
    """Forward pass of a stage in training and evaluation, with the loss on the last stage.

    Args:
        stage: Model stage.
        loss: Loss that the step minimizes.
        nominal_tokens: Number of tokens of a global batch without masks, by which the loss is divided.
        loss_scale: Loss scale of fp16, fp32 `[]`, updated in place; None in other precisions.
    """

    stage: GPTStage
    loss: StepLoss
    nominal_tokens: int
    loss_scale: Tensor | None

    def __call__(self, x: Tensor | None, microbatch: Batch) -> StageOutput:
        output: Tensor | LabelLosses = self.stage(x, microbatch, logits=self.loss.reads_logits)
        if self.stage.head is None:
            assert isinstance(output, Tensor)
            return StageOutput(output)
        loss, report = self.loss(output, microbatch)
        if self.loss_scale is not None:
            loss = loss * self.loss_scale
        return StageOutput(loss / self.nominal_tokens, report)


@dataclass(frozen=True)
class ReferenceStage:
    """Forward pass of a stage of the model that `loss` compares the trained model with."""

    stage: GPTStage
    loss: ObjectiveLoss

    def __call__(self, x: Tensor | None, microbatch: Batch) -> StageOutput:
        y = token_output(self.stage(x, microbatch, logits=self.loss.reads_logits))
        return StageOutput(y, None if self.stage.head is None else self.loss.reference_output(y, microbatch))
