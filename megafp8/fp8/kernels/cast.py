"""Compute a tile, quantize it, write it both ways round: one kernel for every source and every granularity.

Quantizing in plain PyTorch moves some thirty bytes for each element of a bf16 tensor: an amax, a copy to fp32, a
product, a clamp, a cast, and later a transpose byte by byte. What must move is four: two bytes in, one out for the
rows, one for the columns. So one program takes a tile of the source, computes it in fp32 if it is an activation or a
norm, casts it and stores it as rows and as columns.

The transpose is what costs. Byte by byte it takes a load from shared memory for each element. So a tile is held as four
tiles, of the rows 0, 4, 8, ..., of the rows 1, 5, 9, ... and so on: then the codes of four neighbouring rows are one
32-bit word of the columns, in one thread, and words are what is transposed. Where the number of rows is not a multiple
of four, columns are stored in bytes.

What a tile is cast by is the other choice (`SCALES`):
    none      the values themselves, in the source's dtype
    sums      nothing is cast, the columns of the tile are summed, in float64
    amax      nothing is cast, only the tensor's amax taken: the first pass of current scaling
    tensor    one factor; the tile's amax may be noted for a later step with one atomic
    current   one factor made of the amax
    maxima    the amaxes of all rows, and of all columns: the first pass of rowwise scaling
    vectors   a factor for each row of the rows and each row of the columns, made of those
    1x128     a tile is 128 × 128, so it holds whole blocks of its rows and its columns: one pass
    128x128   a tile is a block
An activation that needs two passes is computed twice from its inputs rather than stored in between: the same traffic,
and no bf16 copy.

The arithmetic is that of `megafp8.fp8.sources` and `quantize`, bit for bit: no multiply-add contraction, divisions
rounded to nearest.

Shapes: r rows, c columns of the source (half of what is written where it has two parts); a tile has TILE_R / 4 quads of
rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.fp8.kernels.arithmetic import codes_of_four, gelu_gate, magnitude, scale_of, sigmoid


@triton.jit
def _half_heads(dq, dk, dv, cos, sin, i, j, r, a, g, b, stride_s, stride_b, TILE_C: tl.constexpr):
    """Both halves of head `program_id(0)` of the qkv gradient at tokens i, turned back; j is within a half."""
    head = tl.program_id(0)
    x = tl.where(head < a, dq, tl.where(head < a + g, dk, dv))
    x += 2 * TILE_C * tl.where(head < a, head, tl.where(head < a + g, head - a, head - a - g))
    width = 2 * TILE_C * tl.where(head < a, a, g)
    inside = (i < r)[:, None] & (j >= 0)[None, :]
    at = i.to(tl.int64)[:, None] * width + j[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + TILE_C + at, mask=inside, other=0.0).to(tl.float32)
    angle = (i // b * stride_s + i % b * stride_b)[:, None] + j[None, :]
    turned = inside & (head + 0 * j < a + g)[None, :]
    cosine = tl.load(cos + angle, mask=turned, other=1.0)
    sine = tl.load(sin + angle, mask=turned, other=0.0) * -1.0  # not -sine, which may lose a zero's sign
    if head < a + g:
        first, second = first * cosine - second * sine, second * cosine + first * sine
    return first, second


@triton.jit
def _computed(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, i0, i, j0, j, r, c, a, g, b, stride_s, stride_b,
              SOURCE: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """The source at rows i0 + i and columns j0 + j in fp32, and its second part (the same again where it has one)."""
    inside = (i0 + i < r)[:, None] & (j0 + j < c)[None, :]
    if SOURCE == "qkv_grad":
        cos, sin, dv = rstd_r, mean_r, weight_c
        y, y2 = _half_heads(x_rc, second_rc, dv, cos, sin, i0 + i, j, r, a, g, b, stride_s, stride_b, TILE_C)
    elif SOURCE == "swiglu" or SOURCE == "swiglu_grad":
        at = i0.to(tl.int64) * (2 * c) + j0 + i[:, None] * (2 * c) + j[None, :]
        gate = tl.load(x_rc + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_rc + c + at, mask=inside, other=0.0).to(tl.float32)
        s = sigmoid(gate)
        silu = gate * s
        if SOURCE == "swiglu":
            y = silu * up
            if weight_c is not None:
                y = y * tl.load(weight_c + j0 + j, mask=j0 + j < c, other=0.0)[None, :]
            y2 = y
        else:
            at = i0.to(tl.int64) * c + j0 + i[:, None] * c + j[None, :]
            dy = tl.load(second_rc + at, mask=inside, other=0.0).to(tl.float32)
            if weight_c is not None:
                dy = dy * tl.load(weight_c + j0 + j, mask=j0 + j < c, other=0.0)[None, :]
            y = dy * up * (s + silu * (1.0 - s))
            y2 = dy * silu
    else:
        at = i0.to(tl.int64) * c + j0 + i[:, None] * c + j[None, :]
        y = tl.load(x_rc + at, mask=inside, other=0.0).to(tl.float32)
        if SOURCE == "rmsnorm" or SOURCE == "layernorm":
            if SOURCE == "layernorm":
                y = y - tl.load(mean_r + i0 + i, mask=i0 + i < r, other=0.0)[:, None]
            y = y * tl.load(rstd_r + i0 + i, mask=i0 + i < r, other=0.0)[:, None]
            y = y * tl.load(weight_c + j0 + j, mask=j0 + j < c, other=0.0).to(tl.float32)[None, :]
            if SOURCE == "layernorm":
                y = y + tl.load(bias_c + j0 + j, mask=j0 + j < c, other=0.0).to(tl.float32)[None, :]
        elif SOURCE == "gelu" or SOURCE == "gelu_grad":
            if bias_c is not None:
                y = y + tl.load(bias_c + j0 + j, mask=j0 + j < c, other=0.0).to(tl.float32)[None, :]
            s, slope = gelu_gate(y)
            y = y * s
            if SOURCE == "gelu_grad":
                y = tl.load(second_rc + at, mask=inside, other=0.0).to(tl.float32) * (s + y * (1.0 - s) * slope)
        elif weight_c is not None:
            y = y * tl.load(weight_c + j0 + j, mask=j0 + j < c, other=0.0)[None, :]
        if bias_c is not None:  # outside is zero, which a bias would change
            y = tl.where(inside, y, 0.0)
        y2 = y
    return y, y2


@triton.jit
def _store_rows(rows, word, i0, i, j0, j, r, end, c):
    """The four codes of each word at rows i0 + i .. i0 + i + 3 of a row-major matrix of c columns, as far as `end`."""
    for k in tl.static_range(4):
        inside = (i0 + i + k < r)[:, None] & (j0 + j < end)[None, :]
        code = ((word >> (8 * k)) & 0xFF).to(tl.uint8)
        tl.store(rows + i0.to(tl.int64) * c + j0 + ((i + k)[:, None] * c + j[None, :]), code, mask=inside)


@triton.jit
def _store_columns(columns, word, i0, q, j0, j, r, quads, end, WORDS: tl.constexpr):
    """The same of quads q as columns, rows of r codes: by words, or by bytes."""
    word = tl.trans(word)
    i = 4 * q
    if WORDS:
        q0 = i0 // 4
        inside = (j0 + j < end)[:, None] & (q0 + q < quads)[None, :]
        tl.store(columns + j0.to(tl.int64) * quads + q0 + (j[:, None] * quads + q[None, :]), word, mask=inside)
    else:
        for k in tl.static_range(4):
            inside = (j0 + j < end)[:, None] & (i0 + i + k < r)[None, :]
            code = ((word >> (8 * k)) & 0xFF).to(tl.uint8)
            tl.store(columns + j0.to(tl.int64) * r + i0 + (j[:, None] * r + (i + k)[None, :]), code, mask=inside)


@triton.jit
def _largest_of_four(y0, y1, y2, y3):
    return tl.maximum(tl.maximum(magnitude(y0), magnitude(y1)), tl.maximum(magnitude(y2), magnitude(y3)))


@triton.jit
def _interleaved(y0, y1, y2, y3):
    """Four vectors as one, element by element."""
    return tl.join(tl.join(y0, y2), tl.join(y1, y3)).reshape(4 * y0.shape[0])


@triton.jit
def _own_scale(y, amax, i, r, SCALES: tl.constexpr, FP8_MAX: tl.constexpr, eps, POWER_OF_TWO: tl.constexpr):
    """Scales of rows `i` of the tile `y`, made of their known amaxes or of the tile."""
    if SCALES == "vectors":
        largest = tl.load(amax + i, mask=i < r, other=1.0)
    else:
        largest = tl.max(magnitude(y), axis=1)
    return scale_of(largest, FP8_MAX, eps, POWER_OF_TWO)


@triton.jit
def _maxima(y0, y1, y2, y3, amax, column_amax, i, j, r, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Raise the amaxes of rows `i`, ..., `i + 3` and columns `j`."""
    if ROWS:
        tl.atomic_max(amax + i, tl.max(magnitude(y0), axis=1), mask=i < r, sem="relaxed")
        tl.atomic_max(amax + i + 1, tl.max(magnitude(y1), axis=1), mask=i + 1 < r, sem="relaxed")
        tl.atomic_max(amax + i + 2, tl.max(magnitude(y2), axis=1), mask=i + 2 < r, sem="relaxed")
        tl.atomic_max(amax + i + 3, tl.max(magnitude(y3), axis=1), mask=i + 3 < r, sem="relaxed")
    if COLUMNS:
        largest = tl.max(_largest_of_four(y0, y1, y2, y3), axis=0)
        tl.atomic_max(column_amax + j, largest, mask=j < end, sem="relaxed")


