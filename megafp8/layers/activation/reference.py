"""Specification of xIELU, an activation with two learned numbers per layer (Huang & Schlag 2024, arXiv:2411.13010)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BETA = 0.5
"""Slope of xIELU at zero, from above."""
EPS = -1e-6
"""Largest argument of the exponential function."""


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Return xIELU of `x`: p·x² + x/2 for positive values, and n·(exp(x) - 1 - x) + x/2 for the others.

    Args:
        x: Input, in fp32 or wider.
        alpha_p: Inverse softplus of p, `[1]`.
        alpha_n: Inverse softplus of n - 1/2, `[1]`.
    """
    p, n = F.softplus(alpha_p), BETA + F.softplus(alpha_n)
    return BETA * x + torch.where(x > 0, p * x * x, n * (torch.expm1(x.clamp(max=EPS)) - x))
