"""Casts with one factor a row or a block, in plain PyTorch: what the fused kernels must reproduce bit for bit.

With one factor for the whole tensor, an outlier anywhere pushes small values everywhere below what FP8 can hold. A
factor of its own for each row, or for each 128 neighbours, keeps the harm where the outlier is. The price is a factor
to store and to multiply by in the GEMM, and a second cast for the columns: the blocks of the transposed matrix hold
other elements, so its codes are other codes, made from the original values and never from the first cast's.

Blocks of 128×128 serve weights. They are their own transpose's blocks, so one cast serves both directions, but
gradients of activations are known to diverge under them.

A row or a column count that 128 does not divide leaves smaller blocks at the edges. A block without a finite, positive
amax (all zeros, or an infinity or NaN in it) has scale 1: zeros stay zeros, infinities saturate, NaN stays NaN. Those
rules, and rounding a scale down to a power of two, are `scale_from_amax`'s; the cast is `quantize`'s.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import quantize
from megafp8.fp8.scaling import scale_from_amax
from megafp8.fp8.tensor import BLOCK_1X128, BLOCK_128X128, ROW, Granularity, ScaledTensor, expand


def block_amax(x_rc: Tensor, granularity: Granularity) -> Tensor:
    """Largest magnitude of each block: any float dtype to fp32, shaped `granularity.grid(r, c)`; not for one factor a
    tensor. It is inf where the block holds an inf or a NaN, and 0 where the block is empty (a row of no columns)."""
    assert granularity.rows is not None
    r, c = x_rc.shape
    rows, columns = granularity.rows, granularity.columns or max(c, 1)
    down, across = granularity.grid(r, c)
    padded = F.pad(x_rc.detach().float().abs(), (0, across * columns - c, 0, down * rows - r))
    largest = padded.view(down, rows, across, columns).amax(dim=(1, 3))
    return largest.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _quantize(
    x_rc: Tensor, amax: Tensor, fmt: Format, granularity: Granularity, power_of_two: bool, eps: float
) -> ScaledTensor:
    scale = scale_from_amax(amax, fmt.max, eps=eps, power_of_two=power_of_two)
    data = quantize(x_rc, expand(scale, granularity, *x_rc.shape), fmt)
    return ScaledTensor(data, scale.reciprocal(), granularity)


def quantize_rows(
    x_rc: Tensor, fmt: Format, *, power_of_two: bool, eps: float, amax_r: Tensor | None = None
) -> ScaledTensor:
    """One factor a row: x `[r, c]`, any float dtype; factors `[r, 1]`. `amax_r`: the rows' amaxes, fp32 `[r]`, where
    they are those of longer rows that x is a part of."""
    amax = block_amax(x_rc, ROW) if amax_r is None else amax_r.unsqueeze(-1)
    return _quantize(x_rc, amax, fmt, ROW, power_of_two, eps)


def quantize_1x128(x_rc: Tensor, fmt: Format, *, power_of_two: bool, eps: float) -> ScaledTensor:
    """One factor for 128 neighbours in a row: x `[r, c]`, any float dtype; factors `[r, ⌈c/128⌉]`."""
    return _quantize(x_rc, block_amax(x_rc, BLOCK_1X128), fmt, BLOCK_1X128, power_of_two, eps)


def quantize_128x128(x_rc: Tensor, fmt: Format, *, power_of_two: bool, eps: float) -> ScaledTensor:
    """One factor for a square of 128×128: x `[r, c]`, any float dtype; factors `[⌈r/128⌉, ⌈c/128⌉]`."""
    return _quantize(x_rc, block_amax(x_rc, BLOCK_128X128), fmt, BLOCK_128X128, power_of_two, eps)
