"""Casts of a source: compute a tile, quantize it, and store it rowwise and columnwise, in one kernel.

In PyTorch, quantizing moves about thirty bytes for each element of a bf16 tensor: for an amax, a copy to fp32, a
product, a clamp, a cast, and later a transpose. Four bytes suffice: two are read, and one is written for each
orientation. A program of this kernel computes a tile in fp32, casts it, and stores it twice, columnwise in words of
four bytes (`tiles`). It casts twice even if both orientations have the same scales: the instruction casts pairs, which
are neighbors in a row for one orientation and in a column for the other, and unpacking words would cost more.

SCALES is the granularity. The last column names the reference, in `megafp8.numerics.reference` or in the recipe's file.

    none      values without a scale, in the dtype of their storage             materialize
    tensor    a given scale; the tile's amax may be recorded by one atomic      cast_tensor
    current   one scale, computed from the tensor's amax                        cast_current
    vectors   a scale for each row, or column, computed from their amaxes       cast_rows
    1x128     a tile is 128 × 128 and contains whole blocks both ways: one pass cast_1x128
    128x128   a tile is a block                                                 cast_128x128

Amaxes that must be known before the cast (current, vectors) are computed by `reductions`. An activation that needs two
passes is computed twice instead of being stored in between, which causes equal traffic, but needs no bf16 copy. The
second pass runs backwards, so that it begins with data that is still in the cache.

Shapes: r rows, c columns of a part of the source; a tile has TILE_R / 4 quads of rows. Amaxes are integers, the bits of
fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.arithmetic import atomic_amax, inverse, magnitude_bits, scale_from_amax, to_fp8, to_fp8_words
from megafp8.kernels.launch import TritonKernel
from megafp8.kernels.tiles import column_amax, compute_quads, part_columns, quad_amax, store_columnwise, store_rowwise


@triton.jit
def _tile_scale(y, scale, columnwise_scale, amax, i0, j0, r, c, eps, SCALES: tl.constexpr, ROWWISE: tl.constexpr,
                COLUMNWISE: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, TILE_R: tl.constexpr,
                TILE_C: tl.constexpr):  # fmt: skip
    """Return the scale of a tile that has only one, and store its reciprocal."""
    if SCALES == "current":
        s = scale_from_amax(tl.load(amax), FP8_MAX, eps, POWER_OF_TWO)
        tl.store(scale, inverse(s, POWER_OF_TWO), mask=i0 + j0 == 0)  # one program writes
        return s
    s = scale_from_amax(tl.max(quad_amax(y)), FP8_MAX, eps, POWER_OF_TWO)
    down, across = i0 // TILE_R, j0 // TILE_C
    if ROWWISE:
        tl.store(scale + down * (tl.cdiv(c, 4 * TILE_C) * 4) + across, inverse(s, POWER_OF_TWO))
    if COLUMNWISE:
        tl.store(columnwise_scale + across * (tl.cdiv(r, 4 * TILE_R) * 4) + down, inverse(s, POWER_OF_TWO))
    return s


@triton.jit
def _vector_scales(scale, amax, at, end, first, eps, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the scales for the amaxes at the positions `at` below `end`. The `first` program stores reciprocals."""
    s = scale_from_amax(tl.load(amax + at, mask=at < end, other=0), FP8_MAX, eps, POWER_OF_TWO)
    if first:
        tl.store(scale + at, inverse(s, POWER_OF_TWO), mask=at < end)
    return s


