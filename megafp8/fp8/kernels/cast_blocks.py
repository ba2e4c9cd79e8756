"""Casts by blocks of 128 neighbours in a row, of the rows and of the columns, in one pass over memory.

A program takes a square of 128 × 128, which holds whole blocks both ways. To hold all of it in registers until the
amaxes of its columns are known would leave room for one or two programs on a multiprocessor, and the barriers of their
reductions would be waited for, not overlapped. So it goes over the square twice, from loads of its own, the second of
which hit the cache: first in strips of whole rows, which lie within a warp, so that there is no barrier; then in strips
of whole columns. A strip is small, programs are many, and an activation is computed twice.

Shapes: r rows, c columns of a part of the source.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.fp8.kernels.arithmetic import codes, codes_of_four, inverse_of, magnitude_bits, scale_of
from megafp8.fp8.kernels.tiles import computed, four, largest_of_four, place, store_columns, store_rows

BLOCK: tl.constexpr = tl.constexpr(128)


@triton.jit
def _rows(y, bits, rows, scale, i0, i, j0, j, r, end, c, eps, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr,
          POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Cast rows whose amaxes are `bits`; the factors of a block column lie together."""
    s = scale_of(bits, FP8_MAX, eps, POWER_OF_TWO)
    tl.store(scale + (j0 // BLOCK) * r + i0 + i, inverse_of(s, POWER_OF_TWO), mask=i0 + i < r)
    store_rows(rows, codes(y * s[:, None], FORMAT, FP8_MAX, INTERPRETED), i0, i, j0, j, r, end, c)


@triton.jit
def _columns(y, columns, scale, i0, q, j0, j, r, quads, end, c, eps, WORDS: tl.constexpr, FORMAT: tl.constexpr,
             FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    s = scale_of(tl.max(largest_of_four(y), axis=0), FP8_MAX, eps, POWER_OF_TWO)
    tl.store(scale + (i0 // BLOCK) * c + j0 + j, inverse_of(s, POWER_OF_TWO), mask=j0 + j < end)
    s = s[None, :]
    word = codes_of_four(y[0] * s, y[1] * s, y[2] * s, y[3] * s, FORMAT, FP8_MAX, INTERPRETED)
    store_columns(columns, word, i0, q, j0, j, r, quads, end, WORDS)


@triton.jit
def block_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, rows, columns, scale, column_scale, r, c, a, g, b,
                 stride_s, stride_b, quads, eps, SOURCE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, WORDS: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr,
                 POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr, STRIP_R: tl.constexpr,
                 STRIP_C: tl.constexpr, VECTOR: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """One square of each part of the source; of a qkv gradient, whose heads are 128 wide, a head."""
    WIDTH: tl.constexpr = 64 if SOURCE == "qkv_grad" else 128
    PARTS: tl.constexpr = 2 if SOURCE == "swiglu_grad" or SOURCE == "qkv_grad" else 1
    i0, j0 = tl.program_id(1) * BLOCK, tl.program_id(0) * WIDTH
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, b, stride_s, stride_b)
    if ROWS:
        j = tl.arange(0, WIDTH)
        for n in tl.range(0, BLOCK // STRIP_R, loop_unroll_factor=UNROLL):
            i = n * STRIP_R + tl.arange(0, STRIP_R)
            y, y2 = computed(inputs, i0, i, j0, j, r, c, heads, SOURCE, HALF, INTERPRETED)
            bits = tl.max(magnitude_bits(y), axis=1)
            bits2 = tl.max(magnitude_bits(y2), axis=1) if PARTS == 2 else bits
            if SOURCE == "qkv_grad":
                bits = tl.maximum(bits, bits2)
                bits2 = bits
            at, end, width = place(j0, c, 0, SOURCE, HALF)
            _rows(y, bits, rows, scale, i0, i, at, j, r, end, width, eps, FORMAT, FP8_MAX, POWER_OF_TWO, INTERPRETED)
            if PARTS == 2:
                at, end, width = place(j0, c, 1, SOURCE, HALF)
                _rows(y2, bits2, rows, scale, i0, i, at, j, r, end, width, eps, FORMAT, FP8_MAX, POWER_OF_TWO,
                      INTERPRETED)  # fmt: skip
    if COLUMNS:
        q = tl.arange(0, BLOCK // 4)
        j = tl.max_contiguous(tl.arange(0, STRIP_C), VECTOR)
        for n in tl.range(0, WIDTH // STRIP_C, loop_unroll_factor=UNROLL):
            jn = j0 + n * STRIP_C
            y, y2 = four(inputs, i0, q, jn, j, r, c, heads, SOURCE, HALF, INTERPRETED)
            at, end, width = place(jn, c, 0, SOURCE, HALF)
            _columns(y, columns, column_scale, i0, q, at, j, r, quads, end, width, eps, WORDS, FORMAT, FP8_MAX,
                     POWER_OF_TWO, INTERPRETED)  # fmt: skip
            if PARTS == 2:
                at, end, width = place(jn, c, 1, SOURCE, HALF)
                _columns(y2, columns, column_scale, i0, q, at, j, r, quads, end, width, eps, WORDS, FORMAT, FP8_MAX,
                         POWER_OF_TWO, INTERPRETED)  # fmt: skip
