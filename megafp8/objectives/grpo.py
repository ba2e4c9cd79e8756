"""Group relative policy optimization (GRPO; Shao et al. 2024, arXiv:2402.03300): advantages and the loss of each token.

Of each prompt several texts are sampled, a *group*, each with a reward r. A text's advantage is how much better it is
than its group, in standard deviations of the group; all its tokens have it:

    A = (r - mean(r)) / std(r)
    loss[t] = -min(ratio[t] · A, clip(ratio[t], 1 - low, 1 + high) · A) + kl_weight · kl[t]        equations 3 and 4
    ratio[t] = p(token t) / p_sampled(token t)        kl[t] = q - log q - 1,  q = p_reference(token t) / p(token t)

`kl` is an unbiased estimate of the divergence from a reference model, and never negative. Texts that were sampled with
the weights that are trained have ratio 1 before the first update, and then the gradient is that of -A · log p.

Shapes: p prompts (groups), g texts of each; b texts, n tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_STD = 1e-4
"""Added to the standard deviation, as in TRL: rewards that are equal give advantages of 0."""


class TokenLosses(NamedTuple):
    """`loss_bn`: to be differentiated. Without gradient: `clipped_bn`, where the ratio's gradient is cut off, and
    `kl_bn`, 0 without a reference."""

    loss_bn: Tensor
    clipped_bn: Tensor
    kl_bn: Tensor


def group_advantages(rewards_pg: Tensor) -> Tensor:
    """The advantages of texts in their groups, `[p, g]`, with the sample's standard deviation (g - 1).

    ValueError for groups of one text, which have nothing to be compared with.
    """
    if rewards_pg.shape[1] < 2:
        raise ValueError(
            "a group has one text, and GRPO compares the texts of a group; sample at least 2 of each prompt"
        )
    centered_pg = rewards_pg - rewards_pg.mean(dim=1, keepdim=True)
    return centered_pg / (rewards_pg.std(dim=1, keepdim=True) + _LEAST_STD)


def token_losses(
    logprobs_bn: Tensor,
    sampled_logprobs_bn: Tensor,
    advantages_b: Tensor,
    *,
    reference_logprobs_bn: Tensor | None = None,
    low: float = 0.2,
    high: float = 0.2,
    kl_weight: float = 0.0,
) -> TokenLosses:
    """The loss of each token, from log-probabilities of the model that is trained, of the one that sampled, and of the
    reference."""
    ratio_bn = (logprobs_bn - sampled_logprobs_bn.detach()).exp()
    advantages_b1 = advantages_b.detach().unsqueeze(1)
    gain_bn = ratio_bn * advantages_b1
    clipped_gain_bn = ratio_bn.clamp(1 - low, 1 + high) * advantages_b1
    loss_bn = -torch.minimum(gain_bn, clipped_gain_bn)
    kl_bn = torch.zeros_like(loss_bn)
    if reference_logprobs_bn is not None:
        log_q_bn = reference_logprobs_bn.detach() - logprobs_bn
        kl_bn = log_q_bn.exp() - log_q_bn - 1
        loss_bn = loss_bn + kl_weight * kl_bn
    return TokenLosses(loss_bn, (clipped_gain_bn < gain_bn).detach(), kl_bn.detach())


def mean_over_texts(values_bn: Tensor, mask_bn: Tensor) -> Tensor:
    """The mean over texts of the mean over each one's tokens with mask 1; a text without any counts as 0."""
    lengths_b = mask_bn.sum(dim=1).clamp(min=1)
    return (torch.where(mask_bn.bool(), values_bn, 0.0).sum(dim=1) / lengths_b).mean()
