"""Casts with blocks of 16 (NVFP4) and 32 (MXFP8), dequantized to bf16, because Hopper does not support such blocks.

References: functions of equal names in `megafp8.numerics.recipes.nvfp4` and `mxfp8`, bit for bit.

A program reads a tile of the source from memory once, and writes it twice in its memory order: with blocks along its
columns and with blocks along its rows. bf16 GEMMs can transpose both operands, so nothing is transposed here.

NVFP4 transforms 16 rows of a column before it casts them. A tile is therefore split into 16 tiles of interleaved rows:
0, 16, 32, ..., then 1, 17, 33, ..., and so on. The transform and the amaxes of columns then combine whole tiles,
element by element, in a thread's registers. Blocks along a row belong to a few neighboring threads. For these, a few
rows at a time are read again, from the cache, because casting both ways at once would need too many registers.

*Arithmetic.* Arithmetic limits the speed of these casts, not memory, so every instruction matters
(docs/decisions/0005). A value is rounded to a format by adding and subtracting a power of two: 2^23 times the distance
between the format's neighboring values, which rounds to nearest even like fp32 does. For signed values it is 1.5 times
that power. The power is a multiple of the value's power of two, so each operation is one multiply-add with an exact
product. Values beyond the format's range are clamped first, so that nothing overflows.

*Stochastic rounding* uses half a word of Philox for each value in each orientation: eight neighbors in a row, or in a
column, share one call. The half-word k is put into the mantissa of an fp32 number, 96 + k·2^-17. Let P be the power of
two below the value (at least 1). The product of P and this number, plus the value, has the resolution P·2^-17, so the
sum is rounded to 2^-16 of the format's step, P / 2. Then it is rounded down to whole steps, by the rounding mode of one
instruction.

Masks and addresses cost as much as a stage of the transform. Kernels for matrices that consist of whole tiles (FULL)
therefore have no masks, and the number of columns is a constant (C).

Shapes: r rows, c columns of a part of the source; q groups of 16 rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, atomic_amax, ceil_div, magnitude_bits, reciprocal, scale_from_amax
from megafp8.kernels.launch import BoundKernel, TritonKernel
from megafp8.kernels.quantize import inputs_of
from megafp8.kernels.tiles import compute, part_columns, store_rowwise
from megafp8.numerics.formats import Format
from megafp8.numerics.philox import Key
from megafp8.numerics.sources import GatedGrad, MatrixSource, Plain, QKVGrad
from megafp8.numerics.stochastic_rounding import TensorNoise
from megafp8.numerics.tensor import DEQUANTIZED, QuantizedTensor, ScaledTensor

_NOISE_NUMBERS = ("row_key0", "row_key1", "column_key0", "column_key1")


@triton.jit
def _interleaved(inputs, i0, q, j0, j, r, c, heads, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
                 INTERPRETED: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Compute both parts of the source as 16 tiles each, with the rows i0 + 16q, i0 + 16q + 1, i0 + 16q + 2, ..."""
    first, second = (), ()
    for k in tl.static_range(16):
        y, z = compute(inputs, i0, 16 * q + k, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
        first += (y,)  # type: ignore[assignment]
        second += (z,)  # type: ignore[assignment]
    return first, second


@triton.jit
def _butterflies(z, DISTANCE: tl.constexpr):
    """Return sums and differences of the pairs among 16 tiles that are DISTANCE apart."""
    w = ()
    for k in tl.static_range(16):
        w += (z[k - DISTANCE] - z[k] if k & DISTANCE else z[k] + z[k + DISTANCE],)  # type: ignore[assignment]
    return w


@triton.jit
def _transformed(y, i, r, WHOLE: tl.constexpr):
    """Return `nvfp4.hadamard_sums` of 16 tiles with the rows i, i + 1, ...; all of them are below r if WHOLE."""
    z = _butterflies(_butterflies(_butterflies(_butterflies(y, 1), 2), 4), 8)
    if WHOLE:
        return z
    w = ()
    for k in tl.static_range(16):
        w += (tl.where((i + 16 <= r)[:, None], z[k], y[k] * 4.0),)  # type: ignore[assignment]
    return w


@triton.jit
def _larger(x, y):
    """Return the larger of x and |y|, or NaN if one of them is NaN."""
    return tl.maximum(x, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, y):
    """Return the larger of |x| and |y|, or NaN if one of them is NaN."""
    return tl.maximum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax_of_tiles(y):
    """Return the elementwise amax of tiles; NaN if an element of one is NaN."""
    amax = tl.abs(y[0])
    for k in tl.static_range(1, len(y)):
        amax = _larger(amax, y[k])
    return amax


@triton.jit
def _signed(size, x):
    """Return magnitudes with the signs of x."""
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(size, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Round magnitudes to nearest even, to MANTISSA bits after the first; below 2^LEAST, the step is constant."""
    power = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, (LEAST + 127) << 23)
    shift = (power + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    return (size + shift) - shift


@triton.jit
def _mx_scales(bits, FP8_MAX: tl.constexpr):
    """Return the scales 2^(127 - e) and 2^(e - 127) of blocks, as in `mxfp8.quantize_mxfp8`.

    The blocks' amaxes are given as `magnitude_bits`. FP8_MAX is 1.75 · 2^EXPONENT, so the exponent of amax / FP8_MAX,
    rounded up, is the difference of the exponents, plus one if the amax has a mantissa above 1.75. In this case, adding
    0.25 minus one bit carries into the exponent. There is one exception: the first amax above FP8_MAX · 2^-127 has a
    quotient that fp32 rounds to 2^-127.
    """
    EXPONENT: tl.constexpr = (15 if FP8_MAX == 57344.0 else 8) << 23
    bits -= (bits == EXPONENT + 0x600001).to(tl.int32)
    up = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - EXPONENT, 0)
    up = tl.where(bits >= 0x7F800000, 0x7F000000, up)
    down = 0x7F000000 - up
    scale = tl.where(down == 0, 0x00400000, down).to(tl.float32, bitcast=True)
    return scale, tl.where(up == 0, 0x00400000, up).to(tl.float32, bitcast=True)


@triton.jit
def _mx(x, scale, scale_inv, FP8_MAX: tl.constexpr):
    """Cast x with its block's scale, and dequantize it."""
    MANTISSA: tl.constexpr = 2 if FP8_MAX == 57344.0 else 3
    LEAST: tl.constexpr = -14 if FP8_MAX == 57344.0 else -6
    size = tl.minimum(tl.abs(x * scale), FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return _signed(_rounded(size, MANTISSA, LEAST) * scale_inv, x)


@triton.jit
def _clamped(x, INTERPRETED: tl.constexpr):
    """Clamp x to ±6. NaN stays NaN."""
    if INTERPRETED:
        x = tl.minimum(x, 6.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(x, -6.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.inline_asm_elementwise(
        "min.NaN.xorsign.abs.f32 $0, $1, 0f40C00000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _floor(x, power, INTERPRETED: tl.constexpr):
    """Round x down to a multiple of power / 2, and add power · (1.5·2^22 - 96); x is from 64 to 128 times `power`."""
    if INTERPRETED:
        return tl.floor(x * (2.0 / power)) * (power * 0.5) + power * 6291360.0
    return tl.inline_asm_elementwise(
        "fma.rm.f32 $0, $1, 0f4ABFFF40, $2;", "=f,f,f", [power, x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _nv_scales(amax, sixth, tensor_scale, INTERPRETED: tl.constexpr):
    """Return b and S / b of blocks with these amaxes; S / b is 0 if b is 0. `sixth` is S / 6."""
    size = tl.minimum(amax * sixth, 448.0)  # NaN becomes 448 too
    power = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23).to(tl.float32, bitcast=True)
    b = tl.fma(power, -1048576.0, tl.fma(power, 1048576.0, size))  # 2^20 rounds to three bits after the first
    factor = reciprocal(tl.where(b == 0.0, 1.0, b), INTERPRETED) * tensor_scale
    return b, tl.where(b == 0.0, 0.0, factor)


@triton.jit
def _nv(x, factor, b, random, NOISE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return x · S / b, rounded, times b. With NOISE, round stochastically with `random`, from `_half`.

    A zero is positive.
    """
    value = _clamped(x * factor, INTERPRETED)
    power = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 127 << 23).to(tl.float32, bitcast=True)
    if NOISE:
        value = _floor(tl.fma(power, random, value), power, INTERPRETED)
    else:
        value = tl.fma(power, 6291456.0, value)
    return tl.fma(power, -6291456.0, value) * b


@triton.jit
def _tensor_scale(amax):
    """Return S, at most 2^118, so that S / b is finite."""
    return tl.minimum(scale_from_amax(tl.load(amax), 2688.0, 0.0, False), 332306998946228968225951765070086144.0)


@triton.jit
def _sixth(scale, INTERPRETED: tl.constexpr):
    """Return a sixth of a scale, rounded to nearest (Markstein 1990)."""
    if INTERPRETED:
        return tl.div_rn(scale, 6.0)
    quotient = scale * 0.16666667
    return tl.fma(tl.fma(quotient, -6.0, scale), 0.16666667, quotient)


@triton.jit
def _half(word, UPPER: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return 96 + k·2^-17, where k is the lower or upper 16 bits of a word."""
    if INTERPRETED:
        word = word >> 16 if UPPER else word & 0xFFFF
        return (word | 0x42C00000).to(tl.float32, bitcast=True)
    if UPPER:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x42C0, 0x5432;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0x42C0, 0x5410;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _words(group, noise):
    """Return four words of noise for each group of eight elements, uint32, by Philox with seven rounds.

    `tl.philox_impl` needs two instructions for the halves of a product, and makes a gradient's cast 4% slower.
    """
    step, microbatch, key0, key1 = noise
    x0, x1, x2, x3 = group, group * 0, group * 0 + step, group * 0 + microbatch
    for _ in tl.static_range(7):
        p0, p1 = x0.to(tl.uint64) * 0xD2511F53, x2.to(tl.uint64) * 0xCD9E8D57
        x0, x2 = (p1 >> 32).to(tl.uint32) ^ x1 ^ key0, (p0 >> 32).to(tl.uint32) ^ x3 ^ key1
        x1, x3 = p1.to(tl.uint32), p0.to(tl.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def _row_noise(row, at, j, width, noise, GROUPED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `_half`, `[q, j]`, for the elements in rows `row` and columns at + j of a matrix with `width` columns."""
    COLUMNS: tl.constexpr = j.shape[0]
    if GROUPED:
        group = row[:, None] * (width // 8) + (at // 8 + tl.arange(0, COLUMNS // 8))[None, :]
        w0, w1, w2, w3 = _words(group.to(tl.uint32, bitcast=True), noise)
        lower = tl.join(
            tl.join(_half(w0, False, INTERPRETED), _half(w2, False, INTERPRETED)),
            tl.join(_half(w1, False, INTERPRETED), _half(w3, False, INTERPRETED)),
        )
        upper = tl.join(
            tl.join(_half(w0, True, INTERPRETED), _half(w2, True, INTERPRETED)),
            tl.join(_half(w1, True, INTERPRETED), _half(w3, True, INTERPRETED)),
        )
        return tl.join(lower, upper).reshape(row.shape[0], COLUMNS)
    return _noise_of(row.to(tl.int64)[:, None] * width + (at + j)[None, :], noise, INTERPRETED)


@triton.jit
def _column_noise(row, column, r, x, noise, GROUPED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return `_half`, `[q, j]`, eight times: for the elements of rows `row` to row + 7 of the columns.

    x is a tile with the layout that the results should have. A zero computed from x is added to the results; without
    it, Triton would convert the layout.
    """
    values = ()
    if GROUPED:
        zero = (x.to(tl.uint32, bitcast=True) & 1) >> 1
        words = _words((column[None, :] * (r // 8) + (row // 8)[:, None]).to(tl.uint32, bitcast=True) + zero, noise)
        for k in tl.static_range(8):
            values += (_half(words[k // 2], k % 2 == 1, INTERPRETED),)  # type: ignore[assignment]
    else:
        element = column.to(tl.int64)[None, :] * r + row[:, None]
        for k in tl.static_range(8):
            values += (_noise_of(element + k, noise, INTERPRETED),)  # type: ignore[assignment]
    return values


@triton.jit
def _noise_of(element, noise, INTERPRETED: tl.constexpr):
    """Return `_half` for arbitrary elements, int64."""
    w0, w1, w2, w3 = _words((element >> 3).to(tl.uint32), noise)
    place = (element & 7).to(tl.int32) >> 1
    word = tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))
    return tl.where(element % 2 == 1, _half(word, True, INTERPRETED), _half(word, False, INTERPRETED))


@triton.jit
def _noise(step, microbatch, key0, key1):
    return (
        tl.load(step).to(tl.uint32),
        tl.load(microbatch).to(tl.uint32),
        key0.to(tl.uint32, bitcast=True),
        key1.to(tl.uint32, bitcast=True),
    )


def _mx_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, statistics, weights, rowwise, columnwise, scale_inv,
               r, c, a, g, b, stride_s, stride_b, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
               ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr,
               TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """Cast one tile of each part of the source to MXFP8, and dequantize it."""
    i0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
    tl.store(scale_inv, 1.0, mask=i0 + j0 == 0)
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, b, stride_s, stride_b, statistics, weights)
    parts = compute(inputs, i0, i, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED)
    for part in tl.static_range(2 if SOURCE == "gated_grad" or SOURCE == "qkv_grad" else 1):
        y = parts[part]
        at, end, width = part_columns(j0, c, part, SOURCE, HALF)
        if ROWWISE:
            x = y.reshape(TILE_R, TILE_C // 32, 32)
            scale, inverse = _mx_scales(tl.max(magnitude_bits(x), axis=2, keep_dims=True), FP8_MAX)
            value = _mx(x, scale, inverse, FP8_MAX).reshape(TILE_R, TILE_C)
            store_rowwise(rowwise, value.to(rowwise.dtype.element_ty), i0, i, at, j, r, end, width)
        if COLUMNWISE:
            x = y.reshape(TILE_R // 32, 32, TILE_C)
            scale, inverse = _mx_scales(tl.max(magnitude_bits(x), axis=1, keep_dims=True), FP8_MAX)
            value = _mx(x, scale, inverse, FP8_MAX).reshape(TILE_R, TILE_C)
            store_rowwise(columnwise, value.to(columnwise.dtype.element_ty), i0, i, at, j, r, end, width)


def _nv_amax_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, statistics, weights, amaxes, r, c, a, g,
                    b, stride_s, stride_b, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
                    TRANSFORMED: tl.constexpr, INTERPRETED: tl.constexpr, BATCH: tl.constexpr, C: tl.constexpr,
                    FULL: tl.constexpr, WHOLE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
                    DOWN: tl.constexpr):  # fmt: skip
    """Update the two amaxes with DOWN tiles, one below the other, of each part of the source."""
    i0, j0 = tl.program_id(1) * DOWN * TILE_R, tl.program_id(0) * TILE_C
    q, j = tl.arange(0, TILE_R // 16), tl.arange(0, TILE_C)
    c = C if C else c
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, BATCH if BATCH else b, stride_s, stride_b, statistics, weights)
    values_amax = tl.zeros([TILE_R // 16, TILE_C], dtype=tl.float32)
    transformed_amax = tl.zeros([TILE_R // 16, TILE_C], dtype=tl.float32)
    for _ in range(DOWN):
        parts = _interleaved(inputs, i0, q, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
        for part in tl.static_range(2 if SOURCE == "gated_grad" or SOURCE == "qkv_grad" else 1):
            values_amax = _larger(values_amax, _amax_of_tiles(parts[part]))
            if TRANSFORMED:
                z = _transformed(parts[part], i0 + 16 * q, r, WHOLE)
                transformed_amax = _larger(transformed_amax, _amax_of_tiles(z))
        i0 += TILE_R
    atomic_amax(amaxes, tl.max(magnitude_bits(values_amax)), None)
    if TRANSFORMED:
        atomic_amax(amaxes + 1, tl.max(magnitude_bits(transformed_amax)), None)


@triton.jit
def _nv_rows(y, i, at, j, width, scale, sixth, noise, WEIGHT: tl.constexpr, NOISE: tl.constexpr,
             GROUPED: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """Cast values `[i, j]` to NVFP4 with blocks along rows, or with 16×16 blocks if WEIGHT, and dequantize them."""
    ROWS: tl.constexpr = y.shape[0]
    COLUMNS: tl.constexpr = y.shape[1]
    HEIGHT: tl.constexpr = 16 if WEIGHT else 1
    x = y.reshape(ROWS // HEIGHT, HEIGHT, COLUMNS // 16, 16)
    if INTERPRETED:  # a reduction with a custom function is slow in the interpreter
        amax = tl.max(magnitude_bits(x), axis=3, keep_dims=True).to(tl.float32, bitcast=True)
    else:
        amax = tl.reduce(x, 3, _largest, keep_dims=True)
    if WEIGHT:
        amax = tl.max(magnitude_bits(amax), axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    block, factor = _nv_scales(amax, sixth, scale, INTERPRETED)
    random = 0
    if NOISE:
        random = _row_noise(i, at, j, width, noise, GROUPED, INTERPRETED).reshape(ROWS, 1, COLUMNS // 16, 16)
    return _nv(x, factor, block, random, NOISE, INTERPRETED).reshape(ROWS, COLUMNS)


def _nv_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, statistics, weights, rowwise, columnwise, scale_inv,
               amaxes, step, microbatch, r, c, a, g, b, stride_s, stride_b, row_key0, row_key1, column_key0,
               column_key1, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr, WEIGHT: tl.constexpr,
               ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr, NOISE: tl.constexpr, ROW_GROUPS: tl.constexpr,
               COLUMN_GROUPS: tl.constexpr, INTERPRETED: tl.constexpr, BATCH: tl.constexpr, C: tl.constexpr,
               FULL: tl.constexpr, WHOLE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
               CHUNK: tl.constexpr):  # fmt: skip
    """Cast one tile of each part of the source to NVFP4, and dequantize it.

    The last tiles are cast first, because the kernel for amaxes has left them in the cache. Columns are cast first.
    Then rows are read again from the cache and cast, CHUNK rows at a time.
    """
    i0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE_R
    j0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_C
    q, j = tl.arange(0, TILE_R // 16), tl.arange(0, TILE_C)
    if i0 + j0 == 0:
        tl.store(scale_inv, tl.div_rn(1.0, _tensor_scale(amaxes)))
        tl.store(scale_inv + 1, tl.div_rn(0.25, _tensor_scale(amaxes + 1)))
    c = C if C else c
    inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
    heads = (a, g, BATCH if BATCH else b, stride_s, stride_b, statistics, weights)
    if COLUMNWISE:
        scale = _tensor_scale(amaxes + 1)
        sixth = _sixth(scale, INTERPRETED)
        noise = _noise(step, microbatch, column_key0, column_key1)
        parts = _interleaved(inputs, i0, q, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
        for part in tl.static_range(2 if SOURCE == "gated_grad" or SOURCE == "qkv_grad" else 1):
            at, end, width = part_columns(j0, c, part, SOURCE, HALF)
            z = _transformed(parts[part], i0 + 16 * q, r, WHOLE)
            block, factor = _nv_scales(_amax_of_tiles(z), sixth, scale, INTERPRETED)
            for upper in tl.static_range(2):
                random = (0, 0, 0, 0, 0, 0, 0, 0)
                if NOISE:
                    random = _column_noise(i0 + 16 * q + 8 * upper, at + j, r, block, noise, COLUMN_GROUPS,
                                           INTERPRETED)  # fmt: skip
                for k in tl.static_range(8):
                    value = _nv(z[8 * upper + k], factor, block, random[k], NOISE, INTERPRETED)
                    store_rowwise(columnwise, value.to(columnwise.dtype.element_ty), i0, 16 * q + 8 * upper + k, at,
                                  j, r, end, width, FULL)  # fmt: skip
    if ROWWISE:
        scale = _tensor_scale(amaxes)
        sixth = _sixth(scale, INTERPRETED)
        row_noise = _noise(step, microbatch, row_key0, row_key1)
        for first in range(0, TILE_R, CHUNK):
            i = first + tl.arange(0, CHUNK)
            rows = compute(inputs, i0, i, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
            for part in tl.static_range(2 if SOURCE == "gated_grad" or SOURCE == "qkv_grad" else 1):
                at, end, width = part_columns(j0, c, part, SOURCE, HALF)
                cast_rows = _nv_rows(rows[part], i0 + i, at, j, width, scale, sixth, row_noise, WEIGHT, NOISE,
                                     ROW_GROUPS, INTERPRETED)  # fmt: skip
                store_rowwise(rowwise, cast_rows.to(rowwise.dtype.element_ty), i0, i, at, j, r, end, width, FULL)


_MX, _NV_AMAX, _NV = (
    TritonKernel(_mx_kernel),
    TritonKernel(_nv_amax_kernel),
    TritonKernel(_nv_kernel, do_not_specialize=_NOISE_NUMBERS),
)


class BlockTile(NamedTuple):
    """Tile of a program: number of elements per row of a block, largest number of columns, and warps."""

    elements: int
    columns: int
    warps: int = 4

    def shape(self, block: int, width: int, half: int) -> tuple[int, int]:
        """Return the rows and columns of a program, for a part with `width` columns.

        If possible, the number of columns divides the width, so that no mask is needed, unless this leaves fewer than
        64 columns. `half` is the width of half a head, or 0.
        """
        dividing = width & -width
        columns = min(self.columns, half or (dividing if dividing >= 64 else self.columns))
        return self.elements // columns * block, columns


TILES = {
    "mx": BlockTile(128, 128, 2), "mx_parts": BlockTile(128, 128),
    "nv_amax": BlockTile(512, 512), "nv_amax_parts": BlockTile(256, 256),
    "nv": BlockTile(256, 256), "nv_parts": BlockTile(256, 256),
}  # fmt: skip
"""Tiles by kernel; names with "parts" are for sources with two parts. Measured on H200
(docs/measurements/2026-11-26-fp4-on-hopper; `nv` again on 2026-11-27, and no other tile was faster)."""


_PROGRAMS = 512
"""Number of programs above which a program of `_NV_AMAX` processes several tiles, up to 8."""


@cache
def _bound(
    kernel: TritonKernel, warps: int, kind: str, function: str, half: int, constants: tuple[tuple[str, Any], ...]
) -> BoundKernel:
    """Return the kernel for sources of this kind."""
    return kernel.bind(
        SOURCE=kind, FUNCTION=function, HALF=half, INTERPRETED=INTERPRETED, num_warps=warps, enable_fp_fusion=False,
        **dict(constants),
    )  # fmt: skip


def _launch(
    kernel: TritonKernel,
    what: str,
    block: int,
    source: MatrixSource,
    tensors: tuple[Tensor, ...],
    *numbers: int,
    **constants: Any,
) -> None:
    """Launch `kernel`, named `what` in `TILES`, on tiles that contain whole blocks of the source."""
    kind, inputs, width, function, heads, half, norms = inputs_of(_whole_blocks(source, block))
    parts = 2 if kind in ("gated_grad", "qkv_grad") else 1
    tile, r = TILES[what if parts == 1 else f"{what}_parts"], source.shape[0]
    rows, columns = tile.shape(block, width, half)
    across, tiles = ceil_div(width, columns), 1
    constants |= {"TILE_R": rows, "TILE_C": columns}
    if kernel is _NV_AMAX:
        while tiles < 8 and across * ceil_div(r, 2 * tiles * rows) >= _PROGRAMS:
            tiles *= 2
        constants["DOWN"] = tiles
    elif kernel is _NV:  # a thread has eight neighbors in a row: in a row of each part, or in two rows of one part
        chunk = 2 // parts * 8 * 32 * tile.warps // columns
        constants["CHUNK"] = 16 if constants["WEIGHT"] else min(rows, max(1, chunk))
    if kernel is not _MX:
        batch = heads[2]  # dividing by a constant power of two is a shift
        constants["BATCH"] = batch if half and not batch & (batch - 1) else 0
        full = r % (tiles * rows) == 0 and width % columns == 0
        constants |= {"C": width if full else 0, "FULL": full, "WHOLE": r % block == 0}
    bound = _bound(kernel, tile.warps, kind, function, half, tuple(constants.items()))
    grid = across, ceil_div(r, tiles * rows)
    bound.launch(grid, (*inputs, *norms, *tensors), (r, width, *heads, *numbers))


def _whole_blocks(source: MatrixSource, block: int) -> MatrixSource:
    """Return `source`, or its values as a plain source if its two parts would share a block."""
    if isinstance(source, QKVGrad):
        half = source.dq_sbad.shape[3] // 2
        split = half % block or half & (half - 1)  # tiles are powers of two wide
    else:
        split = isinstance(source, GatedGrad) and source.shape[1] % (2 * block)
    return Plain(source.values()) if split else source


def _outputs(source: MatrixSource, rowwise: bool, columnwise: bool) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the matrices to write; in fp32 for the interpreter, which rounds to bf16 incorrectly."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    by_rows, by_columns = (
        torch.empty(source.shape, dtype=dtype, device=source.device) if wanted else None
        for wanted in (rowwise, columnwise)
    )
    return by_rows, by_columns


def _dequantized(data_rc: Tensor | None, scale_inv: Tensor, *, transposed: bool) -> ScaledTensor | None:
    if data_rc is None:
        return None
    data_rc = data_rc.to(torch.bfloat16)
    return ScaledTensor(data_rc.t() if transposed else data_rc, scale_inv, DEQUANTIZED)


def cast_mxfp8(source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
    """Cast `source` to MXFP8 and dequantize it. See `mxfp8.cast_mxfp8`."""
    by_rows, by_columns = _outputs(source, rowwise, columnwise)
    if 0 in source.shape:
        scale_inv = torch.ones((), dtype=torch.float32, device=source.device)
    else:
        scale_inv = torch.empty((), dtype=torch.float32, device=source.device)
        outputs = tuple(scale_inv if data is None else data for data in (by_rows, by_columns))
        _launch(
            _MX, "mx", 32, source, (*outputs, scale_inv), ROWWISE=rowwise, COLUMNWISE=columnwise, FP8_MAX=fmt.max
        )  # fmt: skip
    return QuantizedTensor(
        _dequantized(by_rows, scale_inv, transposed=False), _dequantized(by_columns, scale_inv, transposed=True)
    )


def nvfp4_amaxes(source: MatrixSource, *, transformed: bool) -> Tensor:
    """Return the amaxes of `source` and of its transform, fp32 `[2]`. See `nvfp4.nvfp4_amaxes`."""
    amaxes = torch.zeros(2, dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        _launch(_NV_AMAX, "nv_amax", 16, source, (amaxes.view(torch.int32),), TRANSFORMED=transformed)
    return amaxes


def cast_nvfp4(
    source: MatrixSource, amaxes: Tensor, noise: TensorNoise | None, *, weight: bool, rowwise: bool, columnwise: bool
) -> QuantizedTensor:
    """Cast `source` to NVFP4 and dequantize it. See `nvfp4.cast_nvfp4`."""
    by_rows, by_columns = _outputs(source, rowwise or weight, columnwise and not weight)
    r, c = source.shape
    if r * c == 0:
        scale_inv = torch.ones(2, dtype=torch.float32, device=source.device)
        scale_inv[1] = 0.25
    else:
        scale_inv = torch.empty(2, dtype=torch.float32, device=source.device)
        outputs = tuple(scale_inv if data is None else data for data in (by_rows, by_columns))
        clocks, keys = (scale_inv, scale_inv), (0, 0, 0, 0)
        if noise is not None:
            clocks = noise.rowwise.step, noise.rowwise.microbatch
            keys = _numbers(noise.rowwise.key, noise.columnwise.key)
        _launch(
            _NV, "nv", 16, source, (*outputs, scale_inv, amaxes.view(torch.int32), *clocks), *keys,
            WEIGHT=weight, ROWWISE=rowwise or weight, COLUMNWISE=columnwise and not weight, NOISE=noise is not None,
            ROW_GROUPS=c % 8 == 0, COLUMN_GROUPS=r % 8 == 0,
        )  # fmt: skip
    if weight:
        made = _dequantized(by_rows, scale_inv[0], transposed=False)
        assert made is not None
        return QuantizedTensor(made if rowwise else None, made._replace(data=made.data.t()) if columnwise else None)
    return QuantizedTensor(
        _dequantized(by_rows, scale_inv[0], transposed=False), _dequantized(by_columns, scale_inv[1], transposed=True)
    )


@cache
def _numbers(rows: Key, columns: Key) -> tuple[int, int, int, int]:
    """Return the keys as signed 32-bit integers."""
    a, b, c, d = np.array([*rows, *columns], dtype=np.uint32).view(np.int32).tolist()
    return a, b, c, d
