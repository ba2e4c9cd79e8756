"""Recurrence of the RG-LRU (arXiv:2402.19427) with PyTorch's operations, as a scan over all tokens at a time.

The state h has one number for each channel. Each token has an input x, an input gate i and a recurrence gate r per
channel, and each channel has a parameter Λ:

    a = exp(−8 softplus(Λ) σ(r))
    h ← a h + √(1 − a²) σ(i) x;    h ← σ(i) x at the first token of a document

1 − a² comes from the logarithm of a, without cancellation.

Shapes: s sequence length, b micro-batch size; n channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.recurrent.scan import Scan


def log_decays(recurrence_sbn: Tensor, rate_n: Tensor) -> Tensor:
    """Return the logarithms of the decays a, from the recurrence gates before the sigmoid."""
    return -8 * F.softplus(rate_n) * recurrence_sbn.sigmoid()


def gated_scan(x_sbn: Tensor, input_sbn: Tensor, log_decay_sbn: Tensor, state_bn: Tensor, starts_sb: Tensor) -> Tensor:
    """Return the states after each token, `[s, b, n]`, which are the outputs. Differentiable.

    Args:
        x_sbn: Inputs. All tensors are in one dtype, fp32 or wider.
        input_sbn: Input gates before the sigmoid.
        log_decay_sbn: Logarithms of the decays a.
        state_bn: State before the first token.
        starts_sb: Tokens that begin a document or sequence, bool.
    """
    starts = starts_sb.unsqueeze(-1)
    # The limit keeps the gradient finite where a gate underflows and a is 1.
    scale = (-torch.expm1(2 * log_decay_sbn)).clamp_min(torch.finfo(log_decay_sbn.dtype).tiny).sqrt()
    added = torch.where(starts, 1.0, scale) * input_sbn.sigmoid() * x_sbn
    states_sbn: Tensor = Scan.apply(log_decay_sbn.exp() * ~starts, added, state_bn)
    return states_sbn
