"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with Llama-3's frequency scaling.

A head's first and second half are the pairs that are rotated (Hugging Face's "rotate half" layout), so Hugging Face
weights need no permutation. Angles are computed in float64 and their cosines stored in fp32: at position 100,000 an
fp32 angle is off by up to 0.004 radians, a bf16 one by whole rotations, and the table is small.

Shapes: s sequence, b micro-batch, a heads, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafp8.config import RopeScaling


def inverse_frequencies(d: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians per position of each pair, `[d/2]` float64.

    With `scaling`, wavelengths above the original context are stretched by `factor`, short ones unchanged, and those
    between interpolated (Llama 3.1's reference code).
    """
    frequencies = theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=device) / d)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    ratio = scaling.original_max_position_embeddings / wavelengths
    unscaled = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = unscaled.clamp(0, 1)  # 1: high frequency; 0: low frequency, stretched
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def rotary_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle for `positions` `[s]` or `[b, s]`: each `[s, 1 or b, 1, d/2]`.

    In fp32, or float64 if `dtype` is.
    """
    positions_sb = positions.unsqueeze(-1) if positions.dim() == 1 else positions.transpose(0, 1)
    angles = positions_sb[:, :, None, None].double() * frequencies
    table = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(table), angles.sin().to(table)
