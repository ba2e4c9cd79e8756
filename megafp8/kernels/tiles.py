"""Computation of the tiles of a source in fp32, in an arrangement that can be transposed, and storing of tiles.

Reference: `values` of each source in `megafp8.numerics.sources`. No multiply-add is contracted, and divisions round to
nearest. All kernels that read a source take six pointers as a tuple `inputs`. SOURCE determines their meaning. Pointers
that are None are left out of the computation, and pointers that are not listed are not read:

    plain             x
    gathered          x, numbers of its rows, and as rstd their factors
    rmsnorm           x, -, rstd, -, weight
    layernorm         x, -, rstd, mean, weight, bias
    activation        x, and its bias
    activation_grad   x, dy, and the bias
    gated             [gate | up]
    gated_grad        [gate | up], dy
    qkv_grad          dq, dk, cos, sin, dv, and x where q and k have norms

FUNCTION is the activation function; for norms it is "zero_centered" if they multiply by 1 + weight. The last two
sources have two parts, which are computed together but stored separately: the halves of the matrix, or of each head.
Kernels therefore count the columns c of one part, and `part_columns` returns their position in the matrix.

The expensive step of a cast is the transpose. Byte by byte, it takes one load from shared memory for each element. So a
tile is split into four tiles: one with the rows 0, 4, 8, ..., one with the rows 1, 5, 9, ..., and so on. A quad is four
consecutive rows. A thread then holds the bytes of a quad as one 32-bit word, and words are transposed. If the number of
rows is not a multiple of four, the columnwise copy is stored in bytes.

Shapes: r rows, c columns of a part, q quads of rows. `heads` is a tuple: a query heads, g key heads and g value heads,
b samples, the strides of the angles along tokens and samples, and the statistics `[2, r, a + g]` and weights `[a + g,
d]` of the norms of q and k, or None. The stride along samples is None if all tokens of a quad have the same angle
(`compute_quads` only).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.arithmetic import activate, magnitude_bits


@triton.jit
def _rotated_heads(inputs, i0, i, j0, j, r, heads, FUNCTION: tl.constexpr, HALF: tl.constexpr, FULL: tl.constexpr):
    """Return columns j0 % HALF + j of both halves of head j0 // HALF of the qkv gradient at tokens i0 + i.

    Heads of q and k are rotated back, and their gradient is taken to the input of their norms.
    """
    dq, dk, cos, sin, dv, x_rc = inputs
    a, g, b, stride_s, stride_b, statistics, weights = heads
    head = j0 // HALF
    j += tl.multiple_of(j0 % HALF, 8)  # a tile is a half, or a strip of a half
    x = tl.where(head < a, dq, tl.where(head < a + g, dk, dv))
    width = 2 * HALF * tl.where(head < a, a, g)
    x += i0.to(tl.int64) * width + 2 * HALF * tl.where(head < a, head, tl.where(head < a + g, head - a, head - a - g))
    inside = inside_matrix(i0 + i, head + 0 * j, r, a + 2 * g, FULL)
    at = i[:, None] * width + j[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + at, mask=inside, other=0.0).to(tl.float32)
    token = i0 + i
    if stride_b is None:  # the quad's tokens share the first token's row, so `compute_quads` loads one angle
        angle = (i0 + 4 * tl.arange(0, i.shape[0])) // b * stride_s
    else:
        angle = token // b * stride_s + token % b * stride_b
    angle = angle[:, None] + j[None, :]
    rotated = inside & (head + 0 * j < a + g)[None, :]
    cosine = tl.load(cos + angle, mask=rotated, other=1.0)
    sine = tl.load(sin + angle, mask=rotated, other=0.0) * -1.0  # not -sine, which may lose a zero's sign
    if head < a + g:
        first, second = first * cosine - second * sine, second * cosine + first * sine
        if statistics is not None:
            row = token * (a + g) + head
            rstd = tl.load(statistics + row, mask=token < r, other=0.0)[:, None]
            along = tl.load(statistics + r * (a + g) + row, mask=token < r, other=0.0)[:, None]
            if weights is not None:
                first = first * _factor(weights + head * 2 * HALF + j, FUNCTION)
                second = second * _factor(weights + head * 2 * HALF + HALF + j, FUNCTION)
            x_rc += i0.to(tl.int64) * (2 * HALF * (a + 2 * g)) + head * 2 * HALF
            at = i[:, None] * (2 * HALF * (a + 2 * g)) + j[None, :]
            x_first = tl.load(x_rc + at, mask=inside, other=0.0).to(tl.float32)
            x_second = tl.load(x_rc + HALF + at, mask=inside, other=0.0).to(tl.float32)
            first = (first - x_first * rstd * along) * rstd
            second = (second - x_second * rstd * along) * rstd
    return first, second


@triton.jit
def _factor(weights, FUNCTION: tl.constexpr):
    weight = tl.load(weights).to(tl.float32)[None, :]
    return 1.0 + weight if FUNCTION == "zero_centered" else weight


@triton.jit
def inside_matrix(i, j, r, c, FULL: tl.constexpr):
    """Return the mask of rows i below r and columns j below c.

    If all of them are (FULL), the mask is constant, and the compiler removes it from loads and stores.
    """
    if FULL:
        return tl.zeros([i.shape[0], j.shape[0]], dtype=tl.int32) == 0
    return (i < r)[:, None] & (j < c)[None, :]


@triton.jit
def compute(inputs, i0, i, j0, j, r, c, heads, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
            INTERPRETED: tl.constexpr, FULL: tl.constexpr = False):  # fmt: skip
    """Compute both parts of the source at rows i0 + i and columns j0 + j of a part, in fp32.

    A source with one part is returned twice. FULL means that all of these rows and columns are inside the source.
    """
    x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c = inputs
    inside = inside_matrix(i0 + i, j0 + j, r, c, FULL)
    if SOURCE == "qkv_grad":
        y, y2 = _rotated_heads(inputs, i0, i, j0, j, r, heads, FUNCTION, HALF, FULL)
    elif SOURCE == "gated" or SOURCE == "gated_grad":
        x_rc += i0.to(tl.int64) * (2 * c) + j0  # 64-bit offset of the tile, 32-bit offsets within it
        at = i[:, None] * (2 * c) + j[None, :]
        gate = tl.load(x_rc + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_rc + c + at, mask=inside, other=0.0).to(tl.float32)
        activated, derivative = activate(gate, FUNCTION, INTERPRETED)
        unclamped = up
        if FUNCTION == "clamped_silu":
            up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        elif FUNCTION == "limited_silu":
            up = tl.clamp(up, -10.0, 10.0, propagate_nan=tl.PropagateNan.ALL)
        if SOURCE == "gated":
            y = activated * up
            y2 = y
        else:
            second_rc += i0.to(tl.int64) * c + j0
            dy = tl.load(second_rc + (i[:, None] * c + j[None, :]), mask=inside, other=0.0).to(tl.float32)
            y = dy * up * derivative
            y2 = dy * activated
            if FUNCTION == "clamped_silu":
                y2 = tl.where(tl.abs(unclamped) <= 7.0, y2, 0.0)
            elif FUNCTION == "limited_silu":
                y2 = tl.where(tl.abs(unclamped) <= 10.0, y2, 0.0)
    elif SOURCE == "gathered":
        row = tl.load(second_rc + i0 + i, mask=i0 + i < r, other=0)
        y = tl.load(x_rc + row[:, None] * c + (j0 + j)[None, :], mask=inside, other=0.0).to(tl.float32)
        if rstd_r is not None:
            y = y * tl.load(rstd_r + i0 + i, mask=i0 + i < r, other=0.0)[:, None]
        y2 = y
    else:
        at = i[:, None] * c + j[None, :]
        y = tl.load(x_rc + (i0.to(tl.int64) * c + j0) + at, mask=inside, other=0.0).to(tl.float32)
        if SOURCE == "rmsnorm" or SOURCE == "layernorm":
            if SOURCE == "layernorm":
                y = y - tl.load(mean_r + i0 + i, mask=i0 + i < r, other=0.0)[:, None]
            y = y * tl.load(rstd_r + i0 + i, mask=i0 + i < r, other=0.0)[:, None]
            weight = tl.load(weight_c + j0 + j, mask=j0 + j < c, other=0.0).to(tl.float32)[None, :]
            if FUNCTION == "zero_centered":
                weight = 1.0 + weight
            y = y * weight
            if SOURCE == "layernorm":
                y = y + tl.load(bias_c + j0 + j, mask=j0 + j < c, other=0.0).to(tl.float32)[None, :]
        elif SOURCE == "activation" or SOURCE == "activation_grad":
            if bias_c is not None:
                y = y + tl.load(bias_c + j0 + j, mask=j0 + j < c, other=0.0).to(tl.float32)[None, :]
            y, derivative = activate(y, FUNCTION, INTERPRETED)
            if SOURCE == "activation_grad":
                second_rc += i0.to(tl.int64) * c + j0
                y = tl.load(second_rc + at, mask=inside, other=0.0).to(tl.float32) * derivative
        if bias_c is not None:  # a bias changes the zeros outside of the matrix
            y = tl.where(inside, y, 0.0)
        y2 = y
    return y, y2


@triton.jit
def compute_quads(inputs, i0, q, j0, j, r, c, heads, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, HALF: tl.constexpr,
                  INTERPRETED: tl.constexpr, FULL: tl.constexpr = False):  # fmt: skip
    """Compute both parts of the source as four tiles each, with the rows i0 + 4q, i0 + 4q + 1, i0 + 4q + 2, ..."""
    i = 4 * q
    y0, z0 = compute(inputs, i0, i, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
    y1, z1 = compute(inputs, i0, i + 1, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
    y2, z2 = compute(inputs, i0, i + 2, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
    y3, z3 = compute(inputs, i0, i + 3, j0, j, r, c, heads, SOURCE, FUNCTION, HALF, INTERPRETED, FULL)
    return (y0, y1, y2, y3), (z0, z1, z2, z3)


@triton.jit
def part_columns(j0, c, part, SOURCE: tl.constexpr, HALF: tl.constexpr):
    """Return the matrix column of a part's column j0, the end of the part's columns there, and the matrix's width."""
    if SOURCE == "qkv_grad":
        return j0 + (j0 // HALF + part) * HALF, 2 * c, 2 * c
    if SOURCE == "gated_grad":
        return j0 + part * c, (part + 1) * c, 2 * c
    return j0, c, c


@triton.jit
def quad_amax(y):
    """Return the elementwise maximum of the `magnitude_bits` of four tiles."""
    return tl.maximum(
        tl.maximum(magnitude_bits(y[0]), magnitude_bits(y[1])), tl.maximum(magnitude_bits(y[2]), magnitude_bits(y[3]))
    )


@triton.jit
def column_amax(bits, WIDE: tl.constexpr):
    """Return the maxima of columns.

    A thread holds WIDE neighboring columns. Warps exchange data through shared memory, where the columns of the lanes,
    WIDE apart, would conflict in one bank. The columns are therefore permuted, which moves no data, so that neighboring
    columns belong to neighboring lanes.
    """
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    LANES: tl.constexpr = COLUMNS // WIDE if COLUMNS > WIDE else 1
    permuted = bits.reshape(ROWS, LANES, COLUMNS // LANES).trans(0, 2, 1).reshape(ROWS, COLUMNS)
    return tl.max(permuted, axis=0).reshape(COLUMNS // LANES, LANES).trans(1, 0).reshape(COLUMNS)


@triton.jit
def store_rowwise(data, values, i0, i, j0, j, r, end, c, FULL: tl.constexpr = False):
    """Store rows i0 + i and columns j0 + j below `end` of a row-major `[r, c]`. FULL means that all are inside."""
    inside = inside_matrix(i0 + i, j0 + j, r, end, FULL)
    tl.store(data + i0.to(tl.int64) * c + j0 + (i[:, None] * c + j[None, :]), values, mask=inside)


@triton.jit
def store_columnwise(data, word, i0, q, j0, j, r, quads, end, WORDS: tl.constexpr, FULL: tl.constexpr = False):
    """Store the words of quads q transposed, into rows of r bytes, as words (WORDS) or as bytes.

    `quads` is r / 4; it is an argument of kernels so that the compiler knows its divisors.
    """
    word = tl.trans(word)
    if WORDS:
        q0 = i0 // 4
        inside = inside_matrix(j0 + j, q0 + q, end, quads, FULL)
        tl.store(data + j0.to(tl.int64) * quads + q0 + (j[:, None] * quads + q[None, :]), word, mask=inside)
    else:
        for k in tl.static_range(4):
            i = 4 * q + k
            inside = inside_matrix(j0 + j, i0 + i, end, r, FULL)
            byte = ((word >> (8 * k)) & 0xFF).to(tl.uint8)
            tl.store(data + j0.to(tl.int64) * r + i0 + (j[:, None] * r + i[None, :]), byte, mask=inside)
