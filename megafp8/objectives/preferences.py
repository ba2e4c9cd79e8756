"""Direct preference optimization (DPO): the preferred answer of each pair becomes more likely (Rafailov et al. 2023).

    documents of a sample     chosen 0, rejected 0, chosen 1, rejected 1, ..., padding
    log-ratio of an answer    log-probability under the policy - log-probability under the reference, summed over tokens
    margin                    beta · (log-ratio of chosen - log-ratio of rejected)
    loss of a pair            -(1 - e) · log sigmoid(margin) - e · log sigmoid(-margin), e = label_smoothing

Sources: arXiv:2305.18290, equation 7; conservative DPO: Mitchell 2023. Both answers of a pair are documents of one
sample, each with its prompt, so that they are in one micro-batch in any layout. The loss is the mean over the pairs of
a global batch.

`Batch.reference` has the log-probabilities under the reference, from the data or from a frozen model's forward pass.

Shapes: b micro-batch size, s sequence length, n documents per sample, p = n / 2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from megafp8.batch import Batch
from megafp8.objectives import Config, ObjectiveLoss, ObjectiveRecord, ParallelState, Parts
from megafp8.objectives.answers import Answers
from megafp8.parallel.tensor.mappings import reduce_from_tensor_parallel


@dataclass(frozen=True)
class Preferences:
    """Objective for pairs of documents with a loss mask.

    The parts of a sample may have the reference's log-probabilities.
    """

    answers: Answers

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the row of `answers`, `[3, s + 1]`, or `[4, s + 1]` with the bits of known log-probabilities."""
        row = self.answers.row([part[:2] for part in parts], index)
        if len(parts[0]) == 2:
            return row
        bits = np.concatenate([part[2] for part in parts])
        return np.concatenate([row, np.pad(bits, (0, row.shape[1] - len(bits)))[None]])

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows, with `documents`, and with `reference` if the rows have it."""
        batch, documents = self.answers.batch(rows), rows[:, 1, :-1].contiguous()
        if rows.shape[1] == 3:
            return replace(batch, documents=documents)
        known = rows[:, 3, :-1].contiguous().view(torch.float64)
        reference = known.new_zeros(len(rows), batch.room).scatter_(1, documents, known)
        return replace(batch, documents=documents, reference=reference)


class PreferenceLoss(ObjectiveLoss):
    """DPO loss of pairs. With context parallelism, every rank computes the loss of whole answers."""

    metrics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    adds_up = False

    def __init__(self, beta: float, label_smoothing: float, parallel: ParallelState) -> None:
        self.beta, self.label_smoothing, self.context = beta, label_smoothing, parallel.context

    def reference_output(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the log-probability of each document's answer, float64 `[b, n]`, from token losses `[s, b]`."""
        return -self._of_documents(output.transpose(0, 1), batch)

    def __call__(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch; see `ObjectiveLoss`."""
        assert batch.reference is not None
        ratio_bpa = (self.reference_output(output, batch) - batch.reference).unflatten(1, (-1, 2))
        pairs_bp = self._pairs(self._of_documents(torch.ones_like(output.transpose(0, 1)), batch))
        rewards_bpa = (self.beta * ratio_bpa).where(pairs_bp.unsqueeze(2), 0.0)
        chosen_bp, rejected_bp = rewards_bpa.unbind(2)
        margin_bp, e = chosen_bp - rejected_bp, self.label_smoothing
        loss_bp = -(1 - e) * logsigmoid(margin_bp) - e * logsigmoid(-margin_bp)
        loss = (loss_bp * pairs_bp).sum()
        sums = (loss, pairs_bp, chosen_bp, rejected_bp, margin_bp, margin_bp > 0)
        report = torch.stack([x.detach().double().sum() for x in sums])
        return loss, report if self.context.is_first else torch.zeros_like(report)

    def count(self, batch: Batch) -> Tensor:
        """Return the number of pairs, float64 `[]`."""
        ones_bs = torch.ones_like(batch.tokens, dtype=torch.float64)
        return self._pairs(_sums(ones_bs, batch)).sum(dtype=torch.float64)

    def _of_documents(self, x_bs: Tensor, batch: Batch) -> Tensor:
        return reduce_from_tensor_parallel(_sums(x_bs, batch), self.context.group)

    @staticmethod
    def _pairs(counts_bn: Tensor) -> Tensor:
        """Return which pairs exist, bool `[b, p]`. Both answers of a pair must have tokens."""
        return (counts_bn.unflatten(1, (-1, 2)) > 0).all(2)


def _sums(x_bs: Tensor, batch: Batch) -> Tensor:
    """Sum over this rank's counted tokens by document, deterministically; return float64 `[b, n]`."""
    assert batch.documents is not None
    assert batch.loss_mask is not None
    documents_n = torch.arange(batch.room, device=x_bs.device)
    belongs_bns = (batch.documents.unsqueeze(1) == documents_n.unsqueeze(1)) & (batch.loss_mask.unsqueeze(1) > 0)
    return torch.bmm(belongs_bns.double(), x_bs.double().unsqueeze(2)).squeeze(2)


def _loss(config: Config, parallel: ParallelState) -> PreferenceLoss:
    options = config.data.dpo
    assert options is not None
    return PreferenceLoss(options.beta, options.label_smoothing, parallel)


OBJECTIVE = ObjectiveRecord(
    lambda config: config.data.dpo is not None,
    lambda config, *_: Preferences(Answers(config.training.seq_length)),
    _loss,
)
