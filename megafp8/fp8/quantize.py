"""The cast, its inverse and the amax of a tensor, in plain PyTorch: the definition of all of FP8 here.

A cast is `x · scale` in fp32, clamped to the format's finite range, rounded to nearest even. Clamping comes first
because torch's own casts differ: E5M2 overflows to infinity, and E4M3 saturates or gives NaN depending on the release.
After it, an infinity saturates like any large value while a NaN stays a NaN, so a broken step stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.fp8.formats import Format


def amax(x: Tensor) -> Tensor:
    """Largest magnitude in `x`, fp32 `[]`. It is inf where x holds an inf **or a NaN**; 0 for an empty tensor.

    One value for "not finite" because backends disagree on the maximum of a NaN and a number, and a reduction over
    ranks must not lose it.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def quantize(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """`x · scale` in `fmt`: saturating, to nearest even; NaN stays NaN. Any shape; `scale` is fp32, broadcast."""
    return (x.float() * scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(x8: Tensor, scale_inv: Tensor) -> Tensor:
    """FP8 of any shape to fp32: `x8 · scale_inv`."""
    return x8.float() * scale_inv
