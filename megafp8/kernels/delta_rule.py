"""The gated delta rule in chunks with a decay for each channel of keys, forward and backward.

Reference: `megafp8.ops.delta_rule.recurrence`; formulas and the source of the method are there. Within a chunk of L
tokens, with sums of decays G from its start (here in base 2, so that exp is exp2):

    P_ij = Σ_d exp(G_i − G_j) q_i k_j  for j ≤ i,     A_ij = β_i Σ_d exp(G_i − G_j) k_i k_j  for j < i
    T = (I + A)⁻¹,     W = T (β exp(G) k),     U = T (β v)
    u = U − W S₀,      y = (exp(G) q) S₀ + P u,      S_L = exp(G_L) S₀ + (exp(G_L − G) k)ᵀ u

exp(G_i − G_j) is no product of something of i and something of j that fp32 could hold. So chunks are cut into blocks of
16 tokens: for tokens of two blocks it is exp(G_i − r) exp(r − G_j) with r the sum up to the first token of the later
one, where neither exponent is positive, and a GEMM computes them; for pairs in a block it is computed as it stands.

    sums        G of each chunk; in backward the gradients of decays from those of G
    pairs       P and A, a program for each block of rows
    invert      T, from the blocks on its diagonal to those beside them
    operands    W, U and the decayed queries and keys, a program for each chunk
    states      the state at the start of each chunk and u; a program has a head and some channels of values, and goes
                over the chunks one after the other. `dstates` goes back, to the gradients of states and of u
    outputs     y, a program for each chunk and some channels of values
    gradients   of v, P, A and the decayed queries and keys, a program for each chunk; from the formulas above
                dA = −(Tᵀ du) uᵀ
    dpairs      of q, k, β and G from these, a program for each block

The gradient of G is q·dq + k·(dk as a row of P and A) − k·(dk as a column). States and gradients of them are fp32 in
registers and rounded to the inputs' dtype in memory; products have fp32 sums. All results are deterministic.

Shapes: b micro-batch, s sequence, a heads, d and w channels of keys and of values; m chunks of L tokens; D and W: d and
w as powers of 2, V channels of values of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2

CHUNK = 64
"""Tokens of a chunk."""
_BLOCK = 16
_BLOCKS = CHUNK // _BLOCK
_STATE_CHANNELS = 32
"""Channels of values of a program of the kernels that go from chunk to chunk."""
_OUTPUT_CHANNELS = 64


@triton.jit
def _rows(x, i, s, stride, c, count):
    """Channels `c` of tokens `i`; zeros beyond s tokens and `count` channels."""
    at = i.to(tl.int64)[:, None] * stride + c[None, :]
    return tl.load(x + at, mask=(i < s)[:, None] & (c < count)[None, :], other=0.0)


@triton.jit
def _last_rows(x, i, s, stride, c, count):
    """As `_rows`, with the last token's channels beyond s tokens."""
    at = tl.minimum(i, s - 1).to(tl.int64)[:, None] * stride + c[None, :]
    return tl.load(x + at, mask=(c < count)[None, :], other=0.0)


@triton.jit
def _row(x, i, s, stride, c, count):
    """Channels of token `i`, or of the last one."""
    return tl.load(x + tl.minimum(i, s - 1).to(tl.int64) * stride + c, mask=c < count, other=0.0)


@triton.jit
def _store(x, i, s, stride, c, count, values):
    at = i.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(i < s)[:, None] & (c < count)[None, :])


@triton.jit
def _numbers(x, i, s, stride):
    """One number of each of the tokens `i`; zeros beyond s."""
    return tl.load(x + i.to(tl.int64) * stride, mask=i < s, other=0.0)


@triton.jit
def _square(x, r, c, L: tl.constexpr):
    """Rows and columns of a matrix `[L, L]`, 0 above the diagonal."""
    return tl.load(x + r[:, None] * L + c[None, :], mask=r[:, None] >= c[None, :], other=0.0)


@triton.jit
def _first(s, a):
    """The chunk or tile, and the first row `[b, s, a]` of this program's head, sample · s · a + head."""
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    return tl.program_id(0), sample.to(tl.int64) * s * a + head


