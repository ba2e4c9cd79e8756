"""Largest magnitudes of a source, before it can be cast: of the whole, or of all its rows and all its columns.

Nothing is stored but a few maxima, so a program takes a tile as it lies in memory, computes it as the cast will, and
raises maxima in memory by atomics. They are integers, the bits of fp32 without a sign, whose order is that of the
numbers and in which a NaN is above infinity: no NaN is lost, and an atomic is one instruction.

Shapes: r rows, c columns of a part of the source.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.fp8.kernels.arithmetic import magnitude_bits, raise_to
from megafp8.fp8.kernels.tiles import computed, place


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
        raise_to(of_columns + at + j, tl.max(bits, axis=0), at + j < end)
    if SOURCE == "swiglu_grad" or SOURCE == "qkv_grad":
        bits2 = magnitude_bits(y2)
        if COLUMNS:
            at, end, _ = place(j0, c, 1, SOURCE, HALF)
            raise_to(of_columns + at + j, tl.max(bits2, axis=0), at + j < end)
        bits = tl.maximum(bits, bits2)
    if WHOLE:
        raise_to(of_all, tl.max(bits), None)
    if ROWS:
        raise_to(of_rows + i0 + i, tl.max(bits, axis=1), i0 + i < r)
