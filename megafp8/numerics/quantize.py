"""The FP8 cast, its inverse, and scales from amaxes, in plain PyTorch: the definition of FP8 in this package.

The cast is `x · scale` in fp32, clamped to the format's finite range, rounded to nearest even. It clamps first because
torch's own casts differ: E5M2 overflows to infinity, and E4M3 saturates or gives NaN depending on the release. So an
infinity saturates like any large value, and a NaN stays a NaN: a broken step stays visible.

A scale maps the largest magnitude of its block to the format's maximum. FP8 has the same relative precision over its
normal range, so using all of it costs nothing and loses the fewest small values. A scale is always finite and positive,
so its inverse, which the GEMM multiplies by, is too. A block without a finite, positive amax (all zeros, or an infinity
or NaN in it) has scale 1.

A power-of-two scale has its mantissa cleared, that is, it is rounded down: scaling is then exact and only the cast
rounds, for up to one bit of range. `fp8_max · 2^-margin / amax` with its mantissa cleared equals the older
`2^(floor(log2(fp8_max / amax)) - margin)` without the logarithm's rounding error, so one option serves both.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.numerics.formats import Format
from megafp8.numerics.tensor import Granularity, ScaledTensor, expand

_FP32_MAX = torch.finfo(torch.float32).max
_FP32_EXPONENT_BITS = 0x7F800000


def amax(x: Tensor) -> Tensor:
    """Largest magnitude in `x`, fp32 `[]`; inf where x holds an inf **or a NaN**, 0 for an empty tensor.

    One value for "not finite" because backends disagree on the maximum of a NaN and a number, and a reduction over
    ranks must not lose it.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def block_amax(x_rc: Tensor, granularity: Granularity) -> Tensor:
    """Largest magnitude of each block: any float dtype to fp32, shaped `granularity.grid(r, c)`; not for per-tensor.

    It is inf where the block holds an inf or a NaN, and 0 where the block is empty (a row of no columns).
    """
    assert granularity.rows is not None
    r, c = x_rc.shape
    rows, columns = granularity.rows, granularity.columns or max(c, 1)
    down, across = granularity.grid(r, c)
    padded = x_rc.detach().float().abs()
    if (down * rows, across * columns) != (r, c):
        padded = F.pad(padded, (0, across * columns - c, 0, down * rows - r))
    largest = padded.reshape(down, rows, across, columns).amax(dim=(1, 3))
    return largest.nan_to_num(nan=torch.inf, posinf=torch.inf)


def scale_from_amax(
    amax: Tensor,
    fp8_max: float | Tensor,
    *,
    margin: int = 0,
    eps: float = 0.0,
    power_of_two: bool = False,
    previous: Tensor | None = None,
) -> Tensor:
    """`fp8_max · 2^-margin / max(amax, eps)`, elementwise: fp32 of any shape to fp32 of that shape.

    Where amax is 0, infinite or NaN the scale is `previous`, by default 1. A quotient beyond fp32 becomes fp32's
    maximum. `margin`: powers of two left free above amax. `power_of_two`: clear the mantissa (round down).
    """
    assert amax.dtype == torch.float32
    amax = amax.clamp(min=eps)
    # Tensor by tensor: torch computes `number / tensor` as a reciprocal and a product, which rounds twice.
    scale = (torch.ones_like(amax) * (fp8_max * 2.0**-margin) / amax).clamp(max=_FP32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & _FP32_EXPONENT_BITS).view(torch.float32)
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(amax) if previous is None else previous)


class ScaleRule(NamedTuple):
    """How a scale follows from an amax: the arguments of `scale_from_amax`."""

    fp8_max: float
    margin: int = 0
    eps: float = 0.0
    power_of_two: bool = False

    def scale(self, amax: Tensor) -> Tensor:
        """fp32 of any shape -> fp32 of that shape; 1 where amax is 0, infinite or NaN."""
        return scale_from_amax(amax, self.fp8_max, margin=self.margin, eps=self.eps, power_of_two=self.power_of_two)


def quantize(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """`x · scale` in `fmt`: saturating, to nearest even; NaN stays NaN. Any shape; `scale` is fp32, broadcast."""
    return (x.float() * scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(x8: Tensor, scale_inv: Tensor) -> Tensor:
    """FP8 of any shape to fp32: `x8 · scale_inv`."""
    return x8.float() * scale_inv


def quantize_blocks(
    x_rc: Tensor,
    fmt: Format,
    granularity: Granularity,
    *,
    power_of_two: bool,
    eps: float,
    amax: Tensor | None = None,
) -> ScaledTensor:
    """Casts x `[r, c]`, any float dtype, with one scale per block; a block at the edge may be smaller.

    `amax`: the blocks' amaxes, where they are those of a larger matrix that x is a shard of.
    """
    amax = block_amax(x_rc, granularity) if amax is None else amax
    scale = scale_from_amax(amax, fmt.max, eps=eps, power_of_two=power_of_two)
    return ScaledTensor(_quantize_by(x_rc, scale, granularity, fmt), scale.reciprocal(), granularity)


def _quantize_by(x_rc: Tensor, scale: Tensor, granularity: Granularity, fmt: Format) -> Tensor:
    """x `[r, c]` in `fmt` by the scale of each block. Whole blocks need no matrix of scales."""
    r, c = x_rc.shape
    rows, columns = granularity.rows, granularity.columns or c
    if rows is None or not x_rc.numel() or r % rows or c % columns:
        return quantize(x_rc, expand(scale, granularity, r, c), fmt)
    return quantize(x_rc.reshape(r // rows, rows, c // columns, columns), scale[:, None, :, None], fmt).view(r, c)
