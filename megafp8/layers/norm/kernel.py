"""Kernels for a norm with the residual addition before it, for its statistics alone, and for its backward.

References: `megafp8.layers.norm.reference` for statistics and gradients, `megafp8.numerics.sources.Normalized` for the
values of the norm, and `megafp8.layers.dropout.reference` for the dropout of the branch.

One program reads a row once, holds it in registers, and reduces it in float64. Hopper computes float64 at half the
rate of fp32, so memory remains the limit. In backward each of p programs takes every p-th row and sums the weight
gradient over these rows. The p partial sums are added at the end; `add_sums_` adds them directly to a gradient that is
accumulated over micro-batches. While a program computes a row, it loads its next row. Without this it would wait for
memory, because few programs run at once.

Shapes: r rows, c columns, p programs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import BoundKernel, TritonKernel
from megafp8.layers.dropout.kernel import NUMBERS, dropped, numbers
from megafp8.layers.dropout.reference import Dropout
from megafp8.layers.norm.reference import EXACT

# Programs of backward, as measured: two per multiprocessor (an H200 has 132) with 32 columns per thread; six with 16
# columns per thread where rows are narrow.
_PROGRAMS, _NARROW = 4 if INTERPRETED else 264, 2048


def _forward_kernel(x_rc, branch_rc, sum_rc, mean_r, rstd_r, weight_c, bias_c, y_rc, position_r, sample_r, c, eps,
                    key0, key1, threshold, scale, ADD: tl.constexpr, CENTERED: tl.constexpr,
                    ZERO_CENTERED: tl.constexpr, VALUES: tl.constexpr, DROPOUT: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    i = tl.program_id(0)
    j = tl.arange(0, WIDTH)
    at = i.to(tl.int64) * c + j
    x = tl.load(x_rc + at, mask=j < c, other=0.0)
    if ADD:
        branch = tl.load(branch_rc + at, mask=j < c, other=0.0).to(tl.float32)
        if DROPOUT:
            position, sample = tl.load(position_r + i), tl.load(sample_r + i)
            branch = dropped(branch, position, sample, key0, key1, threshold, scale, WIDTH)
        x = (x.to(tl.float32) + branch).to(x.dtype)
        tl.store(sum_rc + at, x, mask=j < c)
    x = x.to(tl.float32)
    if CENTERED:
        mean = (tl.sum(x.to(tl.float64)) / c).to(tl.float32)
        tl.store(mean_r + i, mean)
        x = tl.where(j < c, x - mean, 0.0)
    exact = x.to(tl.float64)
    variance = (tl.sum(exact * exact) / c).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(rstd_r + i, rstd)
    if VALUES:
        weight = tl.load(weight_c + j, mask=j < c, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight = 1.0 + weight
        y = x * rstd * weight
        if CENTERED:
            y = y + tl.load(bias_c + j, mask=j < c, other=0.0).to(tl.float32)
        tl.store(y_rc + at, y.to(y_rc.dtype.element_ty), mask=j < c)


@triton.jit
def _row_of_backward(dy_rc, x_rc, dresidual_rc, mean_r, rstd_r, i, r, j, c, RESIDUAL: tl.constexpr,
                     CENTERED: tl.constexpr):  # fmt: skip
    """Load columns j of row i of dy, x and the residual gradient, and the row's mean and rstd.

    From row r on, load row r - 1 instead, so that a program may prefetch beyond its last row.
    """
    i = tl.minimum(i, r - 1)
    at = i * c + j
    dy = tl.load(dy_rc + at, mask=j < c, other=0.0)
    x = tl.load(x_rc + at, mask=j < c, other=0.0)
    dresidual = tl.load(dresidual_rc + at, mask=j < c, other=0.0) if RESIDUAL else dy
    rstd = tl.load(rstd_r + i)
    mean = tl.load(mean_r + i) if CENTERED else rstd
    return dy, x, dresidual, mean, rstd


def _backward_kernel(dy_rc, x_rc, mean_r, rstd_r, weight_c, dresidual_rc, dx_rc, dbranch_rc, dweight_pc, dbias_pc,
                     position_r, sample_r, r, c, key0, key1, threshold, scale, RESIDUAL: tl.constexpr,
                     CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, DROPOUT: tl.constexpr,
                     WIDTH: tl.constexpr):  # fmt: skip
    j = tl.arange(0, WIDTH)
    weight = tl.load(weight_c + j, mask=j < c, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight = 1.0 + weight
    dweight = tl.zeros([WIDTH], tl.float64)
    dbias = tl.zeros([WIDTH], tl.float64)
    i = tl.program_id(0).to(tl.int64)
    row = _row_of_backward(dy_rc, x_rc, dresidual_rc, mean_r, rstd_r, i, r, j, c, RESIDUAL, CENTERED)
    while i < r:
        dy, x, dresidual, mean, rstd = row
        row = _row_of_backward(
            dy_rc, x_rc, dresidual_rc, mean_r, rstd_r, i + tl.num_programs(0), r, j, c, RESIDUAL, CENTERED
        )
        dy, x = dy.to(tl.float32), x.to(tl.float32)
        if CENTERED:
            x = x - mean
            dbias += dy.to(tl.float64)
        normalized = x * rstd
        dweight += (dy * normalized).to(tl.float64)
        scaled = dy * weight
        dx = scaled - normalized * (tl.sum((scaled * normalized).to(tl.float64)) / c).to(tl.float32)
        if CENTERED:
            dx = dx - (tl.sum(scaled.to(tl.float64)) / c).to(tl.float32)
        dx = dx * rstd
        if RESIDUAL:
            dx = dx + dresidual.to(tl.float32)
        dx = dx.to(dx_rc.dtype.element_ty)
        at = i * c + j
        tl.store(dx_rc + at, dx, mask=j < c)
        if DROPOUT:
            position, sample = tl.load(position_r + i), tl.load(sample_r + i)
            dbranch = dropped(dx.to(tl.float32), position, sample, key0, key1, threshold, scale, WIDTH)
            tl.store(dbranch_rc + at, dbranch.to(dbranch_rc.dtype.element_ty), mask=j < c)
        i += tl.num_programs(0)
    at = tl.program_id(0) * c + j
    tl.store(dweight_pc + at, dweight, mask=j < c)
    if CENTERED:
        tl.store(dbias_pc + at, dbias, mask=j < c)


@TritonKernel
def add_sums_kernel(partials_pc, total_c, rounded_c, p, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the column sums of COLUMNS columns to `total_c`, rounded to the dtype of `rounded_c`, which is not read."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float64)
    first = 0
    while first < p:
        i = first + tl.arange(0, ROWS)
        inside = (i < p)[:, None] & (j < c)[None, :]
        sums += tl.sum(tl.load(partials_pc + i[:, None] * c + j[None, :], mask=inside, other=0.0), axis=0)
        first += ROWS
    rounded = sums.to(tl.float32).to(rounded_c.dtype.element_ty).to(tl.float32)
    tl.store(total_c + j, tl.load(total_c + j, mask=j < c) + rounded, mask=j < c)


forward_kernel = TritonKernel(_forward_kernel, do_not_specialize=NUMBERS)
backward_kernel = TritonKernel(_backward_kernel, do_not_specialize=NUMBERS)


@cache
def _bound(kernel: TritonKernel, c: int, centered: bool, **constants: bool) -> BoundKernel:
    width = max(4, next_power_of_2(c))
    warps = min(16, max(4, width // 512))
    if kernel is backward_kernel:
        warps = min(16, max(2, width // (512 if c <= _NARROW else 1024)))
    return kernel.bind(CENTERED=centered, WIDTH=width, num_warps=warps, enable_fp_fusion=False, **constants)


_NO_DROPOUT = (0, 0, 0, 0.0)


def statistics(
    x: Tensor, branch: Tensor | None, eps: float, *, centered: bool, dropout: Dropout | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `x + branch` in x's dtype (x itself without a branch), and the mean and rstd of each row of the sum.

    Reference: `megafp8.layers.norm.reference.statistics`. `x` and `branch` are contiguous, `[..., c]`. `dropout`
    applies to `branch` before the addition.
    """
    return _forward(x, branch, None, None, eps, dropout, centered=centered)[:3]


