"""Recurrence of the RG-LRU with PyTorch's operations, as a scan over all tokens at a time.

Reference and formulas: `megafp8.layers.rg_lru.reference`. 1 − a² comes from the logarithm of a, without cancellation.

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
    """Return the states of `megafp8.layers.rg_lru.reference.recurrence` after each token. Differentiable.

    All tensors are in one dtype, fp32 or wider.
    """
    starts = starts_sb.unsqueeze(-1)
    # The limit keeps the gradient finite where a gate underflows and a is 1.
    scale = (-torch.expm1(2 * log_decay_sbn)).clamp_min(torch.finfo(log_decay_sbn.dtype).tiny).sqrt()
    added = torch.where(starts, 1.0, scale) * input_sbn.sigmoid() * x_sbn
    states_sbn: Tensor = Scan.apply(log_decay_sbn.exp() * ~starts, added, state_bn)
    return states_sbn
