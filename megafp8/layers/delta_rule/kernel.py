"""Kernels for the gated delta rule in chunks with a decay per key channel, forward and backward.

Reference: `megafp8.layers.delta_rule.op.recurrence`; its file also has the formulas and the papers. Consider a chunk of
L tokens, and let G be the running sum of decays from its start (here in base 2, so that exp is exp2):

    P_ij = Σ_d exp(G_i − G_j) q_i k_j  for j ≤ i,     A_ij = β_i Σ_d exp(G_i − G_j) k_i k_j  for j < i
    T = (I + A)⁻¹,     W = T (β exp(G) k),     U = T (β v)
    u = U − W S₀,      y = (exp(G) q) S₀ + P u,      S_L = exp(G_L) S₀ + (exp(G_L − G) k)ᵀ u

exp(G_i − G_j) cannot be split into one factor per i and one factor per j, because fp32 could not hold such factors. But
suppose that i lies in a later part of the tokens than j, and let r be the sum up to the first token of the later part.
Then exp(G_i − G_j) = exp(G_i − r) exp(r − G_j), neither exponent is positive, and a GEMM computes the products. So
chunks are cut into blocks of 16 tokens, each block into halves, the halves into halves, and so on down to single
tokens. Each pair of tokens in a block is then split by exactly one of four levels. Each level takes one GEMM over all
tokens of the block and keeps only its own pairs: the pairs for which the highest bit of i xor j belongs to the level.
The inversion uses the same levels: T ← T − T A_h T, where A_h has the pairs split into halves of h tokens. After that
step, T (I + A) is the identity within parts of 2h tokens.

    sums        G of each chunk
    pairs       P, A and the decayed queries and keys; one program per block of rows
    operands    T, W and U; one program per chunk
    states      state at the start of each chunk, and u; one program per head and slice of value channels, which runs
                through the chunks in order. `dstates` runs backward and computes the gradients of states and u
    outputs     y; one program per chunk and slice of value channels
    gradients   gradients of v, P, A and the decayed queries and keys; one program per chunk. The formulas above
                give dA = −(Tᵀ du) uᵀ
    dpairs      gradients of q, k, β and decays from the gradients above; one program per chunk

The gradient of G is q·dq + k·(dk as a row of P and A) − k·(dk as a column). The gradient of a token's decay is the sum
of the gradients of G from that token to the end of the chunk. States and their gradients are fp32 in registers and are
rounded to the inputs' dtype in memory. GEMMs accumulate in fp32. Their factors are rounded to the inputs' dtype, except
the fp32 factors of the inversion and of `dpairs`, which are rounded to tf32. All results are deterministic.

Shapes: b micro-batch size, s sequence length, a heads, d and w channels of keys and of values; m chunks of L tokens; D
and W are d and w rounded up to powers of 2; V value channels per program.
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
_LEVELS = _BLOCK.bit_length() - 1
_STATE_CHANNELS = 32
"""Value channels per program in the kernels that run from chunk to chunk."""
_OUTPUT_CHANNELS = 128


@triton.jit
def _rows(x, i, s, stride, c, count):
    """Load channels `c` of tokens `i`, with zeros beyond s tokens and `count` channels."""
    at = i[:, None] * stride + c[None, :]
    return tl.load(x + at, mask=(i < s)[:, None] & (c < count)[None, :], other=0.0)


@triton.jit
def _last_rows(x, i, s, stride, c, count):
    """Load channels `c` of tokens `i` like `_rows`, but repeat the last token beyond s tokens."""
    at = tl.minimum(i, s - 1)[:, None] * stride + c[None, :]
    return tl.load(x + at, mask=(c < count)[None, :], other=0.0)


@triton.jit
def _row(x, i, s, stride, c, count):
    """Load channels `c` of token `i`, or of the last token if `i` is beyond it."""
    return tl.load(x + tl.minimum(i, s - 1).to(tl.int64) * stride + c, mask=c < count, other=0.0)


@triton.jit
def _store(x, i, s, stride, c, count, values):
    at = i[:, None] * stride + c[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(i < s)[:, None] & (c < count)[None, :])


@triton.jit
def _numbers(x, i, s, stride):
    """Load one number for each of the tokens `i`, with zeros beyond s tokens."""
    return tl.load(x + i.to(tl.int64) * stride, mask=i < s, other=0.0)


@triton.jit
def _square(x, r, c, L: tl.constexpr):
    """Load rows `r` and columns `c` of a matrix `[L, L]`, with zeros above the diagonal."""
    return tl.load(x + r[:, None] * L + c[None, :], mask=r[:, None] >= c[None, :], other=0.0)


@triton.jit
def _first(s, a):
    """Return this program's chunk or tile, and the first row of its head in `[b, s, a]`, sample · s · a + head."""
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    return tl.program_id(0), sample.to(tl.int64) * s * a + head


