"""Attention with linear biases (ALiBi; Press et al. 2021, arXiv:2108.12409): scores fall with the distance of tokens.

Each head's slope is a power of two, 2^(-8 i / n) of head i of n, counted from 1. If n is no power of two, the first
heads have the slopes of the largest power of two below n, and the others those between, of twice that power.

Shapes: s tokens of a whole sequence, a query heads of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each of all heads."""
    power = 1 << (heads.bit_length() - 1)
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
    return [*(2 ** (-8 * i / power) for i in range(1, power + 1)), *between[: heads - power]]


def alibi_bias(s: int, heads: int, tensor: ProcessGroup, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`Scores.distance_bias_ar` of this tensor-parallel rank's heads of `heads`, `[a, 2s - 1]`, fp32 or wider."""
    own = heads // tensor.size()
    wide = torch.promote_types(dtype, torch.float32)
    slopes_a = torch.tensor(alibi_slopes(heads)[tensor.rank() * own :][:own], dtype=wide, device=device)
    return slopes_a.unsqueeze(1) * torch.arange(1 - s, s, dtype=wide, device=device)