@triton.jit
def sums_kernel(
    x_bsad, end_bmad, y_bsad, s, a, d, factor, REVERSE: tl.constexpr, L: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Sums over the tokens of a chunk up to each, times `factor`; REVERSE: from each on, with `end` added."""
    m, first = _first(s, a)
    i, c = m * L + tl.arange(0, L), tl.arange(0, D)
    x = _rows(x_bsad + first * d, i, s, a * d, c, d)
    y = tl.cumsum(x, axis=0, reverse=REVERSE) * factor
    if REVERSE:
        at = ((tl.program_id(1) // a) * tl.num_programs(0) + m).to(tl.int64) * a + tl.program_id(1) % a
        y += tl.load(end_bmad + at * d + c, mask=c < d, other=0.0)[None, :]
    _store(y_bsad + first * d, i, s, a * d, c, d, y)


@triton.jit
def pairs_kernel(
    q_bsad, k_bsad, g_bsad, beta_bsa, p_mll, a_mll, s, a, d, scale,
    L: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A block of rows of P and A."""
    program, first = _first(s, a)
    m, block = program // BLOCKS, program % BLOCKS
    r, c = tl.arange(0, BLOCK), tl.arange(0, D)
    i = m * L + block * BLOCK + r
    key, sums, stride = k_bsad + first * d, g_bsad + first * d, a * d
    q = _rows(q_bsad + first * d, i, s, stride, c, d).to(tl.float32) * scale
    k = _rows(key, i, s, stride, c, d).to(tl.float32)
    k *= _numbers(beta_bsa + first, i, s, a)[:, None]
    g = _last_rows(sums, i, s, stride, c, d)
    at_first = _row(sums, m * L + block * BLOCK, s, stride, c, d)
    decay = tl.exp2(g - at_first[None, :])
    q_decayed, k_decayed = q * decay, k * decay
    square = (tl.program_id(1) * (tl.num_programs(0) // BLOCKS) + m).to(tl.int64) * L * L
    out = square + (block * BLOCK + r)[:, None] * L + r[None, :]
    for other in range(block):
        j = m * L + other * BLOCK + r
        other_k = _rows(key, j, s, stride, c, d).to(tl.float32)
        other_k *= tl.exp2(at_first[None, :] - _last_rows(sums, j, s, stride, c, d))
        tl.store(p_mll + out + other * BLOCK, tl.dot(q_decayed, tl.trans(other_k)).to(p_mll.dtype.element_ty))
        tl.store(a_mll + out + other * BLOCK, tl.dot(k_decayed, tl.trans(other_k)))
    p = tl.zeros([BLOCK, BLOCK], tl.float32)
    of_keys = tl.zeros([BLOCK, BLOCK], tl.float32)
    for n in range(BLOCK):
        j = m * L + block * BLOCK + n
        other_k = tl.where(j < s, _row(key, j, s, stride, c, d).to(tl.float32), 0.0)
        seen = (r >= n)[:, None]
        seen_k = (
            tl.where(seen, tl.exp2(tl.minimum(g - _row(sums, j, s, stride, c, d)[None, :], 0.0)), 0.0)
            * other_k[None, :]
        )
        column = (r == n)[None, :]
        p = tl.where(column, tl.sum(q * seen_k, axis=1)[:, None], p)
        of_keys = tl.where(column & (r > n)[:, None], tl.sum(k * seen_k, axis=1)[:, None], of_keys)
    tl.store(p_mll + out + block * BLOCK, p.to(p_mll.dtype.element_ty))
    tl.store(a_mll + out + block * BLOCK, of_keys)


@triton.jit
def _of_block(x, n, index):
    """Matrix `index` of `[n, BLOCK, BLOCK]`."""
    return tl.sum(tl.where((n == index)[:, None, None], x, 0.0), axis=0)


@triton.jit
def _product(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def invert_kernel(a_mll, t_mll, L: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """T of a chunk of four blocks: those of the diagonal row by row, others as −T_ii Σ_k A_ik T_kj."""
    tl.static_assert(BLOCKS == 4)
    square = tl.program_id(0).to(tl.int64) * L * L
    n, r = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    offset = (n * BLOCK * (L + 1))[:, None, None] + (r * L)[None, :, None] + r[None, None, :]
    of_keys = tl.load(a_mll + square + offset)
    t = tl.where((r[:, None] == r[None, :])[None, :, :] & (n >= 0)[:, None, None], 1.0, 0.0)
    for row in range(1, BLOCK):
        here = (r == row)[None, :, None]
        weights = tl.sum(tl.where(here, of_keys, 0.0), axis=1)
        t = tl.where(here, t - tl.sum(weights[:, :, None] * t, axis=1)[:, None, :], t)
    block = r[:, None] * L + r[None, :]
    source, row, column = a_mll + square + block, BLOCK * L, BLOCK
    a10, a20, a21 = tl.load(source + row), tl.load(source + 2 * row), tl.load(source + 2 * row + column)
    a30, a31, a32 = (
        tl.load(source + 3 * row), tl.load(source + 3 * row + column), tl.load(source + 3 * row + 2 * column)
    )  # fmt: skip
    t0, t1, t2, t3 = _of_block(t, n, 0), _of_block(t, n, 1), _of_block(t, n, 2), _of_block(t, n, 3)
    t10 = -_product(_product(t1, a10), t0)
    t21 = -_product(_product(t2, a21), t1)
    t32 = -_product(_product(t3, a32), t2)
    t20 = -_product(t2, _product(a20, t0) + _product(a21, t10))
    t31 = -_product(t3, _product(a31, t1) + _product(a32, t21))
    t30 = -_product(t3, _product(a30, t0) + _product(a31, t10) + _product(a32, t20))
    out = t_mll + square + block
    dtype = t_mll.dtype.element_ty
    tl.store(t_mll + square + offset, t.to(dtype))
    tl.store(out + row, t10.to(dtype))
    tl.store(out + 2 * row, t20.to(dtype))
    tl.store(out + 2 * row + column, t21.to(dtype))
    tl.store(out + 3 * row, t30.to(dtype))
    tl.store(out + 3 * row + column, t31.to(dtype))
    tl.store(out + 3 * row + 2 * column, t32.to(dtype))


@triton.jit
def operands_kernel(
    q_bsad, k_bsad, v_bsaw, g_bsad, beta_bsa, t_mll, q_decayed_bsad, k_decayed_bsad, w_bsad, u_bsaw,
    s, a, d, w, scale, L: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """q exp(G), k exp(G_L − G), W and U of a chunk."""
    m, first = _first(s, a)
    r, c, cw = tl.arange(0, L), tl.arange(0, D), tl.arange(0, W)
    i, of_keys = m * L + r, first * d
    dtype = q_bsad.dtype.element_ty
    g = _last_rows(g_bsad + of_keys, i, s, a * d, c, d)
    q = _rows(q_bsad + of_keys, i, s, a * d, c, d).to(tl.float32)
    before = tl.exp2(g)
    _store(q_decayed_bsad + of_keys, i, s, a * d, c, d, q * before * scale)
    k = _rows(k_bsad + of_keys, i, s, a * d, c, d).to(tl.float32)
    last = _row(g_bsad + of_keys, m * L + L - 1, s, a * d, c, d)
    _store(k_decayed_bsad + of_keys, i, s, a * d, c, d, k * tl.exp2(last[None, :] - g))
    beta = _numbers(beta_bsa + first, i, s, a)
    t = _square(t_mll + (tl.program_id(1) * tl.num_programs(0) + m).to(tl.int64) * L * L, r, r, L)
    _store(w_bsad + of_keys, i, s, a * d, c, d, tl.dot(t, (k * before * beta[:, None]).to(dtype)))
    v = _rows(v_bsaw + first * w, i, s, a * w, cw, w).to(tl.float32)
    _store(u_bsaw + first * w, i, s, a * w, cw, w, tl.dot(t, (v * beta[:, None]).to(dtype)))


@triton.jit
def states_kernel(
    w_bsad, u_bsaw, k_decayed_bsad, g_bsad, first_badw, states_bmadw, u_out_bsaw, last_badw,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """States at the start of each chunk, u, and the state after the last."""
    tile, first = _first(s, a)
    r, c, cv = tl.arange(0, L), tl.arange(0, D), tile * V + tl.arange(0, V)
    at = c[:, None] * w + cv[None, :]
    inside = (c < d)[:, None] & (cv < w)[None, :]
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    size = tl.cast(d, tl.int64) * w
    state = tl.load(first_badw + tl.program_id(1) * size + at, mask=inside, other=0.0)
    chunks = (s + L - 1) // L
    dtype = states_bmadw.dtype.element_ty
    for m in range(chunks):
        i = m * L + r
        rounded = state.to(dtype)
        tl.store(states_bmadw + ((sample * chunks + m) * a + head) * size + at, rounded, mask=inside)
        known = tl.dot(_rows(w_bsad + first * d, i, s, a * d, c, d), rounded)
        u = (_rows(u_bsaw + first * w, i, s, a * w, cv, w).to(tl.float32) - known).to(dtype)
        _store(u_out_bsaw + first * w, i, s, a * w, cv, w, u)
        k = _rows(k_decayed_bsad + first * d, i, s, a * d, c, d)
        over = tl.exp2(_row(g_bsad + first * d, m * L + L - 1, s, a * d, c, d))
        state = tl.dot(tl.trans(k), u, state * over[:, None])
    tl.store(last_badw + tl.program_id(1) * size + at, state, mask=inside)


@triton.jit
def outputs_kernel(
    q_decayed_bsad, p_mll, u_bsaw, states_bmadw, y_bsaw,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    m, first = _first(s, a)
    chunks = tl.num_programs(0)
    r, c, cv = tl.arange(0, L), tl.arange(0, D), tl.program_id(2) * V + tl.arange(0, V)
    i = m * L + r
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    states = ((sample * chunks + m) * a + head).to(tl.int64) * d * w
    y = tl.dot(_rows(q_decayed_bsad + first * d, i, s, a * d, c, d), _rows(states_bmadw + states, c, d, w, cv, w))
    p = _square(p_mll + (tl.program_id(1) * chunks + m).to(tl.int64) * L * L, r, r, L)
    y = tl.dot(p, _rows(u_bsaw + first * w, i, s, a * w, cv, w), y)
    _store(y_bsaw + first * w, i, s, a * w, cv, w, y)


@triton.jit
def dstates_kernel(
    dy_bsaw, p_mll, q_decayed_bsad, k_decayed_bsad, w_bsad, g_bsad, dlast_badw, dstates_bmadw, du_bsaw, dfirst_badw,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Gradients of states at the end of each chunk, of u, and of the state before the first."""
    tile, first = _first(s, a)
    r, c, cv = tl.arange(0, L), tl.arange(0, D), tile * V + tl.arange(0, V)
    at = c[:, None] * w + cv[None, :]
    inside = (c < d)[:, None] & (cv < w)[None, :]
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    size = tl.cast(d, tl.int64) * w
    dstate = tl.load(dlast_badw + tl.program_id(1) * size + at, mask=inside, other=0.0)
    chunks = (s + L - 1) // L
    dtype = dstates_bmadw.dtype.element_ty
    for n in range(chunks):
        m = chunks - 1 - n
        i = m * L + r
        rounded = dstate.to(dtype)
        tl.store(dstates_bmadw + ((sample * chunks + m) * a + head) * size + at, rounded, mask=inside)
        dy = _rows(dy_bsaw + first * w, i, s, a * w, cv, w)
        p = _square(p_mll + (tl.program_id(1) * chunks + m).to(tl.int64) * L * L, r, r, L)
        du = tl.dot(_rows(k_decayed_bsad + first * d, i, s, a * d, c, d), rounded)
        du = tl.dot(tl.trans(p), dy, du).to(dtype)
        _store(du_bsaw + first * w, i, s, a * w, cv, w, du)
        over = tl.exp2(_row(g_bsad + first * d, m * L + L - 1, s, a * d, c, d))
        q = _rows(q_decayed_bsad + first * d, i, s, a * d, c, d)
        dstate = tl.dot(tl.trans(q), dy, dstate * over[:, None])
        dstate -= tl.dot(tl.trans(_rows(w_bsad + first * d, i, s, a * d, c, d)), du)
    tl.store(dfirst_badw + tl.program_id(1) * size + at, dstate, mask=inside)


@triton.jit
def gradients_kernel(
    dy_bsaw, u_bsaw, du_bsaw, v_bsaw, k_bsad, g_bsad, beta_bsa, t_mll, states_bmadw, dstates_bmadw,
    dv_bsaw, dp_mll, da_mll, dq_bsad, dk_row_bsad, dk_column_bsad, dbeta_bsa, dend_bmad,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk: of v, of P and A, and as far as they come from states, of q, k and β.

    `dk_row`: of β k as a row of A and W. `dk_column`: of k in the state at the end. `dend`: of the sum of decays there.
    """
    m, first = _first(s, a)
    chunks = tl.num_programs(0)
    r, c = tl.arange(0, L), tl.arange(0, D)
    i = m * L + r
    dtype = dy_bsaw.dtype.element_ty
    square = (tl.program_id(1) * chunks + m).to(tl.int64) * L * L
    state_row = ((tl.program_id(1) // a) * chunks + m).to(tl.int64) * a + tl.program_id(1) % a
    t = tl.trans(_square(t_mll + square, r, r, L))
    beta = _numbers(beta_bsa + first, i, s, a)
    dp = tl.zeros([L, L], tl.float32)
    da = tl.zeros([L, L], tl.float32)
    dq = tl.zeros([L, D], tl.float32)
    dk_row = tl.zeros([L, D], tl.float32)
    dk_column = tl.zeros([L, D], tl.float32)
    dbeta = tl.zeros([L], tl.float32)
    dover = tl.zeros([D], tl.float32)
    for tile in range(W // V):
        cv = tile * V + tl.arange(0, V)
        dy = _rows(dy_bsaw + first * w, i, s, a * w, cv, w)
        u = _rows(u_bsaw + first * w, i, s, a * w, cv, w)
        state = _rows(states_bmadw + state_row * d * w, c, d, w, cv, w)
        dstate = _rows(dstates_bmadw + state_row * d * w, c, d, w, cv, w)
        dright = tl.dot(t, _rows(du_bsaw + first * w, i, s, a * w, cv, w))
        v = _rows(v_bsaw + first * w, i, s, a * w, cv, w).to(tl.float32)
        dbeta += tl.sum(dright * v, axis=1)
        _store(dv_bsaw + first * w, i, s, a * w, cv, w, dright * beta[:, None])
        rounded = (-dright).to(dtype)
        dp = tl.dot(dy, tl.trans(u), dp)
        da = tl.dot(rounded, tl.trans(u), da)
        dq = tl.dot(dy, tl.trans(state), dq)
        dk_row = tl.dot(rounded, tl.trans(state), dk_row)
        dk_column = tl.dot(u, tl.trans(dstate), dk_column)
        dover += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
    at = r[:, None] * L + r[None, :]
    tl.store(dp_mll + square + at, tl.where(r[:, None] >= r[None, :], dp, 0.0))
    tl.store(da_mll + square + at, tl.where(r[:, None] > r[None, :], da, 0.0))
    of_keys = first * d
    g = _last_rows(g_bsad + of_keys, i, s, a * d, c, d)
    last = _row(g_bsad + of_keys, m * L + L - 1, s, a * d, c, d)
    before = tl.exp2(g)
    k = _rows(k_bsad + of_keys, i, s, a * d, c, d).to(tl.float32)
    _store(dq_bsad + of_keys, i, s, a * d, c, d, dq * before)
    dk_row *= before
    tl.store(dbeta_bsa + first + i.to(tl.int64) * a, dbeta + tl.sum(dk_row * k, axis=1), mask=i < s)
    _store(dk_row_bsad + of_keys, i, s, a * d, c, d, dk_row)
    dk_column *= tl.exp2(last[None, :] - g)
    _store(dk_column_bsad + of_keys, i, s, a * d, c, d, dk_column)
    dend = dover * tl.exp2(last) + tl.sum(dk_column * k, axis=0)
    tl.store(dend_bmad + state_row * d + c, dend, mask=c < d)


@triton.jit
def dpairs_kernel(
    q_bsad, k_bsad, g_bsad, beta_bsa, dp_mll, da_mll, dq_state_bsad, dk_row_bsad, dk_column_bsad, dbeta_state_bsa,
    dq_bsad, dk_bsad, dg_bsad, dbeta_bsa, s, a, d, scale,
    L: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients of a block's q, k, β and G: of its rows of P and A, and of its columns."""
    program, first = _first(s, a)
    m, block = program // BLOCKS, program % BLOCKS
    r, c, stride = tl.arange(0, BLOCK), tl.arange(0, D), a * d
    i, start, of_keys = m * L + block * BLOCK + r, m * L + block * BLOCK, first * d
    query, key, sums, betas = q_bsad + of_keys, k_bsad + of_keys, g_bsad + of_keys, beta_bsa + first
    q = _rows(query, i, s, stride, c, d).to(tl.float32) * scale
    k = _rows(key, i, s, stride, c, d).to(tl.float32)
    beta = _numbers(betas, i, s, a)
    g = _last_rows(sums, i, s, stride, c, d)
    square = (tl.program_id(1) * (tl.num_programs(0) // BLOCKS) + m).to(tl.int64) * L * L
    of_square = r[:, None] * L + r[None, :]

    # Rows.
    at_first = _row(sums, start, s, stride, c, d)
    dq = tl.zeros([BLOCK, D], tl.float32)
    dk_row = tl.zeros([BLOCK, D], tl.float32)
    rows = square + block * BLOCK * L
    for other in range(block):
        j = m * L + other * BLOCK + r
        other_k = _rows(key, j, s, stride, c, d).to(tl.float32)
        other_k *= tl.exp2(at_first[None, :] - _last_rows(sums, j, s, stride, c, d))
        dq = tl.dot(tl.load(dp_mll + rows + of_square + other * BLOCK), other_k, dq)
        dk_row = tl.dot(tl.load(da_mll + rows + of_square + other * BLOCK), other_k, dk_row)
    decay = tl.exp2(g - at_first[None, :])
    dq *= decay
    dk_row *= decay
    diagonal = rows + block * BLOCK
    for n in range(BLOCK):
        j = start + n
        other_k = tl.where(j < s, _row(key, j, s, stride, c, d).to(tl.float32), 0.0)
        seen = (r >= n)[:, None]
        seen_k = (
            tl.where(seen, tl.exp2(tl.minimum(g - _row(sums, j, s, stride, c, d)[None, :], 0.0)), 0.0)
            * other_k[None, :]
        )
        dq += tl.load(dp_mll + diagonal + r * L + n)[:, None] * seen_k
        dk_row += tl.load(da_mll + diagonal + r * L + n)[:, None] * seen_k
    dbeta = _numbers(dbeta_state_bsa + first, i, s, a) + tl.sum(dk_row * k, axis=1)
    tl.store(dbeta_bsa + first + i.to(tl.int64) * a, dbeta, mask=i < s)
    dq += _rows(dq_state_bsad + of_keys, i, s, stride, c, d)
    dk_row = (dk_row + _rows(dk_row_bsad + of_keys, i, s, stride, c, d)) * beta[:, None]
    _store(dq_bsad + of_keys, i, s, stride, c, d, dq * scale)

    # Columns.
    dk_column = _rows(dk_column_bsad + of_keys, i, s, stride, c, d)
    for other in range(block + 1, BLOCKS):
        j = m * L + other * BLOCK + r
        at_other = _row(sums, m * L + other * BLOCK, s, stride, c, d)
        decay = tl.exp2(_last_rows(sums, j, s, stride, c, d) - at_other[None, :])
        other_q = _rows(query, j, s, stride, c, d).to(tl.float32) * (decay * scale)
        other_k = _rows(key, j, s, stride, c, d).to(tl.float32) * (decay * _numbers(betas, j, s, a)[:, None])
        column = square + other * BLOCK * L + block * BLOCK + r[None, :] * L + r[:, None]
        sum_of_block = tl.dot(tl.load(dp_mll + column), other_q)
        sum_of_block = tl.dot(tl.load(da_mll + column), other_k, sum_of_block)
        dk_column += sum_of_block * tl.exp2(at_other[None, :] - g)
    for n in range(BLOCK):
        j = start + n
        inside = j < s
        other_q = tl.where(inside, _row(query, j, s, stride, c, d).to(tl.float32) * scale, 0.0)
        other_k = _row(key, j, s, stride, c, d).to(tl.float32) * tl.load(betas + j.to(tl.int64) * a, inside, other=0.0)
        weights = tl.load(dp_mll + diagonal + n * L + r)[:, None] * other_q[None, :]
        weights += tl.load(da_mll + diagonal + n * L + r)[:, None] * other_k[None, :]
        seeing = (r <= n)[:, None]
        dk_column += (
            tl.where(seeing, tl.exp2(tl.minimum(_row(sums, j, s, stride, c, d)[None, :] - g, 0.0)), 0.0) * weights
        )
    _store(dk_bsad + of_keys, i, s, stride, c, d, dk_row + dk_column)
    _store(dg_bsad + of_keys, i, s, stride, c, d, q * dq + k * (dk_row - dk_column))


class Inputs(NamedTuple):
    """Contiguous inputs of the rule as kernels take them: q, k and v of one dtype, decays and β fp32."""

    q_bsad: Tensor
    k_bsad: Tensor
    v_bsaw: Tensor
    decay_bsad: Tensor
    beta_bsa: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Inputs:
        """From tensors `[s, b, a, ...]`."""
        q, k, v = (kernel_input(x.transpose(0, 1).contiguous()) for x in (q, k, v))
        decay, beta = (x.transpose(0, 1).to(torch.float32).contiguous() for x in (decay, beta))
        return cls(q, k, v, decay, beta)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """s, a, d, w."""
        return (*self.q_bsad.shape[1:], self.v_bsaw.shape[3])

    @property
    def scale(self) -> float:
        return self.q_bsad.shape[3] ** -0.5

    @property
    def chunks(self) -> int:
        return ceil_div(self.q_bsad.shape[1], CHUNK)

    @property
    def heads(self) -> int:
        """Those of all samples."""
        return self.q_bsad.shape[0] * self.q_bsad.shape[2]

    def squares(self, dtype: torch.dtype) -> Tensor:
        """A matrix for each head and chunk."""
        return self.q_bsad.new_empty(self.heads * self.chunks, CHUNK, CHUNK, dtype=dtype)

    def states(self) -> Tensor:
        """A state for each chunk and head, `[b, m, a, d, w]`."""
        b, _, a, d = self.q_bsad.shape
        return self.q_bsad.new_empty(b, self.chunks, a, d, self.v_bsaw.shape[3])


class Saved(NamedTuple):
    """What backward needs besides the inputs."""

    sums_bsad: Tensor
    p_mll: Tensor
    t_mll: Tensor
    q_decayed_bsad: Tensor
    k_decayed_bsad: Tensor
    w_bsad: Tensor
    u_bsaw: Tensor
    states_bmadw: Tensor


def _width(n: int) -> int:
    return max(16, next_power_of_2(n))


_BASE_2 = 1.4426950408889634
_BLOCK_SIZES = {"L": CHUNK, "BLOCK": _BLOCK, "BLOCKS": _BLOCKS}


def forward(inputs: Inputs, state_badw: Tensor) -> tuple[Tensor, Tensor, Saved]:
    """Outputs `[b, s, a, w]` and the state after the last token."""
    q, k, v, decay, beta = inputs
    (s, a, d, w), m, heads, dtype = inputs.sizes, inputs.chunks, inputs.heads, q.dtype
    width, value_width = _width(d), _width(w)
    sums = torch.empty_like(decay)
    sums_kernel[m, heads](decay, None, sums, s, a, d, _BASE_2, REVERSE=False, L=CHUNK, D=width, num_warps=4)
    p, of_keys, t = inputs.squares(dtype), inputs.squares(torch.float32), inputs.squares(dtype)
    pairs_kernel[m * _BLOCKS, heads](
        q, k, sums, beta, p, of_keys, s, a, d, inputs.scale, **_BLOCK_SIZES, D=width, num_warps=4
    )
    invert_kernel[m * heads,](of_keys, t, **_BLOCK_SIZES, num_warps=4)
    q_decayed, k_decayed, weights, values = (torch.empty_like(x) for x in (q, k, k, v))
    operands_kernel[m, heads](
        q, k, v, sums, beta, t, q_decayed, k_decayed, weights, values, s, a, d, w, inputs.scale,
        L=CHUNK, D=width, W=value_width, num_warps=8,
    )  # fmt: skip
    states, u, state_badw = inputs.states(), torch.empty_like(v), state_badw.contiguous()
    last, y = torch.empty_like(state_badw), torch.empty_like(v)
    channels = min(_STATE_CHANNELS, value_width)
    states_kernel[ceil_div(w, channels), heads](
        weights, values, k_decayed, sums, state_badw, states, u, last, s, a, d, w,
        L=CHUNK, D=width, V=channels, num_warps=4, num_stages=2,
    )  # fmt: skip
    channels = min(_OUTPUT_CHANNELS, value_width)
    outputs_kernel[m, heads, ceil_div(w, channels)](
        q_decayed, p, u, states, y, s, a, d, w, L=CHUNK, D=width, V=channels, num_warps=4
    )
    return y, last, Saved(sums, p, t, q_decayed, k_decayed, weights, u, states)


def backward(
    inputs: Inputs, saved: Saved, dy_bsaw: Tensor, dlast_badw: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, decays and β `[b, s, a, ...]` and of the state before the first token."""
    q, k, v, decay, beta = inputs
    sums, p, t, q_decayed, k_decayed, weights, u, states = saved
    (s, a, d, w), m, heads = inputs.sizes, inputs.chunks, inputs.heads
    width, value_width = _width(d), _width(w)
    dy, dlast = kernel_input(dy_bsaw.contiguous()), dlast_badw.contiguous()
    dstates, du, dfirst = torch.empty_like(states), torch.empty_like(u), torch.empty_like(dlast)
    channels = min(_STATE_CHANNELS, value_width)
    dstates_kernel[ceil_div(w, channels), heads](
        dy, p, q_decayed, k_decayed, weights, sums, dlast, dstates, du, dfirst, s, a, d, w,
        L=CHUNK, D=width, V=channels, num_warps=4, num_stages=2,
    )  # fmt: skip
    dv, dp, da = torch.empty_like(v), inputs.squares(torch.float32), inputs.squares(torch.float32)
    dq_state, dk_row, dk_column = (torch.empty_like(decay) for _ in range(3))
    dbeta_state, dend = torch.empty_like(beta), decay.new_empty(q.shape[0], m, a, d)
    gradients_kernel[m, heads](
        dy, u, du, v, k, sums, beta, t, states, dstates, dv, dp, da, dq_state, dk_row, dk_column, dbeta_state, dend,
        s, a, d, w, L=CHUNK, D=width, W=value_width, V=channels, num_warps=8, num_stages=2,
    )  # fmt: skip
    dq, dk, dsums, dbeta = (torch.empty_like(x) for x in (q, k, sums, beta))
    dpairs_kernel[m * _BLOCKS, heads](
        q, k, sums, beta, dp, da, dq_state, dk_row, dk_column, dbeta_state, dq, dk, dsums, dbeta, s, a, d, inputs.scale,
        **_BLOCK_SIZES, D=width, num_warps=4,
    )  # fmt: skip
    ddecay = dk_row  # its values are not needed any more
    sums_kernel[m, heads](dsums, dend, ddecay, s, a, d, 1.0, REVERSE=True, L=CHUNK, D=width, num_warps=4)
    return dq, dk, dv, ddecay, dbeta, dfirst