@triton.jit
def sums_kernel(x_bsad, y_bsad, s, a, d, factor, L: tl.constexpr, D: tl.constexpr):
    """Compute the running sums over the tokens of a chunk, times `factor`."""
    m, first = _first(s, a)
    i, c = (m * L + tl.arange(0, L)).to(tl.int64), tl.arange(0, D)
    x = _rows(x_bsad + first * d, i, s, a * d, c, d)
    _store(y_bsad + first * d, i, s, a * d, c, d, tl.cumsum(x, axis=0) * factor)


@triton.jit
def _middles(sums, start, r, half, s, stride, c, d):
    """Load, for each token `start + r`, the reference G of its part of 2 · `half` tokens.

    This is G of the first token in the second half of the part.
    """
    return _last_rows(sums, start + ((r | half) & -half), s, stride, c, d)


@triton.jit
def pairs_kernel(
    q_bsad, k_bsad, g_bsad, beta_bsa, p_mll, a_mll, q_decayed_bsad, k_decayed_bsad, s, a, d, scale,
    L: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of P, A, q exp(G) and k exp(G_L − G)."""
    program, first = _first(s, a)
    m, block = program // BLOCKS, program % BLOCKS
    r, c, stride = tl.arange(0, BLOCK), tl.arange(0, D), a * d
    dtype = q_bsad.dtype.element_ty
    first += tl.cast(m * L, tl.int64) * a
    s -= m * L
    start = block * BLOCK
    i = start + r
    key, sums = k_bsad + first * d, g_bsad + first * d
    q = _rows(q_bsad + first * d, i, s, stride, c, d).to(tl.float32)
    k = _rows(key, i, s, stride, c, d).to(tl.float32)
    g = _last_rows(sums, i, s, stride, c, d)
    last = _row(sums, L - 1, s, stride, c, d)
    _store(q_decayed_bsad + first * d, i, s, stride, c, d, q * tl.exp2(g) * scale)
    _store(k_decayed_bsad + first * d, i, s, stride, c, d, k * tl.exp2(last[None, :] - g))
    beta = _numbers(beta_bsa + first, i, s, a)[:, None]
    square = (tl.program_id(1) * (tl.num_programs(0) // BLOCKS) + m).to(tl.int64) * L * L
    out = square + (block * BLOCK + r)[:, None] * L + r[None, :]

    at_first = _row(sums, start, s, stride, c, d)[None, :]
    decay = tl.exp2(g - at_first)
    q_decayed, k_decayed = (q * decay).to(dtype), (k * decay).to(dtype)
    for other in range(block):
        j = other * BLOCK + r
        other_k = _rows(key, j, s, stride, c, d).to(tl.float32)
        other_k = tl.trans((other_k * tl.exp2(at_first - _last_rows(sums, j, s, stride, c, d))).to(dtype))
        tl.store(p_mll + out + other * BLOCK, (tl.dot(q_decayed, other_k) * scale).to(dtype))
        tl.store(a_mll + out + other * BLOCK, tl.dot(k_decayed, other_k) * beta)

    apart = r[:, None] ^ r[None, :]
    p = tl.where(apart == 0, tl.sum(q * k, axis=1)[:, None], 0.0)
    products = tl.zeros([BLOCK, BLOCK], tl.float32)
    middle = _middles(sums, start, r, 1, s, stride, c, d)
    for level in range(LEVELS):
        decay = tl.exp2(-tl.abs(g - middle))
        middle = _middles(sums, start, r, 2 << level, s, stride, c, d)
        here = ((apart >> level) == 1) & (r[:, None] > r[None, :])
        k_decayed = (k * decay).to(dtype)
        p = tl.where(here, tl.dot((q * decay).to(dtype), tl.trans(k_decayed)), p)
        products = tl.where(here, tl.dot(k_decayed, tl.trans(k_decayed)), products)
    tl.store(p_mll + out + block * BLOCK, (p * scale).to(dtype))
    tl.store(a_mll + out + block * BLOCK, products * beta)


@triton.jit
def _inverse(x, apart, LEVELS: tl.constexpr):
    """Return (I + x)⁻¹ for a matrix x that is zero on and above its diagonal."""
    t = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, x, 0.0)
    for level in tl.static_range(1, LEVELS):
        t -= tl.dot(t, tl.dot(tl.where((apart >> level) == 1, x, 0.0), t))
    return t


@triton.jit
def operands_kernel(
    k_bsad, v_bsaw, g_bsad, beta_bsa, a_mll, t_mll, w_bsad, u_bsaw,
    s, a, d, w, L: tl.constexpr, LEVELS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute T, W and U of a chunk; T = [[T_early, 0], [T_between, T_late]] by halves of the chunk."""
    HALF: tl.constexpr = L // 2
    m, first = _first(s, a)
    r, c, cw = tl.arange(0, HALF), tl.arange(0, D), tl.arange(0, W)
    square = (tl.program_id(1) * tl.num_programs(0) + m).to(tl.int64) * L * L + r[:, None] * L + r[None, :]
    apart, below = r[:, None] ^ r[None, :], r[:, None] > r[None, :]
    dtype = t_mll.dtype.element_ty
    early = _inverse(tl.load(a_mll + square, mask=below, other=0.0), apart, LEVELS)
    late = _inverse(tl.load(a_mll + square + HALF * (L + 1), mask=below, other=0.0), apart, LEVELS)
    between = (-tl.dot(late, tl.dot(tl.load(a_mll + square + HALF * L), early))).to(dtype)
    early, late = early.to(dtype), late.to(dtype)
    tl.store(t_mll + square, early)
    tl.store(t_mll + square + HALF * L, between)
    tl.store(t_mll + square + HALF * (L + 1), late)

    first += tl.cast(m * L, tl.int64) * a
    s -= m * L
    i, j, key_at = r, r + HALF, first * d
    beta_i, beta_j = _numbers(beta_bsa + first, i, s, a)[:, None], _numbers(beta_bsa + first, j, s, a)[:, None]
    k_i = _rows(k_bsad + key_at, i, s, a * d, c, d).to(tl.float32)
    k_i = (k_i * tl.exp2(_last_rows(g_bsad + key_at, i, s, a * d, c, d)) * beta_i).to(dtype)
    k_j = _rows(k_bsad + key_at, j, s, a * d, c, d).to(tl.float32)
    k_j = (k_j * tl.exp2(_last_rows(g_bsad + key_at, j, s, a * d, c, d)) * beta_j).to(dtype)
    _store(w_bsad + key_at, i, s, a * d, c, d, tl.dot(early, k_i))
    _store(w_bsad + key_at, j, s, a * d, c, d, tl.dot(late, k_j, tl.dot(between, k_i)))
    v_i = (_rows(v_bsaw + first * w, i, s, a * w, cw, w).to(tl.float32) * beta_i).to(dtype)
    v_j = (_rows(v_bsaw + first * w, j, s, a * w, cw, w).to(tl.float32) * beta_j).to(dtype)
    _store(u_bsaw + first * w, i, s, a * w, cw, w, tl.dot(early, v_i))
    _store(u_bsaw + first * w, j, s, a * w, cw, w, tl.dot(late, v_j, tl.dot(between, v_i)))


@triton.jit
def states_kernel(
    w_bsad, u_bsaw, k_decayed_bsad, g_bsad, first_badw, states_bmadw, u_out_bsaw, last_badw,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute the state at the start of each chunk, u, and the state after the last chunk."""
    tile, first = _first(s, a)
    r, c, cv = tl.arange(0, L), tl.arange(0, D), tile * V + tl.arange(0, V)
    at = c[:, None] * w + cv[None, :]
    inside = (c < d)[:, None] & (cv < w)[None, :]
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    size = tl.cast(d, tl.int64) * w
    state = tl.load(first_badw + tl.program_id(1) * size + at, mask=inside, other=0.0)
    chunks = (s + L - 1) // L
    dtype = states_bmadw.dtype.element_ty
    sums = _row(g_bsad + first * d, L - 1, s, a * d, c, d)
    for m in range(chunks):
        i = (m * L + r).to(tl.int64)
        following = _row(g_bsad + first * d, (m + 2) * L - 1, s, a * d, c, d)  # load early to hide the latency
        rounded = state.to(dtype)
        tl.store(states_bmadw + ((sample * chunks + m) * a + head) * size + at, rounded, mask=inside)
        known = tl.dot(_rows(w_bsad + first * d, i, s, a * d, c, d), rounded)
        u = (_rows(u_bsaw + first * w, i, s, a * w, cv, w).to(tl.float32) - known).to(dtype)
        _store(u_out_bsaw + first * w, i, s, a * w, cv, w, u)
        k = _rows(k_decayed_bsad + first * d, i, s, a * d, c, d)
        state = tl.dot(tl.trans(k), u, state * tl.exp2(sums)[:, None])
        sums = following
    tl.store(last_badw + tl.program_id(1) * size + at, state, mask=inside)


@triton.jit
def outputs_kernel(
    q_decayed_bsad, p_mll, u_bsaw, states_bmadw, y_bsaw,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Compute the outputs y of a chunk for a slice of value channels."""
    m, first = _first(s, a)
    chunks = tl.num_programs(0)
    r, c, cv = tl.arange(0, L), tl.arange(0, D), tl.program_id(2) * V + tl.arange(0, V)
    i = (m * L + r).to(tl.int64)
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
    """Compute the gradients of the state at the end of each chunk, of u, and of the state before the first chunk."""
    tile, first = _first(s, a)
    r, c, cv = tl.arange(0, L), tl.arange(0, D), tile * V + tl.arange(0, V)
    at = c[:, None] * w + cv[None, :]
    inside = (c < d)[:, None] & (cv < w)[None, :]
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    size = tl.cast(d, tl.int64) * w
    dstate = tl.load(dlast_badw + tl.program_id(1) * size + at, mask=inside, other=0.0)
    chunks = (s + L - 1) // L
    dtype = dstates_bmadw.dtype.element_ty
    sums = _row(g_bsad + first * d, s - 1, s, a * d, c, d)
    for n in range(chunks):
        m = chunks - 1 - n
        i = (m * L + r).to(tl.int64)
        following = _row(g_bsad + first * d, tl.maximum(m * L - 1, 0), s, a * d, c, d)
        rounded = dstate.to(dtype)
        tl.store(dstates_bmadw + ((sample * chunks + m) * a + head) * size + at, rounded, mask=inside)
        dy = _rows(dy_bsaw + first * w, i, s, a * w, cv, w)
        p = _square(p_mll + (tl.program_id(1) * chunks + m).to(tl.int64) * L * L, r, r, L)
        du = tl.dot(_rows(k_decayed_bsad + first * d, i, s, a * d, c, d), rounded)
        du = tl.dot(tl.trans(p), dy, du).to(dtype)
        _store(du_bsaw + first * w, i, s, a * w, cv, w, du)
        q = _rows(q_decayed_bsad + first * d, i, s, a * d, c, d)
        dstate = tl.dot(tl.trans(q), dy, dstate * tl.exp2(sums)[:, None])
        dstate -= tl.dot(tl.trans(_rows(w_bsad + first * d, i, s, a * d, c, d)), du)
        sums = following
    tl.store(dfirst_badw + tl.program_id(1) * size + at, dstate, mask=inside)


@triton.jit
def gradients_kernel(
    dy_bsaw, u_bsaw, du_bsaw, v_bsaw, k_bsad, g_bsad, beta_bsa, t_mll, states_bmadw, dstates_bmadw,
    dv_bsaw, dp_mll, da_mll, dq_bsad, dk_row_bsad, dk_column_bsad, dbeta_bsa, dend_bmad,
    s, a, d, w, L: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute a chunk's gradients of v, P and A, and the parts of the gradients of q, k and β that come from states.

    The gradients of P_ij and A_ij are also written at (j, i), where A's is multiplied by β_i, because `dpairs` reads
    both. `dk_row` is the gradient of β k as a row of A and W. `dk_column` is the gradient of k in the state at the end
    of the chunk. `dend` is the gradient of the sum of decays at the end.
    """
    m, first = _first(s, a)
    chunks = tl.num_programs(0)
    r, c = tl.arange(0, L), tl.arange(0, D)
    i = (m * L + r).to(tl.int64)
    dtype = dy_bsaw.dtype.element_ty
    square = (tl.program_id(1) * chunks + m).to(tl.int64) * L * L
    state_row = ((tl.program_id(1) // a) * chunks + m).to(tl.int64) * a + tl.program_id(1) % a
    t = tl.trans(_square(t_mll + square, r, r, L))
    beta = _numbers(beta_bsa + first, i, s, a)
    cv = tl.arange(0, W)
    dy = _rows(dy_bsaw + first * w, i, s, a * w, cv, w)
    u = _rows(u_bsaw + first * w, i, s, a * w, cv, w)
    state = _rows(states_bmadw + state_row * d * w, c, d, w, cv, w)
    dstate = _rows(dstates_bmadw + state_row * d * w, c, d, w, cv, w)
    dright = tl.dot(t, _rows(du_bsaw + first * w, i, s, a * w, cv, w))
    v = _rows(v_bsaw + first * w, i, s, a * w, cv, w).to(tl.float32)
    dbeta = tl.sum(dright * v, axis=1)
    _store(dv_bsaw + first * w, i, s, a * w, cv, w, dright * beta[:, None])
    rounded = (-dright).to(dtype)
    dp = tl.dot(dy, tl.trans(u))
    da = tl.dot(rounded, tl.trans(u))
    dq = tl.dot(dy, tl.trans(state))
    dk_row = tl.dot(rounded, tl.trans(state))
    dk_column = tl.dot(u, tl.trans(dstate))
    dover = tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
    at = r[:, None] * L + r[None, :]
    lower = r[:, None] >= r[None, :]
    tl.store(dp_mll + square + at, tl.where(lower, dp, tl.trans(dp)))
    tl.store(da_mll + square + at, tl.where(lower, da, tl.trans(da * beta[:, None])))
    key_at = first * d
    g = _last_rows(g_bsad + key_at, i, s, a * d, c, d)
    last = _row(g_bsad + key_at, m * L + L - 1, s, a * d, c, d)
    before = tl.exp2(g)
    k = _rows(k_bsad + key_at, i, s, a * d, c, d).to(tl.float32)
    _store(dq_bsad + key_at, i, s, a * d, c, d, dq * before)
    dk_row *= before
    tl.store(dbeta_bsa + first + i.to(tl.int64) * a, dbeta + tl.sum(dk_row * k, axis=1), mask=i < s)
    _store(dk_row_bsad + key_at, i, s, a * d, c, d, dk_row)
    dk_column *= tl.exp2(last[None, :] - g)
    _store(dk_column_bsad + key_at, i, s, a * d, c, d, dk_column)
    dend = dover * tl.exp2(last) + tl.sum(dk_column * k, axis=0)
    tl.store(dend_bmad + state_row * d + c, dend, mask=c < d)


@triton.jit
def dpairs_kernel(
    q_bsad, k_bsad, g_bsad, beta_bsa, dp_mll, da_mll, dq_state_bsad, dk_row_bsad, dk_column_bsad, dbeta_state_bsa,
    dend_bmad, dq_bsad, dk_bsad, ddecay_bsad, dbeta_bsa, s, a, d, scale,
    L: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's q, k, β and decays, from its last block to its first.

    At each level, tokens in second halves are rows of P and A, and tokens in first halves are columns. So one GEMM for
    P and one for A give the gradients of rows and columns.
    """
    m, first = _first(s, a)
    r, c, stride = tl.arange(0, BLOCK), tl.arange(0, D), a * d
    first += tl.cast(m * L, tl.int64) * a
    s -= m * L
    key_at = first * d
    query, key, sums = q_bsad + key_at, k_bsad + key_at, g_bsad + key_at
    apart = r[:, None] ^ r[None, :]
    square = (tl.program_id(1) * tl.num_programs(0) + m).to(tl.int64) * L * L
    square_at = r[:, None] * L + r[None, :]
    end = ((tl.program_id(1) // a) * tl.num_programs(0) + m).to(tl.int64) * a + tl.program_id(1) % a
    later_dg = tl.load(dend_bmad + end * d + c, mask=c < d, other=0.0)
    for n in range(BLOCKS):
        block = BLOCKS - 1 - n
        start = block * BLOCK
        i = start + r
        q = _rows(query, i, s, stride, c, d).to(tl.float32) * scale
        k = _rows(key, i, s, stride, c, d).to(tl.float32)
        g = _last_rows(sums, i, s, stride, c, d)
        rows = square + block * BLOCK * L

        at_first = _row(sums, start, s, stride, c, d)[None, :]
        dq = tl.zeros([BLOCK, D], tl.float32)
        dk_row = tl.zeros([BLOCK, D], tl.float32)
        for other in range(block):
            j = other * BLOCK + r
            other_k = _rows(key, j, s, stride, c, d).to(tl.float32)
            other_k = other_k * tl.exp2(at_first - _last_rows(sums, j, s, stride, c, d))
            dq = tl.dot(tl.load(dp_mll + rows + square_at + other * BLOCK), other_k, dq)
            dk_row = tl.dot(tl.load(da_mll + rows + square_at + other * BLOCK), other_k, dk_row)
        decay = tl.exp2(g - at_first)
        dq *= decay
        dk_row *= decay

        dk_column = tl.zeros([BLOCK, D], tl.float32)
        for other in range(block + 1, BLOCKS):
            j = other * BLOCK + r
            at_other = _row(sums, other * BLOCK, s, stride, c, d)[None, :]
            decay = tl.exp2(_last_rows(sums, j, s, stride, c, d) - at_other)
            other_q = _rows(query, j, s, stride, c, d).to(tl.float32) * (decay * scale)
            other_k = _rows(key, j, s, stride, c, d).to(tl.float32) * decay
            block_sum = tl.dot(tl.load(dp_mll + rows + square_at + other * BLOCK), other_q)
            block_sum = tl.dot(tl.load(da_mll + rows + square_at + other * BLOCK), other_k, block_sum)
            dk_column += block_sum * tl.exp2(at_other - g)

        dp = tl.load(dp_mll + rows + square_at + block * BLOCK)
        da = tl.load(da_mll + rows + square_at + block * BLOCK)
        diagonal = tl.load(dp_mll + rows + block * BLOCK + r * (L + 1))[:, None]
        dq += diagonal * k
        dk_column += diagonal * q
        middle = _middles(sums, start, r, 1, s, stride, c, d)
        for level in range(LEVELS):
            decay = tl.exp2(-tl.abs(g - middle))
            middle = _middles(sums, start, r, 2 << level, s, stride, c, d)
            here, later = (apart >> level) == 1, ((r >> level) & 1 == 1)[:, None]
            p_part = decay * tl.dot(tl.where(here, dp, 0.0), tl.where(later, q, k) * decay)
            a_part = decay * tl.dot(tl.where(here, da, 0.0), k * decay)
            dq += tl.where(later, p_part, 0.0)
            dk_row += tl.where(later, a_part, 0.0)
            dk_column += tl.where(later, 0.0, p_part + a_part)

        beta = _numbers(beta_bsa + first, i, s, a)[:, None]
        dbeta = _numbers(dbeta_state_bsa + first, i, s, a) + tl.sum(dk_row * k, axis=1)
        tl.store(dbeta_bsa + first + i.to(tl.int64) * a, dbeta, mask=i < s)
        dq += _rows(dq_state_bsad + key_at, i, s, stride, c, d)
        _store(dq_bsad + key_at, i, s, stride, c, d, dq * scale)
        dk_row = (dk_row + _rows(dk_row_bsad + key_at, i, s, stride, c, d)) * beta
        dk_column += _rows(dk_column_bsad + key_at, i, s, stride, c, d)
        _store(dk_bsad + key_at, i, s, stride, c, d, dk_row + dk_column)
        dg = q * dq + k * (dk_row - dk_column)
        _store(ddecay_bsad + key_at, i, s, stride, c, d, tl.cumsum(dg, axis=0, reverse=True) + later_dg[None, :])
        later_dg += tl.sum(dg, axis=0)


class DeltaRuleInputs(NamedTuple):
    """Contiguous inputs of the kernels. q, k and v have one dtype; decays and β are fp32."""

    q_bsad: Tensor
    k_bsad: Tensor
    v_bsaw: Tensor
    decay_bsad: Tensor
    beta_bsa: Tensor

    @classmethod
    def from_tensors(cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> DeltaRuleInputs:
        """Copy tensors `[s, b, a, ...]` into the layout of the kernels, `[b, s, a, ...]`."""
        q, k, v = (kernel_input(x.transpose(0, 1).contiguous()) for x in (q, k, v))
        decay, beta = (x.transpose(0, 1).to(torch.float32).contiguous() for x in (decay, beta))
        return cls(q, k, v, decay, beta)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes s, a, d and w."""
        return (*self.q_bsad.shape[1:], self.v_bsaw.shape[3])

    @property
    def scale(self) -> float:
        """Scale of queries, 1/√d."""
        return self.q_bsad.shape[3] ** -0.5

    @property
    def chunks(self) -> int:
        """Number of chunks of a sequence."""
        return ceil_div(self.q_bsad.shape[1], CHUNK)

    @property
    def heads(self) -> int:
        """Number of heads of all samples, b · a."""
        return self.q_bsad.shape[0] * self.q_bsad.shape[2]

    def squares(self, dtype: torch.dtype) -> Tensor:
        """Allocate an `[L, L]` matrix for each head and chunk."""
        return self.q_bsad.new_empty(self.heads * self.chunks, CHUNK, CHUNK, dtype=dtype)

    def states(self) -> Tensor:
        """Allocate a state for each chunk and head, `[b, m, a, d, w]`."""
        b, _, a, d = self.q_bsad.shape
        return self.q_bsad.new_empty(b, self.chunks, a, d, self.v_bsaw.shape[3])


class DeltaRuleSaved(NamedTuple):
    """Results of forward that backward needs, in addition to the inputs."""

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


def _dstates_warps(width: int) -> int:
    """Return the number of warps for `dstates_kernel`.

    On an H100, Triton 3.6 with 4 warps computes the gradients of states of 64 channels with an error of 5%; with 8
    warps they are correct. A test on GPUs compares each width.
    """
    return 8 if width == 64 else 4


_BASE_2 = 1.4426950408889634
_BLOCK_SIZES = {"L": CHUNK, "BLOCK": _BLOCK, "BLOCKS": _BLOCKS, "LEVELS": _LEVELS}


def forward(inputs: DeltaRuleInputs, state_badw: Tensor) -> tuple[Tensor, Tensor, DeltaRuleSaved]:
    """Return the outputs `[b, s, a, w]`, the state after the last token, and the tensors that backward needs."""
    q, k, v, decay, beta = inputs
    (s, a, d, w), m, heads, dtype = inputs.sizes, inputs.chunks, inputs.heads, q.dtype
    width, value_width = _width(d), _width(w)
    sums = torch.empty_like(decay)
    sums_kernel[m, heads](decay, sums, s, a, d, _BASE_2, L=CHUNK, D=width, num_warps=4)
    p, k_pairs, t = inputs.squares(dtype), inputs.squares(torch.float32), inputs.squares(dtype)
    q_decayed, k_decayed, weights, values = (torch.empty_like(x) for x in (q, k, k, v))
    pairs_kernel[m * _BLOCKS, heads](
        q, k, sums, beta, p, k_pairs, q_decayed, k_decayed, s, a, d, inputs.scale, **_BLOCK_SIZES, D=width, num_warps=2
    )
    operands_kernel[m, heads](
        k, v, sums, beta, k_pairs, t, weights, values, s, a, d, w,
        L=CHUNK, LEVELS=_LEVELS + 1, D=width, W=value_width, num_warps=4, maxnreg=128,
    )  # fmt: skip
    states, u, state_badw = inputs.states(), torch.empty_like(v), state_badw.contiguous()
    last, y = torch.empty_like(state_badw), torch.empty_like(v)
    channels = min(_STATE_CHANNELS, value_width)
    states_kernel[ceil_div(w, channels), heads](
        weights, values, k_decayed, sums, state_badw, states, u, last, s, a, d, w,
        L=CHUNK, D=width, V=channels, num_warps=4, num_stages=3,
    )  # fmt: skip
    channels = min(_OUTPUT_CHANNELS, value_width)
    outputs_kernel[m, heads, ceil_div(w, channels)](
        q_decayed, p, u, states, y, s, a, d, w, L=CHUNK, D=width, V=channels, num_warps=4
    )
    return y, last, DeltaRuleSaved(sums, p, t, q_decayed, k_decayed, weights, u, states)


def backward(
    inputs: DeltaRuleInputs, saved: DeltaRuleSaved, dy_bsaw: Tensor, dlast_badw: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, decays and β, `[b, s, a, ...]`, and of the state before the first token."""
    q, k, v, decay, beta = inputs
    sums, p, t, q_decayed, k_decayed, weights, u, states = saved
    (s, a, d, w), m, heads = inputs.sizes, inputs.chunks, inputs.heads
    width, value_width = _width(d), _width(w)
    dy, dlast = kernel_input(dy_bsaw.contiguous()), dlast_badw.contiguous()
    dstates, du, dfirst = torch.empty_like(states), torch.empty_like(u), torch.empty_like(dlast)
    channels = min(_STATE_CHANNELS, value_width)
    dstates_kernel[ceil_div(w, channels), heads](
        dy, p, q_decayed, k_decayed, weights, sums, dlast, dstates, du, dfirst, s, a, d, w,
        L=CHUNK, D=width, V=channels, num_warps=_dstates_warps(width), num_stages=3,
    )  # fmt: skip
    dv, dp, da = torch.empty_like(v), inputs.squares(torch.float32), inputs.squares(torch.float32)
    dq_state, dk_row, dk_column = (torch.empty_like(decay) for _ in range(3))
    dbeta_state, dend = torch.empty_like(beta), decay.new_empty(q.shape[0], m, a, d)
    gradients_kernel[m, heads](
        dy, u, du, v, k, sums, beta, t, states, dstates, dv, dp, da, dq_state, dk_row, dk_column, dbeta_state, dend,
        s, a, d, w, L=CHUNK, D=width, W=value_width, num_warps=8,
    )  # fmt: skip
    dq, dk, ddecay, dbeta = (torch.empty_like(x) for x in (q, k, decay, beta))
    dpairs_kernel[m, heads](
        q, k, sums, beta, dp, da, dq_state, dk_row, dk_column, dbeta_state, dend, dq, dk, ddecay, dbeta,
        s, a, d, inputs.scale, **_BLOCK_SIZES, D=width, num_warps=4, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, ddecay, dbeta, dfirst
