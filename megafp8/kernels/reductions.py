"""Reductions of a source: amaxes, which some casts need first, and sums of columns.

References: `amax` and `column_sums` in `megafp8.numerics.reference`, `amaxes` in `megafp8.numerics.recipes.rowwise`.
The kernels store only a few numbers, so a program reads a tile in its memory order, and computes it like the cast does.

Sums are float64, with one row for each row of tiles; the caller adds these rows and rounds once. Amaxes, of the whole
source or of all rows and columns, are updated by atomics. They are stored as integers, the bits of |x| in fp32, which
are ordered like the numbers, with NaN above infinity: no NaN is lost, and an atomic is one instruction.

Shapes: r rows, c columns of a part of the source.
"""

from __future__ import annotations

import triton.language as tl

from megafp8.kernels.arithmetic import atomic_amax, magnitude_bits
from megafp8.kernels.launch import TritonKernel
from megafp8.kernels.tiles import column_amax, compute, part_columns


@TritonKernel
def amax_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, statistics, weights, of_all, of_rows, of_columns,
                r, c, a, g, b, stride_s, stride_b, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
                WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
                TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """Update amaxes with one tile of each part of the source."""
    i0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, b, stride_s, stride_b, statistics, weights)
    y, y2 = compute(inputs, i0, i, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED)
    bits = magnitude_bits(y)
    if COLUMNS:
        at, end, _ = part_columns(j0, c, 0, SOURCE, HALF)
        atomic_amax(of_columns + at + j, column_amax(bits, 8), at + j < end)
    if SOURCE == "gated_grad" or SOURCE == "qkv_grad":
        bits2 = magnitude_bits(y2)
        if COLUMNS:
            at, end, _ = part_columns(j0, c, 1, SOURCE, HALF)
            atomic_amax(of_columns + at + j, column_amax(bits2, 8), at + j < end)
        bits = tl.maximum(bits, bits2)
    if WHOLE:
        atomic_amax(of_all, tl.max(bits), None)
    if ROWS:
        atomic_amax(of_rows + i0 + i, tl.max(bits, axis=1), i0 + i < r)


@TritonKernel
def sums_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, statistics, weights, of_columns, r, c, a, g, b,
                stride_s, stride_b, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
                INTERPRETED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """Store sums of columns over the rows of one tile of each part, as row `program_id(1)` of `of_columns`, float64."""
    i0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, b, stride_s, stride_b, statistics, weights)
    parts = compute(inputs, i0, i, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED)
    for part in tl.static_range(2 if SOURCE == "gated_grad" or SOURCE == "qkv_grad" else 1):
        at, end, width = part_columns(j0, c, part, SOURCE, HALF)
        row = of_columns + tl.program_id(1).to(tl.int64) * width
        tl.store(row + at + j, tl.sum(parts[part].to(tl.float64), axis=0), mask=at + j < end)
