"""FP8 and FP4 formats and their ranges (Micikevicius et al. 2022, arXiv:2209.05433).

E4M3 has more precision, and no infinity (torch's `e4m3fn`). E5M2 has more range, and follows IEEE. Activations and
weights need precision, gradients need range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """Floating-point format: its name in configs, the torch dtype that stores it, and its largest finite magnitude."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)

# Four bits (OCP microscaling formats 1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; neither infinity nor NaN.
# torch has no dtype with one such value per element, so values are stored in E4M3, which contains all of them.
E2M1 = Format("e2m1", torch.float8_e4m3fn, 6.0)
