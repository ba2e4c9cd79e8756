"""Tiles of sources: computed in fp32 from their inputs, held so that they can be transposed, and stored.

The arithmetic is that of `megafp8.fp8.sources`, bit for bit: no multiply-add is contracted, and divisions round to
nearest. Every kernel that reads a source takes the same six pointers, named after the norms that use them all, as a
tuple; others leave the last ones unread, and what is None is left out of the computation:
    plain         x, and in weight's place its columns' factors
    rmsnorm       x, -, rstd, -, weight
    layernorm     x, -, rstd, mean, weight, bias
    swiglu        [gate | up], and in weight's place its channels' factors
    swiglu_grad   the same, dy
    gelu          x, and its bias
    gelu_grad     the same, dy
    qkv_grad      dq, dk, cos, sin, dv
The last two are made in two parts at once, which stand apart: the halves of the matrix, or of each head. So kernels
count the columns of one part, c, and a tile that begins at column j0 of a part goes to `place`.

The transpose is what costs in a cast. Byte by byte it takes a load from shared memory for each element. So a tile is
held as four tiles, of the rows 0, 4, 8, ..., of the rows 1, 5, 9, ... and so on: then the codes of four neighbouring
rows are one 32-bit word of the columns, in one thread, and words are what is transposed. Where the number of rows is
not a multiple of four, columns are stored in bytes.

Shapes: r rows, c columns of a part; q quads of rows; heads: a of queries, g of keys, g of values, for b samples, and
the strides of the angles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.arithmetic import gelu_gate, magnitude_bits, sigmoid


@triton.jit
def _half_heads(inputs, i, j0, j, r, heads, HALF: tl.constexpr):
    """Columns j0 % HALF + j of both halves of head j0 // HALF of the qkv gradient at tokens i, turned back."""
    dq, dk, cos, sin, dv, _ = inputs
    a, g, b, stride_s, stride_b = heads
    head = j0 // HALF
    j += tl.multiple_of(j0 % HALF, 8)  # a tile is a half, or a strip of one
    x = tl.where(head < a, dq, tl.where(head < a + g, dk, dv))
    x += 2 * HALF * tl.where(head < a, head, tl.where(head < a + g, head - a, head - a - g))
    inside = (i < r)[:, None] & (head + 0 * j < a + 2 * g)[None, :]
    at = i.to(tl.int64)[:, None] * (2 * HALF * tl.where(head < a, a, g)) + j[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + at, mask=inside, other=0.0).to(tl.float32)
    angle = (i // b * stride_s + i % b * stride_b)[:, None] + j[None, :]
    turned = inside & (head + 0 * j < a + g)[None, :]
    cosine = tl.load(cos + angle, mask=turned, other=1.0)
    sine = tl.load(sin + angle, mask=turned, other=0.0) * -1.0  # not -sine, which may lose a zero's sign
    if head < a + g:
        first, second = first * cosine - second * sine, second * cosine + first * sine
    return first, second


@triton.jit
def computed(inputs, i0, i, j0, j, r, c, heads, SOURCE: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr):
    """Both parts of the source at rows i0 + i and columns j0 + j of a part, fp32; the same twice where there is one."""
    x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c = inputs
    inside = (i0 + i < r)[:, None] & (j0 + j < c)[None, :]
    if SOURCE == "qkv_grad":
        y, y2 = _half_heads(inputs, i0 + i, j0, j, r, heads, HALF)
    elif SOURCE == "swiglu" or SOURCE == "swiglu_grad":
        at = i0.to(tl.int64) * (2 * c) + j0 + i[:, None] * (2 * c) + j[None, :]
        gate = tl.load(x_rc + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_rc + c + at, mask=inside, other=0.0).to(tl.float32)
        s = sigmoid(gate, INTERPRETED)
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
            s, slope = gelu_gate(y, INTERPRETED)
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
def four(inputs, i0, q, j0, j, r, c, heads, SOURCE: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr):
    """Both parts as four tiles each, of the rows i0 + 4q, i0 + 4q + 1, ..."""
    i = 4 * q
    y0, z0 = computed(inputs, i0, i, j0, j, r, c, heads, SOURCE, HALF, INTERPRETED)
    y1, z1 = computed(inputs, i0, i + 1, j0, j, r, c, heads, SOURCE, HALF, INTERPRETED)
    y2, z2 = computed(inputs, i0, i + 2, j0, j, r, c, heads, SOURCE, HALF, INTERPRETED)
    y3, z3 = computed(inputs, i0, i + 3, j0, j, r, c, heads, SOURCE, HALF, INTERPRETED)
    return (y0, y1, y2, y3), (z0, z1, z2, z3)


@triton.jit
def place(j0, c, part, SOURCE: tl.constexpr, HALF: tl.constexpr):
    """Where column j0 of a part stands in the matrix, the column where what is stored there ends, and the matrix's
    width."""
    if SOURCE == "qkv_grad":
        return j0 + (j0 // HALF + part) * HALF, 2 * c, 2 * c
    if SOURCE == "swiglu_grad":
        return j0 + part * c, (part + 1) * c, 2 * c
    return j0, c, c


@triton.jit
def largest_of_four(y):
    """`magnitude_bits`, the largest of four tiles elementwise."""
    return tl.maximum(
        tl.maximum(magnitude_bits(y[0]), magnitude_bits(y[1])), tl.maximum(magnitude_bits(y[2]), magnitude_bits(y[3]))
    )


@triton.jit
def column_maxima(bits, WIDE: tl.constexpr):
    """The largest of each column. A thread holds WIDE neighbouring columns, and warps exchange through shared memory,
    where the lanes' columns, WIDE apart, would all meet in one bank: so columns are renamed, which moves nothing, until
    neighbours belong to neighbouring lanes."""
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    LANES: tl.constexpr = COLUMNS // WIDE if COLUMNS > WIDE else 1
    renamed = bits.reshape(ROWS, LANES, COLUMNS // LANES).trans(0, 2, 1).reshape(ROWS, COLUMNS)
    return tl.max(renamed, axis=0).reshape(COLUMNS // LANES, LANES).trans(1, 0).reshape(COLUMNS)


@triton.jit
def store_rows(rows, values, i0, i, j0, j, r, end, c):
    """Rows i0 + i of a row-major matrix of c columns, as far as column `end`."""
    inside = (i0 + i < r)[:, None] & (j0 + j < end)[None, :]
    tl.store(rows + i0.to(tl.int64) * c + j0 + (i[:, None] * c + j[None, :]), values, mask=inside)


@triton.jit
def store_columns(columns, word, i0, q, j0, j, r, quads, end, WORDS: tl.constexpr):
    """Words of the codes of quads q as columns, rows of r codes: by words, or by bytes. `quads` is r / 4, an argument
    of kernels so that the compiler knows by what it can be divided."""
    word = tl.trans(word)
    if WORDS:
        q0 = i0 // 4
        inside = (j0 + j < end)[:, None] & (q0 + q < quads)[None, :]
        tl.store(columns + j0.to(tl.int64) * quads + q0 + (j[:, None] * quads + q[None, :]), word, mask=inside)
    else:
        for k in tl.static_range(4):
            i = 4 * q + k
            inside = (j0 + j < end)[:, None] & (i0 + i < r)[None, :]
            code = ((word >> (8 * k)) & 0xFF).to(tl.uint8)
            tl.store(columns + j0.to(tl.int64) * r + i0 + (j[:, None] * r + i[None, :]), code, mask=inside)
