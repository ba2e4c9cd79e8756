"""The eight-bit floating point formats and their ranges.

Micikevicius et al. 2022 (arXiv:2209.05433). E4M3 spends its bits on precision and has no infinity (torch's `e4m3fn`);
E5M2 spends them on range and follows IEEE. Activations and weights want the first, gradients the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A format: its name in configs, its torch dtype, and `max`, the largest finite magnitude."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
