"""Compute a tile, quantize it, write it both ways round: one kernel for every source and every granularity.

Quantizing in plain PyTorch moves some thirty bytes for each element of a bf16 tensor: an amax, a copy to fp32, a
product, a clamp, a cast, and later a transpose byte by byte. What must move is four: two bytes in, one out for the
rows, one for the columns. So one program takes a tile of the source, computes it in fp32 if it is an activation or a
norm, casts it and stores it as rows and as columns, the latter by words of four codes (`tiles`). Where both directions
have the same factors it casts twice nevertheless: the instruction casts pairs, which for the rows are neighbours in a
row and for the columns neighbours in a column, and taking a word's bytes apart would cost more.

What a tile is cast by is the other choice (`SCALES`):
    none      the values themselves, in the dtype of what they are stored in
    tensor    one factor; the tile's amax may be noted for a later step with one atomic
    current   one factor made of the amax
    vectors   a factor for each row of the rows and each row of the columns, made of their amaxes
    1x128     a tile is 128 × 128, so it holds whole blocks of its rows and its columns: one pass
    128x128   a tile is a block
Amaxes that must be known before (current, vectors) are `reductions`'. An activation that needs two passes is computed
twice from its inputs rather than stored in between: the same traffic, and no bf16 copy. The second pass goes backwards,
so it begins with what the cache still holds.

Shapes: r rows, c columns of a part of the source; a tile has TILE_R / 4 quads of rows. Amaxes are integers, the bits of
fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.arithmetic import codes, codes_of_four, inverse_of, magnitude_bits, raise_to, scale_of
from megafp8.kernels.tiles import column_maxima, four, largest_of_four, place, store_columns, store_rows


@triton.jit
def _factor(y, scale, column_scale, amax, i0, j0, r, c, eps, SCALES: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, TILE_R: tl.constexpr,
            TILE_C: tl.constexpr):  # fmt: skip
    """The one factor of a tile; a new one's reciprocal is stored."""
    if SCALES == "tensor":
        return tl.load(scale)
    if SCALES == "current":
        s = scale_of(tl.load(amax), FP8_MAX, eps, POWER_OF_TWO)
        tl.store(scale, inverse_of(s, POWER_OF_TWO), mask=i0 + j0 == 0)  # one program writes
        return s
    s = scale_of(tl.max(largest_of_four(y)), FP8_MAX, eps, POWER_OF_TWO)
    down, across = i0 // TILE_R, j0 // TILE_C
    if ROWS:
        tl.store(scale + down * (tl.cdiv(c, 4 * TILE_C) * 4) + across, inverse_of(s, POWER_OF_TWO))
    if COLUMNS:
        tl.store(column_scale + across * (tl.cdiv(r, 4 * TILE_R) * 4) + down, inverse_of(s, POWER_OF_TWO))
    return s


