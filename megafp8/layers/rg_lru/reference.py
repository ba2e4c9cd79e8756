"""Recurrence of the RG-LRU (arXiv:2402.19427), token by token: specification of `megafp8.layers.rg_lru.op`.

The state h has one number for each channel. Each token has an input x, an input gate i and a recurrence gate r per
channel, and each channel has a parameter Λ:

    a = exp(−8 softplus(Λ) σ(r))
    h ← a h + √(1 − a²) σ(i) x;    h ← σ(i) x at the first token of a document

Shapes: s sequence length, b micro-batch size; n channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def recurrence(
    x_sbn: Tensor, input_sbn: Tensor, recurrence_sbn: Tensor, rate_n: Tensor, state_bn: Tensor, starts_sb: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    Args:
        x_sbn: Inputs.
        input_sbn: Input gates before the sigmoid.
        recurrence_sbn: Recurrence gates before the sigmoid.
        rate_n: Parameters Λ.
        state_bn: State before the first token.
        starts_sb: Tokens that begin a document or sequence, bool.

    Returns:
        States after each token, `[s, b, n]`, which are the outputs, and the state after the last token.
    """
    outputs = []
    for x, i, r, starts_b in zip(x_sbn, input_sbn, recurrence_sbn, starts_sb, strict=True):
        a = torch.exp(-8 * F.softplus(rate_n) * r.sigmoid())
        gated, starts = i.sigmoid() * x, starts_b.unsqueeze(-1)
        state_bn = torch.where(starts, gated, a * state_bn + (1 - a * a).sqrt() * gated)
        outputs.append(state_bn)
    return torch.stack(outputs), state_bn