@triton.jit
def _sums(y0, y1, y2, y3, column_sums, j, end):
    """Store the sums of columns `j` of the tile, float64."""
    total = tl.sum(y0.to(tl.float64), axis=0) + tl.sum(y1.to(tl.float64), axis=0)
    total += tl.sum(y2.to(tl.float64), axis=0) + tl.sum(y3.to(tl.float64), axis=0)
    tl.store(column_sums + j, total, mask=j < end)


@triton.jit
def _store_values(out, y0, y1, y2, y3, i0, i, j0, j, r, end, c):
    """fp32 tiles of interleaved rows into a row-major matrix of c columns, rounded to its dtype."""
    for k in tl.static_range(4):
        y = y0 if k == 0 else (y1 if k == 1 else (y2 if k == 2 else y3))
        inside = (i0 + i + k < r)[:, None] & (j0 + j < end)[None, :]
        at = i0.to(tl.int64) * c + j0 + ((i + k)[:, None] * c + j[None, :])
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize(y0, y1, y2, y3, rows, columns, scale, column_scale, amax, column_amax, i0, q, j0, j, r, quads, end, c,
              eps, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr,
              WORDS: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
              INTERPRETED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """Take the maxima of four interleaved tiles, or cast and store them; they are valid up to column `end` of c."""
    i = 4 * q
    if SCALES == "none":
        _store_values(rows, y0, y1, y2, y3, i0, i, j0, j, r, end, c)
    if SCALES == "sums":
        _sums(y0, y1, y2, y3, rows + (i0 // TILE_R).to(tl.int64) * c, j0 + j, end)
    if RECORD or SCALES == "128x128":
        largest = tl.max(_largest_of_four(y0, y1, y2, y3))
    if RECORD:
        tl.atomic_max(amax, largest, sem="relaxed")
    if SCALES == "maxima":
        _maxima(y0, y1, y2, y3, amax, column_amax, i0 + i, j0 + j, r, end, ROWS, COLUMNS)
    if SCALES == "tensor" or SCALES == "current" or SCALES == "128x128":
        if SCALES == "tensor":
            s = tl.load(scale)
        elif SCALES == "current":
            s = scale_of(tl.load(amax), FP8_MAX, eps, POWER_OF_TWO)
            tl.store(scale, tl.div_rn(1.0, s), mask=i0 + j0 == 0)  # one program writes
        else:
            s = scale_of(largest, FP8_MAX, eps, POWER_OF_TWO)
            down, across = i0 // TILE_R, j0 // TILE_C
            if ROWS:
                tl.store(scale + down * (tl.cdiv(c, 4 * TILE_C) * 4) + across, tl.div_rn(1.0, s))
            if COLUMNS:
                tl.store(column_scale + across * (tl.cdiv(r, 4 * TILE_R) * 4) + down, tl.div_rn(1.0, s))
        word = codes_of_four(y0 * s, y1 * s, y2 * s, y3 * s, FORMAT, FP8_MAX, INTERPRETED)
        if ROWS:
            _store_rows(rows, word, i0, i, j0, j, r, end, c)
        if COLUMNS:
            _store_columns(columns, word, i0, q, j0, j, r, quads, end, WORDS)
    if (SCALES == "vectors" or SCALES == "1x128") and ROWS:
        s0 = _own_scale(y0, amax, i0 + i, r, SCALES, FP8_MAX, eps, POWER_OF_TWO)
        s1 = _own_scale(y1, amax, i0 + i + 1, r, SCALES, FP8_MAX, eps, POWER_OF_TWO)
        s2 = _own_scale(y2, amax, i0 + i + 2, r, SCALES, FP8_MAX, eps, POWER_OF_TWO)
        s3 = _own_scale(y3, amax, i0 + i + 3, r, SCALES, FP8_MAX, eps, POWER_OF_TWO)
        ii = tl.arange(0, TILE_R)
        inverse = tl.div_rn(1.0, _interleaved(s0, s1, s2, s3))
        if SCALES == "1x128":
            tl.store(scale + (j0 // TILE_C) * r + i0 + ii, inverse, mask=i0 + ii < r)
        elif j0 == 0:  # one program of a row writes
            tl.store(scale + i0 + ii, inverse, mask=i0 + ii < r)
        s0, s1, s2, s3 = s0[:, None], s1[:, None], s2[:, None], s3[:, None]
        word = codes_of_four(y0 * s0, y1 * s1, y2 * s2, y3 * s3, FORMAT, FP8_MAX, INTERPRETED)
        _store_rows(rows, word, i0, i, j0, j, r, end, c)
    if (SCALES == "vectors" or SCALES == "1x128") and COLUMNS:
        if SCALES == "vectors":
            largest = tl.load(column_amax + j0 + j, mask=j0 + j < end, other=1.0)
        else:
            largest = tl.max(_largest_of_four(y0, y1, y2, y3), axis=0)
        s = scale_of(largest, FP8_MAX, eps, POWER_OF_TWO)
        if SCALES == "1x128":
            tl.store(column_scale + (i0 // TILE_R) * c + j0 + j, tl.div_rn(1.0, s), mask=j0 + j < end)
        elif i0 == 0:
            tl.store(column_scale + j0 + j, tl.div_rn(1.0, s), mask=j0 + j < end)
        s = s[None, :]
        word = codes_of_four(y0 * s, y1 * s, y2 * s, y3 * s, FORMAT, FP8_MAX, INTERPRETED)
        _store_columns(columns, word, i0, q, j0, j, r, quads, end, WORDS)


@triton.jit
def tile_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, rows, columns, scale, column_scale, amax,
                column_amax, r, c, quads, a, g, b, stride_s, stride_b, eps, SOURCE: tl.constexpr,
                SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RECORD: tl.constexpr,
                WORDS: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                INTERPRETED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """One tile of the source. `quads` is r / 4, given so that the compiler knows by what it can be divided; the numbers
    after it describe a qkv gradient: heads a and g, samples b, and the strides of the angles."""
    i0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    if SOURCE == "qkv_grad":
        j0 = 2 * j0  # a program takes a head
    q, j = tl.arange(0, TILE_R // 4), tl.arange(0, TILE_C)
    i = 4 * q
    a0, b0 = _computed(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, i0, i, j0, j, r, c, a, g, b,
                       stride_s, stride_b, SOURCE, TILE_C)  # fmt: skip
    a1, b1 = _computed(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, i0, i + 1, j0, j, r, c, a, g, b,
                       stride_s, stride_b, SOURCE, TILE_C)  # fmt: skip
    a2, b2 = _computed(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, i0, i + 2, j0, j, r, c, a, g, b,
                       stride_s, stride_b, SOURCE, TILE_C)  # fmt: skip
    a3, b3 = _computed(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, i0, i + 3, j0, j, r, c, a, g, b,
                       stride_s, stride_b, SOURCE, TILE_C)  # fmt: skip
    PARTS: tl.constexpr = 2 if SOURCE == "swiglu_grad" or SOURCE == "qkv_grad" else 1
    # Where the second part stands, and how far each goes: the halves of a tensor, or of a head.
    c_out = 2 * c if PARTS == 2 else c
    shift = TILE_C if SOURCE == "qkv_grad" else c
    end = c_out if SOURCE == "qkv_grad" else c
    _quantize(a0, a1, a2, a3, rows, columns, scale, column_scale, amax, column_amax, i0, q, j0, j, r, quads, end, c_out,
              eps, SCALES, ROWS, COLUMNS, RECORD, WORDS, FORMAT, FP8_MAX, POWER_OF_TWO, INTERPRETED, TILE_R,
              TILE_C)  # fmt: skip
    if PARTS == 2:
        _quantize(b0, b1, b2, b3, rows, columns, scale, column_scale, amax, column_amax, i0, q, j0 + shift, j, r, quads,
                  c_out, c_out, eps, SCALES, ROWS, COLUMNS, RECORD, WORDS, FORMAT, FP8_MAX, POWER_OF_TWO, INTERPRETED,
                  TILE_R, TILE_C)  # fmt: skip
