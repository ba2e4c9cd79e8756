"""Recurrence of Mamba-1 (Gu & Dao 2023, arXiv:2312.00752), token by token: specification of `megafp8.layers.mamba1.op`.

The state S has d numbers for each channel. Each token has an input x, a step and an output gate z per channel, and
vectors b and c of d numbers, with which all channels write to and read from their states:

    Δ = softplus(step + bias)
    S ← exp(−exp(log_rate) Δ) S + Δ x bᵀ;    y = (S c + skip · x) silu(z)

Shapes: s sequence length, b micro-batch size; n channels, d state numbers per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class SelectiveTokens(NamedTuple):
    """Tensors of the tokens: x, the steps before bias and softplus, the gates before SiLU, b, and c."""

    x_sbn: Tensor
    step_sbn: Tensor
    z_sbn: Tensor
    b_sbd: Tensor
    c_sbd: Tensor


class SelectiveWeights(NamedTuple):
    """Parameters: the bias of the steps, the logarithms of the decay rates, and the weights of x in the outputs."""

    step_bias_n: Tensor
    log_rate_nd: Tensor
    skip_n: Tensor


def recurrence(
    tokens: SelectiveTokens, weights: SelectiveWeights, state_bnd: Tensor, starts_sb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    Args:
        tokens: Tensors of the tokens.
        weights: Parameters.
        state_bnd: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.

    Returns:
        Outputs `[s, b, n]`, and the state after the last token.
    """
    rate_nd, outputs = -weights.log_rate_nd.exp(), []
    for i, (x, step, z, b, c) in enumerate(zip(*tokens, strict=True)):
        if starts_sb is not None:
            state_bnd = state_bnd * ~starts_sb[i][:, None, None]
        step = F.softplus(step + weights.step_bias_n)
        state_bnd = state_bnd * (rate_nd * step.unsqueeze(-1)).exp()
        state_bnd = state_bnd + torch.einsum("bn,bd->bnd", step * x, b)
        y = torch.einsum("bnd,bd->bn", state_bnd, c) + weights.skip_n * x
        outputs.append(y * F.silu(z))
    return torch.stack(outputs), state_bnd
