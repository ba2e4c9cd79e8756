"""The FP8 cast, its inverse, and the computation of scales, in plain PyTorch: the definition of FP8 in this package.

The cast computes `x · scale` in fp32, clamps to the format's finite range, and rounds to nearest even. It clamps first
because torch's casts differ: E5M2 overflows to infinity, and E4M3 saturates or returns NaN depending on the release. An
infinity therefore saturates like any large value. A NaN stays a NaN, so a broken step stays visible.

A scale maps the largest magnitude of its block to the format's maximum. FP8 has constant relative precision over its
normal range, so using the whole range costs nothing and loses the fewest small values. A scale is always finite and
positive, and so is its inverse, which the GEMM multiplies by. A block without a finite, positive amax (all zeros, or
with an infinity or a NaN) has the scale 1.

A power-of-two scale is rounded down by clearing its mantissa. Scaling is then exact and only the cast rounds, at the
cost of up to one bit of range. `fp8_max · 2^-margin / amax` with its mantissa cleared equals the older
`2^(floor(log2(fp8_max / amax)) - margin)`, but without the logarithm's rounding error, so one option serves both.

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
    """Return the largest magnitude in `x`, fp32 `[]`; inf if x contains an inf **or a NaN**, 0 if x is empty.

    A NaN becomes inf because backends disagree on the maximum of a NaN and a number, and a reduction over ranks must
    not lose the information.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def block_amax(x_rc: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitude of each block, fp32, of the shape `granularity.grid(r, c)`.

    The amax is inf if the block contains an inf or a NaN, and 0 if the block is empty (a row without columns). x has
    any float dtype. `TENSOR` is not supported; use `amax`.
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
    """Compute scales, `fp8_max · 2^-margin / max(amax, eps)`, elementwise.

    Args:
        amax: Largest magnitudes, fp32 of any shape.
        fp8_max: Largest magnitude of the FP8 format.
        margin: Powers of two left free above the amax.
        eps: Smallest amax that a scale is computed from.
        power_of_two: Whether to round scales down to powers of two.
        previous: Scale to use if the amax is 0, infinite or NaN. Default: 1.

    Returns:
        Scales, fp32, in the shape of `amax`. A quotient beyond fp32's range becomes fp32's maximum.
    """
    assert amax.dtype == torch.float32
    amax = amax.clamp(min=eps)
    # Divide tensors: torch computes `number / tensor` as a reciprocal and a product, which rounds twice.
    scale = (torch.ones_like(amax) * (fp8_max * 2.0**-margin) / amax).clamp(max=_FP32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & _FP32_EXPONENT_BITS).view(torch.float32)
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(amax) if previous is None else previous)


class ScaleRule(NamedTuple):
    """Rule that computes a scale from an amax: the arguments of `scale_from_amax`."""

    fp8_max: float
    margin: int = 0
    eps: float = 0.0
    power_of_two: bool = False

    def scale(self, amax: Tensor) -> Tensor:
        """Compute scales from amaxes, both fp32 of any shape; 1 for an amax that is 0, infinite or NaN."""
        return scale_from_amax(amax, self.fp8_max, margin=self.margin, eps=self.eps, power_of_two=self.power_of_two)


def quantize(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Cast `x · scale` to `fmt` with saturation, rounding to nearest even. NaN stays NaN.

    x has any shape, and the fp32 `scale` is broadcast.
    """
    return (x.float() * scale).clamp_(-fmt.max, fmt.max).to(fmt.dtype)


def dequantize(x8: Tensor, scale_inv: Tensor) -> Tensor:
    """Return `x8 · scale_inv` in fp32; x8 is FP8 data of any shape."""
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
    """Cast x, `[r, c]` of any float dtype, with one scale per block. Blocks at the edges may be smaller.

    If x is a shard of a larger matrix, `amax` contains the amaxes of the larger matrix's blocks.
    """
    amax = block_amax(x_rc, granularity) if amax is None else amax
    scale = scale_from_amax(amax, fmt.max, eps=eps, power_of_two=power_of_two)
    return ScaledTensor(_quantize_by(x_rc, scale, granularity, fmt), scale.reciprocal(), granularity)


def _quantize_by(x_rc: Tensor, scale: Tensor, granularity: Granularity, fmt: Format) -> Tensor:
    """Cast x, `[r, c]`, to `fmt` with the scale of each block. Only partial blocks need one scale per element."""
    r, c = x_rc.shape
    rows, columns = granularity.rows, granularity.columns or c
    if rows is None or not x_rc.numel() or r % rows or c % columns:
        return quantize(x_rc, expand(scale, granularity, r, c), fmt)
    return quantize(x_rc.reshape(r // rows, rows, c // columns, columns), scale[:, None, :, None], fmt).view(r, c)