@triton.jit
def _rowwise_block_scales(y, partner, scale, scale_stride, i0, i, j0, r, eps, FP8_MAX: tl.constexpr,
                          POWER_OF_TWO: tl.constexpr, TILE_R: tl.constexpr):  # fmt: skip
    """Return the scales of the rows of four tiles, and store their reciprocals.

    `partner` is the other half of the blocks, or the tiles themselves. The reciprocals of a column of blocks are
    contiguous, and `scale_stride` is the distance to the next column of blocks.
    """
    s0 = scale_from_amax(_row_amax(y[0], partner[0]), FP8_MAX, eps, POWER_OF_TWO)
    s1 = scale_from_amax(_row_amax(y[1], partner[1]), FP8_MAX, eps, POWER_OF_TWO)
    s2 = scale_from_amax(_row_amax(y[2], partner[2]), FP8_MAX, eps, POWER_OF_TWO)
    s3 = scale_from_amax(_row_amax(y[3], partner[3]), FP8_MAX, eps, POWER_OF_TWO)
    s = tl.join(tl.join(s0, s2), tl.join(s1, s3)).reshape(TILE_R)
    ii = tl.arange(0, TILE_R)
    tl.store(scale + (j0 // 128) * scale_stride + i0 + ii, inverse(s, POWER_OF_TWO), mask=i0 + ii < r)
    return s0[:, None], s1[:, None], s2[:, None], s3[:, None]


@triton.jit
def _row_amax(y, partner):
    return tl.max(tl.maximum(magnitude_bits(y), magnitude_bits(partner)), axis=1)


@triton.jit
def _columnwise_block_scales(y, scale, p0, j0, j, end, c, eps, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    s = scale_from_amax(column_amax(quad_amax(y), 16), FP8_MAX, eps, POWER_OF_TWO)
    tl.store(scale + (p0 // 128) * c + j0 + j, inverse(s, POWER_OF_TWO), mask=j0 + j < end)
    return s[None, :]


@triton.jit
def record_amax(amax, parts, SOURCE: tl.constexpr):
    """Update `amax` with the amax of the parts of a source, by one atomic."""
    bits = quad_amax(parts[0])
    if SOURCE == "gated_grad" or SOURCE == "qkv_grad":
        bits = tl.maximum(bits, quad_amax(parts[1]))
    atomic_amax(amax, tl.max(bits), None)


@triton.jit
def cast(y, partner, rowwise, columnwise, scale, columnwise_scale, amax, columnwise_amax, i0, p0, q, j0, j, r, quads,
         end, c, scale_stride, first, eps, SCALES: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
         WORDS: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
         INTERPRETED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
         FULL: tl.constexpr = False):  # fmt: skip
    """Cast four interleaved tiles of one part, at columns j0 + j below `end` of the matrix, which is c wide.

    The rows of the tiles, from i0 on and below r, begin at `p0` in the columnwise copy. `scale` is a value if SCALES is
    "tensor", else a pointer. `scale_stride` is the distance between the rowwise scales of neighboring columns of 1×128
    blocks. `first` means that no rows are above the tile's rows.
    """
    i = 4 * q
    if SCALES == "none":
        for k in tl.static_range(4):
            store_rowwise(rowwise, y[k].to(rowwise.dtype.element_ty), i0, i + k, j0, j, r, end, c, FULL)
    elif SCALES == "tensor":
        t, s = scale, (scale, scale, scale, scale)
    elif SCALES == "current" or SCALES == "128x128":
        t = _tile_scale(y, scale, columnwise_scale, amax, i0, j0, r, c, eps, SCALES, ROWWISE, COLUMNWISE, FP8_MAX,
                        POWER_OF_TWO, TILE_R, TILE_C)  # fmt: skip
        s = (t, t, t, t)
    if SCALES != "none" and ROWWISE:
        if SCALES == "1x128":
            s = _rowwise_block_scales(y, partner, scale, scale_stride, i0, i, j0, r, eps, FP8_MAX, POWER_OF_TWO, TILE_R)
        elif SCALES == "vectors":
            s = (
                _vector_scales(scale, amax, i0 + i, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
                _vector_scales(scale, amax, i0 + i + 1, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
                _vector_scales(scale, amax, i0 + i + 2, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
                _vector_scales(scale, amax, i0 + i + 3, r, j0 == 0, eps, FP8_MAX, POWER_OF_TWO)[:, None],
            )
        for k in tl.static_range(4):
            store_rowwise(rowwise, to_fp8(y[k] * s[k], FORMAT, FP8_MAX, INTERPRETED), i0, i + k, j0, j, r, end, c,
                          FULL)  # fmt: skip
    if SCALES != "none" and COLUMNWISE:
        if SCALES == "1x128":
            t = _columnwise_block_scales(y, columnwise_scale, p0, j0, j, end, c, eps, FP8_MAX, POWER_OF_TWO)
        elif SCALES == "vectors":
            t = _vector_scales(columnwise_scale, columnwise_amax, j0 + j, end, first, eps, FP8_MAX,
                               POWER_OF_TWO)[None, :]  # fmt: skip
        word = to_fp8_words(y[0] * t, y[1] * t, y[2] * t, y[3] * t, FORMAT, FP8_MAX, INTERPRETED)
        store_columnwise(columnwise, word, p0, q, j0, j, r, quads, end, WORDS, FULL)


@TritonKernel
def tile_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, statistics, weights, rowwise, columnwise, scale,
                columnwise_scale, amax, columnwise_amax, r, c, a, g, b, stride_s, stride_b, quads, eps,
                SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr, SCALES: tl.constexpr,
                ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, RECORD: tl.constexpr, WORDS: tl.constexpr,
                FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr,
                TILE_R: tl.constexpr, TILE_C: tl.constexpr, FULL: tl.constexpr, QUAD_ANGLES: tl.constexpr):  # fmt: skip
    """Cast one tile of each part of the source.

    FULL means that all tiles are inside the source. QUAD_ANGLES means that four consecutive tokens, from a multiple of
    four on, have the same angles.
    """
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, b, stride_s, None if QUAD_ANGLES else stride_b, statistics, weights)
    across, down = tl.program_id(0), tl.program_id(1)
    if SCALES == "current" or SCALES == "vectors":
        across, down = tl.num_programs(0) - 1 - across, tl.num_programs(1) - 1 - down
    if SCALES == "tensor":
        scale = tl.load(scale)  # load before the atomic's barrier; after it, the load would delay the stores
    i0, j0 = down * TILE_R, across * TILE_C
    q, j = tl.arange(0, TILE_R // 4), tl.arange(0, TILE_C)
    parts = compute_quads(inputs, i0, q, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
    if RECORD:
        record_amax(amax, parts, SOURCE)
    for part in tl.static_range(2 if SOURCE == "gated_grad" or SOURCE == "qkv_grad" else 1):
        at, end, width = part_columns(j0, c, part, SOURCE, HALF)
        partner = parts[1 - part if SOURCE == "qkv_grad" else part]
        cast(parts[part], partner, rowwise, columnwise, scale, columnwise_scale, amax, columnwise_amax, i0, i0, q, at,
             j, r, quads, end, width, r, i0 == 0, eps, SCALES, ROWWISE, COLUMNWISE, WORDS, FORMAT, FP8_MAX,
             POWER_OF_TWO, INTERPRETED, TILE_R, TILE_C, FULL)  # fmt: skip
