"""What is made of a whole source: its largest magnitudes, before it can be cast, and the sums of its columns.

Nothing is stored but a few numbers, so a program takes a tile as it lies in memory and computes it as the cast will.

Sums are float64 and stored tile by tile; who adds them up rounds once.

Maxima, of the whole or of all rows and all columns, are raised in memory by atomics. They are integers, the bits of
fp32 without a sign, whose order is that of the numbers and in which a NaN is above infinity: no NaN is lost, and an
atomic is one instruction.

Shapes: r rows, c columns of a part of the source.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.arithmetic import magnitude_bits, raise_to
from megafp8.kernels.tiles import column_maxima, computed, place


@triton.jit
def maxima_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, of_all, of_rows, of_columns, r, c, a, g, b,
                  stride_s, stride_b, SOURCE: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr, TILE_R: tl.constexpr,
                  TILE_C: tl.constexpr):  # fmt: skip
    """One tile of each part of the source."""
    i0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    y, y2 = computed(inputs, i0, i, j0, j, r, c, (a, g, b, stride_s, stride_b), SOURCE, HALF, INTERPRETED)
    bits = magnitude_bits(y)
    if COLUMNS:
        at, end, _ = place(j0, c, 0, SOURCE, HALF)
        raise_to(of_columns + at + j, column_maxima(bits, 8), at + j < end)
    if SOURCE == "swiglu_grad" or SOURCE == "qkv_grad":
        bits2 = magnitude_bits(y2)
        if COLUMNS:
            at, end, _ = place(j0, c, 1, SOURCE, HALF)
            raise_to(of_columns + at + j, column_maxima(bits2, 8), at + j < end)
        bits = tl.maximum(bits, bits2)
    if WHOLE:
        raise_to(of_all, tl.max(bits), None)
    if ROWS:
        raise_to(of_rows + i0 + i, tl.max(bits, axis=1), i0 + i < r)


@triton.jit
def sums_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, of_columns, r, c, a, g, b, stride_s, stride_b,
                SOURCE: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr, TILE_R: tl.constexpr,
                TILE_C: tl.constexpr):  # fmt: skip
    """Row `program_id(1)` of `of_columns`, float64, is the sums of columns over one tile's rows of each part."""
    i0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    y, y2 = computed(inputs, i0, i, j0, j, r, c, (a, g, b, stride_s, stride_b), SOURCE, HALF, INTERPRETED)
    at, end, width = place(j0, c, 0, SOURCE, HALF)
    row = of_columns + tl.program_id(1).to(tl.int64) * width
    tl.store(row + at + j, tl.sum(y.to(tl.float64), axis=0), mask=at + j < end)
    if SOURCE == "swiglu_grad" or SOURCE == "qkv_grad":
        at, end, width = place(j0, c, 1, SOURCE, HALF)
        tl.store(row + at + j, tl.sum(y2.to(tl.float64), axis=0), mask=at + j < end)