@triton.jit
def _vector(scale, amax, at, end, first, eps, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Factors made of the amaxes `at`, as far as `end`; their reciprocals are stored by one program, the `first`."""
    s = scale_of(tl.load(amax + at, mask=at < end, other=0), FP8_MAX, eps, POWER_OF_TWO)
    if first:
        tl.store(scale + at, inverse_of(s, POWER_OF_TWO), mask=at < end)
    return s


@triton.jit
def _block_rows(y, partner, scale, i0, i, j0, r, eps, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                TILE_R: tl.constexpr):  # fmt: skip
    """Factors of the rows of four tiles, made of the tiles and of `partner`, the other half of their blocks or
    themselves. The reciprocals of a block column lie together."""
    s0 = scale_of(_row_amaxes(y[0], partner[0]), FP8_MAX, eps, POWER_OF_TWO)
    s1 = scale_of(_row_amaxes(y[1], partner[1]), FP8_MAX, eps, POWER_OF_TWO)
    s2 = scale_of(_row_amaxes(y[2], partner[2]), FP8_MAX, eps, POWER_OF_TWO)
    s3 = scale_of(_row_amaxes(y[3], partner[3]), FP8_MAX, eps, POWER_OF_TWO)
    s = tl.join(tl.join(s0, s2), tl.join(s1, s3)).reshape(TILE_R)
    ii = tl.arange(0, TILE_R)
    tl.store(scale + (j0 // 128) * r + i0 + ii, inverse_of(s, POWER_OF_TWO), mask=i0 + ii < r)
    return s0[:, None], s1[:, None], s2[:, None], s3[:, None]


@triton.jit
def _row_amaxes(y, partner):
    return tl.max(tl.maximum(magnitude_bits(y), magnitude_bits(partner)), axis=1)


@triton.jit
def _block_columns(y, scale, i0, j0, j, end, c, eps, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    s = scale_of(column_maxima(largest_of_four(y), 16), FP8_MAX, eps, POWER_OF_TWO)
    tl.store(scale + (i0 // 128) * c + j0 + j, inverse_of(s, POWER_OF_TWO), mask=j0 + j < end)
    return s[None, :]


@triton.jit
def _cast(y, partner, rows, columns, scale, column_scale, amax, column_amax, i0, q, j0, j, r, quads, end, c, eps,
          SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr,
          FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr,
          TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """Four interleaved tiles of one part, at columns j0 + j of the matrix, c wide, as far as `end`."""
    i = 4 * q
    if RECORD:
        raise_to(amax, tl.max(largest_of_four(y)), None)
    if SCALES == "none":
        for k in tl.static_range(4):
            store_rows(rows, y[k].to(rows.dtype.element_ty), i0, i + k, j0, j, r, end, c)
    elif SCALES == "tensor" or SCALES == "current" or SCALES == "128x128":
        t = _factor(y, scale, column_scale, amax, i0, j0, r, c, eps, SCALES, ROWS, COLUMNS, FP8_MAX, POWER_OF_TWO,
                    TILE_R, TILE_C)  # fmt: skip
        s = (t, t, t, t)
    if SCALES != "none" and ROWS:
        if SCALES == "1x128":
            s = _block_rows(y, partner, scale, i0, i, j0, r, eps, FP8_MAX, POWER_OF_TWO, TILE_R)
        elif SCALES == "vectors":
            s = (
                _vector(scale, amax, i0 + i, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
                _vector(scale, amax, i0 + i + 1, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
                _vector(scale, amax, i0 + i + 2, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
                _vector(scale, amax, i0 + i + 3, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
            )
        for k in tl.static_range(4):
            store_rows(rows, codes(y[k] * s[k], FORMAT, FP8_MAX, INTERPRETED), i0, i + k, j0, j, r, end, c)
    if SCALES != "none" and COLUMNS:
        if SCALES == "1x128":
            t = _block_columns(y, column_scale, i0, j0, j, end, c, eps, FP8_MAX, POWER_OF_TWO)
        elif SCALES == "vectors":
            t = _vector(column_scale, column_amax, j0 + j, end, i0 == 0, eps, FP8_MAX, POWER_OF_TWO)[None, :]
        word = codes_of_four(y[0] * t, y[1] * t, y[2] * t, y[3] * t, FORMAT, FP8_MAX, INTERPRETED)
        store_columns(columns, word, i0, q, j0, j, r, quads, end, WORDS)


@triton.jit
def tile_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, rows, columns, scale, column_scale, amax,
                column_amax, r, c, a, g, b, stride_s, stride_b, quads, eps, SOURCE: tl.constexpr, HALF: tl.constexpr,
                SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr,
                WORDS: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                INTERPRETED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """One tile of each part of the source."""
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, b, stride_s, stride_b)
    across, down = tl.program_id(0), tl.program_id(1)
    if SCALES == "current" or SCALES == "vectors":
        across, down = tl.num_programs(0) - 1 - across, tl.num_programs(1) - 1 - down
    i0, j0 = down * TILE_R, across * TILE_C
    q, j = tl.arange(0, TILE_R // 4), tl.arange(0, TILE_C)
    y, y2 = four(inputs, i0, q, j0, j, r, c, heads, SOURCE, HALF, INTERPRETED)
    at, end, width = place(j0, c, 0, SOURCE, HALF)
    partner = y2 if SOURCE == "qkv_grad" else y
    _cast(y, partner, rows, columns, scale, column_scale, amax, column_amax, i0, q, at, j, r, quads, end, width, eps,
          SCALES, ROWS, COLUMNS, RECORD, WORDS, FORMAT, FP8_MAX, POWER_OF_TWO, INTERPRETED, TILE_R,
          TILE_C)  # fmt: skip
    if SOURCE == "swiglu_grad" or SOURCE == "qkv_grad":
        at, end, width = place(j0, c, 1, SOURCE, HALF)
        partner = y if SOURCE == "qkv_grad" else y2
        _cast(y2, partner, rows, columns, scale, column_scale, amax, column_amax, i0, q, at, j, r, quads, end, width,
              eps, SCALES, ROWS, COLUMNS, RECORD, WORDS, FORMAT, FP8_MAX, POWER_OF_TWO, INTERPRETED, TILE_R,
              TILE_C)  # fmt: skip