def normalize(
    x: Tensor, branch: Tensor | None, weight_c: Tensor, bias_c: Tensor | None, eps: float,
    dropout: Dropout | None = None, *, zero_centered: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Return the results of `statistics` and the norm of the sum, in the shape and dtype of x.

    With a bias the norm is centered (LayerNorm); without one it is RMSNorm.
    """
    return _forward(x, branch, weight_c, bias_c, eps, dropout, centered=bias_c is not None, zero_centered=zero_centered)


def _forward(
    x: Tensor, branch: Tensor | None, weight_c: Tensor | None, bias_c: Tensor | None, eps: float,
    dropout: Dropout | None, *, centered: bool, zero_centered: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Return the sum, its mean and rstd, and the norm. Without a weight the last is not computed: it is x."""
    c = x.shape[-1]
    r = x.numel() // c
    x = kernel_input(x)
    total = x if branch is None else torch.empty_like(x)
    rstd_r = torch.empty(r, dtype=torch.float32, device=x.device)
    mean_r = torch.empty_like(rstd_r) if centered else None
    y = x if weight_c is None else torch.empty_like(x)
    if r:
        how = {"ADD": branch is not None, "ZERO_CENTERED": zero_centered, "VALUES": weight_c is not None}
        kernel = _bound(forward_kernel, c, centered, DROPOUT=dropout is not None, **how)
        tensors = (
            x, x if branch is None else kernel_input(branch), total, rstd_r if mean_r is None else mean_r, rstd_r,
            x if weight_c is None else kernel_input(weight_c), x if bias_c is None else kernel_input(bias_c), y,
            *((x, x) if dropout is None else dropout.places.tensors),
        )  # fmt: skip
        kernel.launch((r, 1), tensors, (c, eps, *(_NO_DROPOUT if dropout is None else numbers(dropout))))
    return total, mean_r, rstd_r, y


def backward(
    dy: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight_c: Tensor, dresidual: Tensor | None,
    dropout: Dropout | None = None, *, zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of x, the branch, the weight and the bias.

    Reference: `megafp8.layers.norm.reference.backward`. The gradients of x and the branch are contiguous, `[..., c]`;
    the branch's is x's gradient, with `dropout` applied if there is one. The gradients of weight and bias are partial
    sums `[p, c]` in float64; the bias's is None without `mean_r`.
    """
    r, c = x_rc.shape
    dy, x, weight = kernel_input(dy), kernel_input(x_rc), kernel_input(weight_c)
    dx = torch.empty_like(dy)
    dbranch = dx if dropout is None else torch.empty_like(dy)
    programs = min(r, _PROGRAMS if c > _NARROW else 3 * _PROGRAMS)
    dweight_pc = torch.empty(programs, c, dtype=EXACT, device=x.device)
    dbias_pc = None if mean_r is None else torch.empty_like(dweight_pc)
    if r:
        how = {"RESIDUAL": dresidual is not None, "ZERO_CENTERED": zero_centered}
        kernel = _bound(backward_kernel, c, mean_r is not None, DROPOUT=dropout is not None, **how)
        tensors = (
            dy, x, rstd_r if mean_r is None else mean_r, rstd_r, weight,
            dy if dresidual is None else kernel_input(dresidual), dx, dbranch, dweight_pc,
            dweight_pc if dbias_pc is None else dbias_pc,
            *((dx, dx) if dropout is None else dropout.places.tensors),
        )  # fmt: skip
        kernel.launch((programs, 1), tensors, (r, c, *(_NO_DROPOUT if dropout is None else numbers(dropout))))
    return dx, dbranch, dweight_pc, dbias_pc


def add_sums_(total_c: Tensor, partials_pc: Tensor, like: Tensor) -> None:
    """Compute `total_c += partials_pc.sum(dim=0).float().to(like.dtype)` in one launch.

    `total_c` is contiguous fp32.
    """
    p, c = partials_pc.shape
    assert total_c.shape == (c,)
    assert total_c.dtype == torch.float32
    assert total_c.is_contiguous()
    if p:
        kernel = add_sums_kernel.bind(ROWS=256, COLUMNS=8, num_warps=4, enable_fp_fusion=False)
        kernel.launch((ceil_div(c, 8), 1), (partials_pc, total_c, like), (p, c))
