"""Group relative policy optimization (GRPO; Shao et al. 2024, arXiv:2402.03300): advantages and loss of texts.

Several texts are sampled for each prompt. They form a *group*, and each text has a reward r. The advantage of a text
says how much better it is than its group, in standard deviations of the group. All tokens of the text have the same
advantage:

    A = (r - mean(r)) / std(r)
    loss[t] = -min(ratio[t] · A, clip(ratio[t], 1 - low, 1 + high) · A) + beta · kl[t]             equations 3 and 4
    ratio[t] = p(token t) / p_sampled(token t)        kl[t] = q - log q - 1,  q = p_reference(token t) / p(token t)

`kl` is an unbiased estimate of the divergence from a reference model, and it is never negative. If texts were sampled
with the weights that are trained, their ratio is 1 before the first update, and the gradient is the gradient of
-A · log p. Even in the first update ratios may differ from 1, because generation and training round differently; the
ratios correct for this.

The loss is the mean over the tokens of each text, averaged over the texts of a global batch. Texts are documents of
samples, each with its prompt. p is the distribution from which texts are sampled: the softmax of logits / temperature.

Shapes: p prompts (groups), g texts per prompt; b micro-batch size, s sequence length, n tokens of a text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.layers.head.op import at_temperature, vocab_parallel_cross_entropy
from megafp8.numerics.dtypes import DTYPES, sum_dtype
from megafp8.objectives import Config, LossMemory, ObjectiveLoss, ObjectiveRecord, ParallelState, Parts
from megafp8.objectives.answers import Answers

_LEAST_STD = 1e-4
"""Number added to the standard deviation, as in TRL, so that equal rewards give advantages of 0."""


class TokenLosses(NamedTuple):
    """Losses of tokens, and values for metrics."""

    loss_bs: Tensor
    """Loss of each token, differentiable."""
    clipped_bs: Tensor
    """Whether clipping removes the gradient of a token's ratio, bool."""
    kl_bs: Tensor
    """Divergence from the reference, without gradient; 0 without a reference."""


def group_advantages(rewards_pg: Tensor) -> Tensor:
    """Return the advantages of texts in their groups, `[p, g]`, with the sample standard deviation (g - 1).

    Raises:
        ValueError: Groups have one text, so there is nothing to compare it with.
    """
    if rewards_pg.shape[1] < 2:
        raise ValueError(
            "a group has one text, and GRPO compares the texts of a group; sample at least 2 of each prompt"
        )
    centered_pg = rewards_pg - rewards_pg.mean(dim=1, keepdim=True)
    return centered_pg / (rewards_pg.std(dim=1, keepdim=True) + _LEAST_STD)


def token_losses(
    logprobs_bs: Tensor,
    sampled_logprobs_bs: Tensor,
    advantages_bs: Tensor,
    *,
    reference_logprobs_bs: Tensor | None = None,
    low: float = 0.2,
    high: float = 0.2,
    beta: float = 0.0,
) -> TokenLosses:
    """Compute the loss of each token from log-probabilities of the tokens.

    Args:
        logprobs_bs: Log-probabilities under the model in training.
        sampled_logprobs_bs: Log-probabilities under the model that sampled the tokens.
        advantages_bs: Advantage of each token's text.
        reference_logprobs_bs: Log-probabilities under the reference model; None for no divergence term.
        low: Lower clipping range of the ratio: it is clipped at 1 - low.
        high: Upper clipping range of the ratio: it is clipped at 1 + high.
        beta: Weight of the divergence from the reference.
    """
    ratio_bs = (logprobs_bs - sampled_logprobs_bs.detach()).exp()
    gain_bs = ratio_bs * advantages_bs.detach()
    clipped_gain_bs = ratio_bs.clamp(1 - low, 1 + high) * advantages_bs.detach()
    loss_bs = -torch.minimum(gain_bs, clipped_gain_bs)
    kl_bs = torch.zeros_like(loss_bs)
    if reference_logprobs_bs is not None:
        kl_bs = _divergence(reference_logprobs_bs.detach() - logprobs_bs)
        loss_bs = loss_bs + beta * kl_bs
    return TokenLosses(loss_bs, (clipped_gain_bs < gain_bs).detach(), kl_bs.detach())


def _divergence(log_q: Tensor) -> Tensor:
    """Return q - log q - 1, which is 0 if log q is 0."""
    return log_q.expm1() - log_q


def text_part(
    tokens: NDArray[np.int64], prompt: int, logprobs: NDArray[np.float64], advantage: float
) -> NDArray[np.int64]:
    """Encode a text as a part of a sample.

    Args:
        tokens: Tokens of prompt and answer.
        prompt: Number of tokens of the prompt, which were not sampled.
        logprobs: Log-probabilities of the sampled tokens.
        advantage: Advantage of the text.

    Returns:
        Array `[6, n]`: tokens, whether each was sampled, and the four values of `Batch.sampled` as bits of float64.
    """
    values_4n, sampled_n = np.zeros((4, len(tokens))), np.arange(len(tokens)) >= prompt
    values_4n[:, prompt:] = np.stack(np.broadcast_arrays(logprobs, advantage, 1 / len(logprobs), 0.0))
    values_4n[3, prompt] = 1.0
    return np.concatenate([np.stack([tokens, sampled_n]), values_4n.view(np.int64)])


