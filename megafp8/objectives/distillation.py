"""Distillation: the student learns the teacher's distribution of the next token (Hinton et al. 2015, arXiv:1503.02531).

    loss of a token    weight · T² · KL(teacher ‖ student) + (1 - weight) · cross entropy

The gradient of the divergence falls with T², and the factor T² compensates for this. Samples and counted tokens are the
same as in the objective without a teacher. With `top_k`, the teacher's distribution covers only its k likeliest tokens,
while the student's distribution covers the whole vocabulary.

Shapes: s sequence length, b micro-batch size, v vocabulary size, k likeliest tokens, t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.data.samples import padded
from megafp8.layers.head.divergence_op import (
    vocab_parallel_divergence,
    vocab_parallel_log_softmax,
    vocab_parallel_top_k,
)
from megafp8.layers.head.op import vocab_parallel_cross_entropy
from megafp8.numerics.dtypes import DTYPES, sum_dtype
from megafp8.objectives import Config, LossMemory, Objective, ObjectiveLoss, ObjectiveRecord, ParallelState, Parts
from megafp8.objectives.answers import Answers
from megafp8.objectives.next_token import next_token


@dataclass(frozen=True)
class WithPlaces:
    """Objective that adds the places of tokens to the rows and micro-batches of `objective`.

    The last row of each part has the places. They locate the precomputed logits of tokens.
    """

    objective: Objective
    seq_length: int

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the rows of `objective`, followed by the row of places."""
        plain = [part[0] if len(part) == 2 else part[:-1] for part in parts]
        places = padded([part[-1] for part in parts], self.seq_length + 1)
        return np.concatenate([np.atleast_2d(self.objective.row(plain, index)), places[None]])

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of `objective` with `places`."""
        return replace(self.objective.batch(rows[:, :-1]), places=rows[:, -1, :-1].contiguous())


class DistillationLoss(ObjectiveLoss):
    """Distillation loss of tokens from this rank's logits.

    `Batch.reference` holds the teacher's logits `[s, b, v/t]`. With `top_k` it holds the logits and ids of the
    teacher's likeliest tokens, `[s, b, 2, k]`, the same on all ranks.
    """

    metrics = ("divergence", "cross_entropy")
    reads_logits = True

    def __init__(
        self, weight: float, temperature: float, top_k: int | None, vocab_size: int, parallel: ParallelState
    ) -> None:
        self.weight, self.temperature, self.top_k = weight, temperature, top_k
        self.vocab_size, self.group = vocab_size, parallel.tensor.group

    def reference_output(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the teacher's logits, or the logits and ids of its likeliest tokens, for `Batch.reference`."""
        if self.top_k is None:
            return output.detach()
        logits, ids = vocab_parallel_top_k(output, self.top_k, self.group, vocab_size=self.vocab_size)
        return torch.stack([logits, ids.to(logits.dtype)], dim=2)  # ids below 2²⁴ are exact

    def _teacher(self, reference: Tensor, columns: int) -> Tensor:
        """Return the teacher's probabilities of this rank's columns of the vocabulary, `[s, b, v/t]`."""
        if self.top_k is None:
            return vocab_parallel_log_softmax(
                reference, self.group, vocab_size=self.vocab_size, temperature=self.temperature
            ).exp_()
        logits_sbk, ids_sbk = reference.unbind(2)
        p_sbk = torch.softmax(logits_sbk / self.temperature, dim=-1)
        local_sbk = ids_sbk.long() - self.group.rank() * columns
        foreign_sbk = (local_sbk < 0) | (local_sbk >= columns)
        p_sbv = p_sbk.new_zeros(*p_sbk.shape[:-1], columns)
        return p_sbv.scatter_add_(-1, local_sbk.masked_fill(foreign_sbk, 0), p_sbk.masked_fill(foreign_sbk, 0.0))

    def __call__(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch; see `ObjectiveLoss`."""
        assert batch.reference is not None
        labels_sb, size = batch.labels.transpose(0, 1).contiguous(), self.vocab_size
        p_sbv = self._teacher(batch.reference, output.shape[-1])
        divergence_sb = vocab_parallel_divergence(
            output, p_sbv, self.group, vocab_size=size, temperature=self.temperature
        )
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.weight < 1):
            entropy_sb = vocab_parallel_cross_entropy(output, labels_sb, self.group, vocab_size=size)
        loss_sb = self.weight * self.temperature**2 * divergence_sb + (1 - self.weight) * entropy_sb
        mask_sb = torch.ones_like(loss_sb) if batch.loss_mask is None else batch.loss_mask.transpose(0, 1)
        loss = (loss_sb * mask_sb).sum()
        sums = (loss, mask_sb.sum(), (divergence_sb * mask_sb).sum(), (entropy_sb * mask_sb).sum())
        return loss, torch.stack([x.detach().double() for x in sums])

    def count(self, batch: Batch) -> Tensor:
        """Return the number of counted labels, float64 `[]`."""
        counted = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
        return counted.sum(dtype=torch.float64)


def _loss(config: Config, parallel: ParallelState) -> DistillationLoss:
    options, size = config.data.distillation, config.spec.stem.vocab_size
    assert options is not None
    assert size is not None
    return DistillationLoss(options.weight, options.temperature, options.top_k, size, parallel)


def _build(config: Config, *_: object) -> Objective:
    options, length = config.data.distillation, config.training.seq_length
    assert options is not None
    plain: Objective = next_token(config)
    if config.data.loss_on is not None:
        plain = Answers(length, all_tokens=config.data.loss_on == "all")
    return WithPlaces(plain, length) if options.logits == "precomputed" else plain


def _memory(config: Config, tokens: int) -> LossMemory:
    """Return the memory of the loss.

    The reference holds the teacher's logits, with `top_k` also ids. The peak has the distributions of teacher and
    student, two temporary tensors and a mask.
    """
    options, dtype = config.data.distillation, DTYPES[config.training.precision]
    assert options is not None
    compute, columns = sum_dtype(dtype).itemsize, config.spec.stem.rows // config.parallel.tensor
    reference = dtype.itemsize * columns if options.top_k is None else 2 * compute * options.top_k
    return LossMemory(tokens * reference, tokens * columns * (4 * compute + 1))


OBJECTIVE = ObjectiveRecord(
    lambda config: config.data.distillation is not None,
    _build,
    _loss,
    _memory,
)