class _Sampled(NamedTuple):
    """Columns of `Batch.sampled`, with one value for each label."""

    logprobs_bs: Tensor
    """Log-probability of the label when it was sampled."""
    advantages_bs: Tensor
    """Advantage of the label's text."""
    weights_bs: Tensor
    """Reciprocal of the number of sampled tokens in the label's text."""
    firsts_bs: Tensor
    """1 for the first sampled token of a text, otherwise 0."""

    @classmethod
    def from_batch(cls, batch: Batch) -> _Sampled:
        """Return the columns of `batch.sampled`."""
        assert batch.sampled is not None
        return cls(*batch.sampled.unbind(2))


@dataclass(frozen=True)
class SampledTexts:
    """Objective for sampled texts, with the sampling data of each token (`text_part`)."""

    answers: Answers

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the row of `answers` and the bits of `Batch.sampled`, `[7, s + 1]`."""
        row = self.answers.row([part[:2] for part in parts], index)
        bits = np.concatenate([part[2:] for part in parts], axis=1)
        return np.concatenate([row, np.pad(bits, ((0, 0), (0, row.shape[1] - bits.shape[1])))])

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows, with `sampled`."""
        values_b4s = rows[:, 3:, 1:].contiguous().view(torch.float64)
        return replace(self.answers.batch(rows[:, :3]), sampled=values_b4s.transpose(1, 2).contiguous())


class GrpoLoss(ObjectiveLoss):
    """GRPO loss of sampled texts.

    Each metric is averaged over the tokens of each text, and then over texts:

    - `clip_ratio`: share of tokens for which clipping removes the gradient of the ratio.
    - `rollout_kl`: estimated divergence of the model in training from the model that sampled.
    - `rollout_difference`: absolute difference of the log-probabilities of these two models.
    - `kl`: divergence from the reference, if there is one.
    """

    def __init__(
        self, low: float, high: float, beta: float, temperature: float, vocab_size: int, parallel: ParallelState
    ) -> None:
        self.low, self.high, self.beta, self.temperature = low, high, beta, temperature
        self.vocab_size, self.group = vocab_size, parallel.tensor.group
        self.metrics = ("clip_ratio", "rollout_kl", "rollout_difference", *(["kl"] if beta else []))
        self.reads_logits = temperature != 1

    def reference_output(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the log-probabilities of labels, float64 `[s, b]`."""
        if self.reads_logits:
            logits_sbv, labels_sb = at_temperature(output, self.temperature), batch.labels.transpose(0, 1).contiguous()
            output = vocab_parallel_cross_entropy(logits_sbv, labels_sb, self.group, vocab_size=self.vocab_size)
        return -output.double()

    def __call__(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch; see `ObjectiveLoss`."""
        assert batch.loss_mask is not None
        sampled, counts_bs = _Sampled.from_batch(batch), batch.loss_mask > 0
        logprobs_bs, reference_bs = self.reference_output(output, batch).t().where(counts_bs, 0.0), None
        if self.beta:
            assert batch.reference is not None
            reference_bs = batch.reference.t().where(counts_bs, 0.0)
        losses = token_losses(
            logprobs_bs,
            sampled.logprobs_bs,
            sampled.advantages_bs,
            reference_logprobs_bs=reference_bs,
            low=self.low,
            high=self.high,
            beta=self.beta,
        )
        loss = (losses.loss_bs * sampled.weights_bs).sum()
        difference_bs = logprobs_bs.detach() - sampled.logprobs_bs
        values = [losses.clipped_bs, _divergence(difference_bs), difference_bs.abs(), losses.kl_bs]
        means = [(x_bs * sampled.weights_bs).sum() for x_bs in values[: len(self.metrics)]]
        return loss, torch.stack([loss.detach(), sampled.firsts_bs.sum(), *means])

    def count(self, batch: Batch) -> Tensor:
        """Return the number of texts, float64 `[]`."""
        return _Sampled.from_batch(batch).firsts_bs.sum()


def _loss(config: Config, parallel: ParallelState) -> GrpoLoss:
    options, size = config.data.grpo, config.spec.stem.vocab_size
    assert options is not None
    assert size is not None
    return GrpoLoss(options.clip_low, options.clip_high, options.beta, options.temperature, size, parallel)


def _memory(config: Config, tokens: int) -> LossMemory:
    """Return the memory of the loss: at another temperature than 1, a wide copy of the logits and the quotients."""
    options, compute = config.data.grpo, sum_dtype(DTYPES[config.training.precision]).itemsize
    assert options is not None
    columns = config.spec.stem.rows // config.parallel.tensor
    return LossMemory(computed=2 * compute * tokens * columns * (options.temperature != 1))


OBJECTIVE = ObjectiveRecord(
    lambda config: config.data.grpo is not None,
    lambda config, *_: SampledTexts(Answers(config.training.seq_length)),
    _loss,
    _memory,
)
