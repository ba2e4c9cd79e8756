"""Kernels for the recurrence of Mamba-2 in chunks, forward and backward (Dao & Gu 2024, arXiv:2405.21060, section 6).

Reference and formulas: `megafp8.layers.mamba2.reference`. There are five kernels over chunks of tokens:

    decays           One program per chunk and several heads. It sums decays over tokens, so that the other kernels can
                     begin with products.
    states           One program per tile of a head's state. It runs through the chunks in order and writes the state at
                     the start of each. In backward it runs through queries and output gradients in reverse order, and
                     writes the gradient of the state at the end of each chunk.
    outputs          One program per chunk and several heads of one group. It computes the products of queries and keys
                     once. For each head it then sums them with decays over tokens, and adds the contribution of the
                     state at the start of the chunk.
    head_gradients   One program per chunk and head, for the gradients of values, steps, rates and skips.
    group_gradients  One program per chunk and several heads of one group, for the gradients of keys and queries, which
                     it sums over its heads.

States are fp32 in registers. They are rounded to the inputs' dtype where they are GEMM operands; GEMMs accumulate in
fp32. Backward does not need the outputs of forward. The gradient of the decay over token k is a sum over all pairs
j < k ≤ i. This sum is the difference of row sums and column sums over the same rounded factors, so they cancel to fp32
precision.

Exponents are in base 2. All results are deterministic.

Shapes: s sequence length, b micro-batch size; a heads of w channels in g groups, d state numbers per channel; L tokens
per chunk, m chunks; D and W are d and w rounded up to powers of 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2

CHUNK = 64
"""Tokens of a chunk. Twice as many would halve the states in memory, but double the registers of a program."""
_STATE_TILE = 64
"""Rows of a head's state per program of `states_kernel`. Small tiles give more programs, one per tile of a head."""
_HEADS = 8
"""Largest number of heads per program of kernels for several heads. The number divides the heads of a group."""
_DECAY_HEADS = 16
"""Heads per program of `decays_kernel`."""
_SMALL_STATE, _MEDIUM_STATE = 8192, 16384
"""Numbers of the largest state whose gradients fit into four warps' registers, and of the largest that is staged."""


@triton.jit
def _rows(x, i, n, row_stride, first, count, WIDTH: tl.constexpr):
    """Load WIDTH columns from `first` on of rows `i`, with zeros beyond n rows and `count` columns."""
    c = first + tl.arange(0, WIDTH)
    at = i.to(tl.int64)[:, None] * row_stride + c[None, :]
    return tl.load(x + at, mask=(i < n)[:, None] & (c < count)[None, :], other=0.0)


@triton.jit
def _store_rows(x, i, n, row_stride, values, count, WIDTH: tl.constexpr):
    c = tl.arange(0, WIDTH)
    at = i.to(tl.int64)[:, None] * row_stride + c[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(i < n)[:, None] & (c < count)[None, :])


@triton.jit
def _documents(starts_sb, i, s, b, sample, DOCUMENTS: tl.constexpr):
    """Return the number of documents that begin in the chunk up to each token, and in the whole chunk."""
    begun = tl.zeros_like(i)
    if DOCUMENTS:
        begun = tl.load(starts_sb + i * b + sample, mask=i < s, other=0).to(tl.int32)
    return tl.cumsum(begun, axis=0), tl.sum(begun, axis=0)


@triton.jit
def _decays(step_bas, sums_bas, at, m, s, L: tl.constexpr):
    """Load the steps of chunk m of head `at`, and the running sums of its decays in base 2 and their total."""
    first = (tl.cast(at, tl.int64) * tl.cdiv(s, L) + m) * L
    i = first + tl.arange(0, L)
    return tl.load(step_bas + i), tl.load(sums_bas + i), tl.load(sums_bas + first + L - 1)


@triton.jit
def _of_pairs(sums, document, L: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Return the decays from token j to token i, `[i, j]`, 0 if j is later or in another document."""
    i = tl.arange(0, L)
    see = i[:, None] >= i[None, :]
    if DOCUMENTS:
        see = see & (document[:, None] == document[None, :])
    return tl.where(see, tl.exp2(sums[:, None] - sums[None, :]), 0.0)


@triton.jit
def _ends(sums, total, document, begun, DOCUMENTS: tl.constexpr):
    """Return the decays from the start of a chunk to each token, from each token to the end, and over the chunk."""
    before, after, over = tl.exp2(sums), tl.exp2(total - sums), tl.exp2(total)
    if DOCUMENTS:
        before = tl.where(document == 0, before, 0.0)
        after = tl.where(document == begun, after, 0.0)
        over = tl.where(begun == 0, over, 0.0)
    return before, after, over


@triton.jit
def decays_kernel(step_sba, rate_a, step_bas, sums_bas, s, heads, a, L: tl.constexpr, HEADS: tl.constexpr):
    """Transpose the steps of a chunk, 0 beyond s, and compute the running sums of its decays in base 2."""
    m, at = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i, exists = m * L + tl.arange(0, L), at < heads
    inside = (i < s)[:, None] & exists[None, :]
    step = tl.load(step_sba + i.to(tl.int64)[:, None] * heads + at[None, :], mask=inside, other=0.0)
    rate = tl.load(rate_a + at % a, mask=exists, other=0.0) * 1.4426950408889634
    to = at.to(tl.int64)[None, :] * (tl.num_programs(0) * L) + i[:, None]
    tl.store(step_bas + to, step, mask=exists[None, :])
    tl.store(sums_bas + to, tl.cumsum(step * rate[None, :], axis=0), mask=exists[None, :])


@triton.jit
def states_kernel(
    key_sbgd, value_sbaw, step_bas, sums_bas, starts_sb, first_badw, chunks_mbadw, last_badw,
    s, b, a, g, d, w, key_s, key_b, value_s, value_b,
    REVERSE: tl.constexpr, DOCUMENTS: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute the state at the start of each chunk, from the state before the first chunk.

    With REVERSE, compute the gradient of the state at the end of each chunk, from the gradient after the last chunk.
    Keys and values are then queries and output gradients.
    """
    row, head, sample = tl.program_id(0) * TILE, tl.program_id(1) % a, tl.program_id(1) // a
    r, c = row + tl.arange(0, TILE), tl.arange(0, W)
    inside = (r < d)[:, None] & (c < w)[None, :]
    at = (sample * a + head).to(tl.int64) * d * w + r[:, None] * w + c[None, :]
    state = tl.load(first_badw + at, mask=inside, other=0.0)
    keys = key_sbgd + (tl.cast(sample, tl.int64) * key_b * g + head // (a // g)) * d
    values = value_sbaw + (tl.cast(sample, tl.int64) * value_b * a + head) * w
    size = tl.cast(b * a, tl.int64) * d * w
    chunks = (s + L - 1) // L
    for n in range(chunks):
        m = chunks - 1 - n if REVERSE else n
        tl.store(chunks_mbadw + m * size + at, state.to(chunks_mbadw.dtype.element_ty), mask=inside)
        i = m * L + tl.arange(0, L)
        document, begun = _documents(starts_sb, i, s, b, sample, DOCUMENTS)
        step, sums, total = _decays(step_bas, sums_bas, sample * a + head, m, s, L)
        before, after, over = _ends(sums, total, document, begun, DOCUMENTS)
        weight = before if REVERSE else after * step
        key = _rows(keys, i, s, key_s * g * d, row, d, TILE)
        value = _rows(values, i, s, value_s * a * w, 0, w, W)
        weighted = (key.to(tl.float32) * weight[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(weighted), value, state * over)
    tl.store(last_badw + at, state, mask=inside)


@triton.jit
def outputs_kernel(
    x_sbaw, step_bas, sums_bas, b_sbgd, c_sbgd, skip_a, starts_sb, states_mbadw, y_sbaw,
    s, b, a, g, d, w, row_s, row_b,
    DOCUMENTS: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a chunk for HEADS heads of a group, from the states at the start of the chunk."""
    m, parts = tl.program_id(0), a // HEADS
    sample, first = tl.program_id(1) // parts, tl.program_id(1) % parts * HEADS
    group = first // (a // g)
    i = m * L + tl.arange(0, L)
    document, begun = _documents(starts_sb, i, s, b, sample, DOCUMENTS)
    shared = (tl.cast(sample, tl.int64) * row_b * g + group) * d
    key = _rows(b_sbgd + shared, i, s, row_s * g * d, 0, d, D)
    query = _rows(c_sbgd + shared, i, s, row_s * g * d, 0, d, D)
    scores = tl.dot(query, tl.trans(key))
    r = tl.arange(0, D)
    for head in range(first, first + HEADS):
        at = sample * a + head
        step, sums, total = _decays(step_bas, sums_bas, at, m, s, L)
        x = _rows(x_sbaw + (tl.cast(sample, tl.int64) * row_b * a + head) * w, i, s, row_s * a * w, 0, w, W)
        state = _rows(states_mbadw + (m.to(tl.int64) * b * a + at) * d * w, r, d, w, 0, w, W)
        before, _after, _over = _ends(sums, total, document, begun, DOCUMENTS)
        y = tl.dot(query, state) * before[:, None]
        weights = scores * _of_pairs(sums, document, L, DOCUMENTS) * step[None, :]
        y = tl.dot(weights.to(x.dtype), x, y)
        y += tl.load(skip_a + head) * x.to(tl.float32)
        _store_rows(y_sbaw + at * w, i, s, b * a * w, y, w, W)


@triton.jit
def head_gradients_kernel(
    dy_sbaw, x_sbaw, step_bas, sums_bas, rate_a, b_sbgd, c_sbgd, skip_a, starts_sb, states_mbadw, dstates_mbadw,
    dx_sbaw, dstep_sba, drate_mba, dskip_mba,
    s, b, a, g, d, w, row_s, row_b,
    DOCUMENTS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the values, steps, rates and skips of a chunk for one head.

    Inputs are the states at the start of the chunk and the gradients of the states at its end.
    """
    m, at = tl.program_id(0), tl.program_id(1)
    sample, head = at // a, at % a
    group = head // (a // g)
    i = m * L + tl.arange(0, L)
    document, begun = _documents(starts_sb, i, s, b, sample, DOCUMENTS)
    shared = (tl.cast(sample, tl.int64) * row_b * g + group) * d
    key = _rows(b_sbgd + shared, i, s, row_s * g * d, 0, d, D)
    query = _rows(c_sbgd + shared, i, s, row_s * g * d, 0, d, D)
    scores = tl.dot(query, tl.trans(key))
    r = tl.arange(0, D)
    rate = tl.load(rate_a + head)
    step, sums, total = _decays(step_bas, sums_bas, at, m, s, L)
    before, after, over = _ends(sums, total, document, begun, DOCUMENTS)
    x = _rows(x_sbaw + (tl.cast(sample, tl.int64) * row_b * a + head) * w, i, s, row_s * a * w, 0, w, W)
    dy = _rows(dy_sbaw + at * w, i, s, b * a * w, 0, w, W)
    states = (m.to(tl.int64) * b * a + at) * d * w
    u = (x.to(tl.float32) * step[:, None]).to(x.dtype)
    # Contribution of the tokens to the state at the end.
    dstate = _rows(dstates_mbadw + states, r, d, w, 0, w, W)
    du = tl.dot(key, dstate) * after[:, None]
    state_gradient = tl.sum(du * u.to(tl.float32), axis=1)
    # Contribution of the state at the start.
    state = _rows(states_mbadw + states, r, d, w, 0, w, W)
    y = tl.dot(query, state) * before[:, None]
    kept = over * tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
    # Contribution of pairs within the chunk.
    weights = (scores * _of_pairs(sums, document, L, DOCUMENTS)).to(x.dtype)
    y = tl.dot(weights, u, y)
    pair_gradient = tl.dot(tl.trans(weights), dy)
    ddecay = tl.sum(y * dy.to(tl.float32), axis=1) - tl.sum(pair_gradient * u.to(tl.float32), axis=1)
    du += pair_gradient
    # Sum from each token on, plus the contributions of earlier tokens to the end, which pass the token.
    ddecay = tl.sum(ddecay, axis=0) - tl.cumsum(ddecay, axis=0) + ddecay
    ddecay += tl.cumsum(state_gradient, axis=0) - state_gradient + kept
    dstep = tl.sum(du * x.to(tl.float32), axis=1) + rate * ddecay
    tl.store(dstep_sba + i.to(tl.int64) * (b * a) + at, dstep, mask=i < s)
    tl.store(drate_mba + m * b * a + at, tl.sum(step * ddecay, axis=0))
    dskip = tl.sum(tl.sum(dy.to(tl.float32) * x.to(tl.float32), axis=1), axis=0)
    tl.store(dskip_mba + m * b * a + at, dskip)
    dx = du * step[:, None] + tl.load(skip_a + head) * dy.to(tl.float32)
    _store_rows(dx_sbaw + (tl.cast(sample, tl.int64) * row_b * a + head) * w, i, s, row_s * a * w, dx, w, W)


@triton.jit
def group_gradients_kernel(
    dy_sbaw, x_sbaw, step_bas, sums_bas, b_sbgd, c_sbgd, starts_sb, states_mbadw, dstates_mbadw, db_psbgd, dc_psbgd,
    s, b, a, g, d, w, row_s, row_b,
    DOCUMENTS: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys and queries of a chunk, summed over HEADS heads of a group.

    Inputs are the states at the start of the chunk and the gradients of the states at its end. Dim p of `db` and `dc`
    has one entry for each part of HEADS heads in a group.
    """
    m, parts = tl.program_id(0), a // HEADS
    sample, first = tl.program_id(1) // parts, tl.program_id(1) % parts * HEADS
    group, part = first // (a // g), first % (a // g) // HEADS
    i, r = m * L + tl.arange(0, L), tl.arange(0, D)
    document, begun = _documents(starts_sb, i, s, b, sample, DOCUMENTS)
    dscores = tl.zeros([L, L], tl.float32)
    dkey = tl.zeros([L, D], tl.float32)
    dquery = tl.zeros([L, D], tl.float32)
    for head in range(first, first + HEADS):
        at = sample * a + head
        step, sums, total = _decays(step_bas, sums_bas, at, m, s, L)
        before, after, _over = _ends(sums, total, document, begun, DOCUMENTS)
        x = _rows(x_sbaw + (tl.cast(sample, tl.int64) * row_b * a + head) * w, i, s, row_s * a * w, 0, w, W)
        dy = _rows(dy_sbaw + at * w, i, s, b * a * w, 0, w, W)
        states = (m.to(tl.int64) * b * a + at) * d * w
        dscores += tl.dot(dy, tl.trans(x)) * _of_pairs(sums, document, L, DOCUMENTS) * step[None, :]
        dstate = _rows(dstates_mbadw + states, r, d, w, 0, w, W)
        dkey = tl.dot((x.to(tl.float32) * (after * step)[:, None]).to(x.dtype), tl.trans(dstate), dkey)
        state = _rows(states_mbadw + states, r, d, w, 0, w, W)
        dquery = tl.dot((dy.to(tl.float32) * before[:, None]).to(x.dtype), tl.trans(state), dquery)
    shared = (tl.cast(sample, tl.int64) * row_b * g + group) * d
    key = _rows(b_sbgd + shared, i, s, row_s * g * d, 0, d, D)
    query = _rows(c_sbgd + shared, i, s, row_s * g * d, 0, d, D)
    rounded = dscores.to(key.dtype)
    dquery = tl.dot(rounded, key, dquery)
    dkey = tl.dot(tl.trans(rounded), query, dkey)
    part_at = part.to(tl.int64) * s * b * g * d + shared
    _store_rows(db_psbgd + part_at, i, s, row_s * g * d, dkey, d, D)
    _store_rows(dc_psbgd + part_at, i, s, row_s * g * d, dquery, d, D)


class StateSpaceInputs(NamedTuple):
    """Inputs of the kernels. x, b and c have one dtype; the other tensors are contiguous fp32.

    Either x, b and c are all contiguous, or their transposes `[b, s, ...]` are, because the kernel of the convolution
    writes them so. `starts_sb` marks tokens before which the state is set to zero, int8, or is None.
    """

    x_sbaw: Tensor
    step_sba: Tensor
    rate_a: Tensor
    b_sbgd: Tensor
    c_sbgd: Tensor
    skip_a: Tensor
    starts_sb: Tensor | None

    @classmethod
    def from_tensors(
        cls, x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor, starts: Tensor | None
    ) -> StateSpaceInputs:
        """Bring tensors of any layout into the layout of the kernels; `starts` is bool."""
        batch_first = x.transpose(0, 1).is_contiguous()
        x, b, c = (kernel_input(_laid_out(t, batch_first)) for t in (x, b, c))
        start_flags = None if starts is None else starts.contiguous().view(torch.int8)
        return cls(x, step.contiguous(), rate.contiguous(), b, c, skip.contiguous(), start_flags)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes s, b, a, g, d and w."""
        (s, b, a, w), (_, _, g, d) = self.x_sbaw.shape, self.b_sbgd.shape
        return s, b, a, g, d, w

    @property
    def rows(self) -> tuple[int, int]:
        """Strides of x, b and c in rows: to the next token of a sequence, and to the next sequence."""
        s, b, *_ = self.sizes
        return (b, 1) if self.x_sbaw.is_contiguous() else (1, s)

    @property
    def heads(self) -> int:
        """Number of heads per program."""
        per_group = self.x_sbaw.shape[2] // self.b_sbgd.shape[2]
        return max(n for n in range(1, _HEADS + 1) if per_group % n == 0)

    def warps_and_stages(self) -> tuple[int, int]:
        """Return the warps of programs for one head and the stages of loads, as states of this size leave room."""
        constants = self.constants()
        size = constants["D"] * constants["W"]
        return (4, 3) if size <= _SMALL_STATE else (8, 2 if size <= _MEDIUM_STATE else 1)

    def constants(self) -> dict[str, int]:
        """Return the compile-time constants of the kernels."""
        _, _, _, _, d, w = self.sizes
        widths = {"D": max(16, next_power_of_2(d)), "W": max(16, next_power_of_2(w))}
        return widths | {"L": CHUNK, "DOCUMENTS": self.starts_sb is not None}


def _laid_out(x: Tensor, batch_first: bool) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()


def forward(inputs: StateSpaceInputs, state_badw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, the state after the last token, and the states at the start of each chunk for backward."""
    s, b, a, _, _, w = inputs.sizes
    rows = inputs.rows
    decays, (warps, stages) = _decays_of(inputs), inputs.warps_and_stages()
    states_mbadw, last_badw = _states(inputs, decays, inputs.b_sbgd, inputs.x_sbaw, rows, state_badw, reverse=False)
    y_sbaw = inputs.x_sbaw.new_empty(s, b, a, w)
    x, _, _, b_sbgd, c_sbgd, skip, starts = inputs
    outputs_kernel[ceil_div(s, CHUNK), b * a // inputs.heads](
        x, *decays, b_sbgd, c_sbgd, skip, starts, states_mbadw, y_sbaw, *inputs.sizes, *rows, **inputs.constants(),
        HEADS=inputs.heads, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y_sbaw, last_badw, states_mbadw


def backward(
    inputs: StateSpaceInputs, states_mbadw: Tensor, dy_sbaw: Tensor, dlast_badw: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, step, rate, b, c, skip and the state before the first token."""
    s, b, a, g, d, _ = inputs.sizes
    x, step, rate, b_sbgd, c_sbgd, skip, starts = inputs
    dy_sbaw = kernel_input(dy_sbaw.contiguous())
    decays = _decays_of(inputs)
    dstates_mbadw, dfirst_badw = _states(inputs, decays, c_sbgd, dy_sbaw, (b, 1), dlast_badw, reverse=True)
    chunks, parts = ceil_div(s, CHUNK), a // g // inputs.heads
    dx, dstep = torch.empty_like(x), torch.empty_like(step)
    drate, dskip = step.new_empty(2, chunks, b, a)
    dtype = x.dtype if parts == 1 else torch.float32
    shape = (2, parts, s, b, g, d) if inputs.rows == (b, 1) else (2, parts, b, s, g, d)
    db, dc = x.new_empty(shape, dtype=dtype)
    constants = inputs.constants()
    warps, stages = inputs.warps_and_stages()
    head_gradients_kernel[chunks, b * a](
        dy_sbaw, x, *decays, rate, b_sbgd, c_sbgd, skip, starts, states_mbadw, dstates_mbadw, dx, dstep, drate, dskip,
        *inputs.sizes, *inputs.rows, **constants, num_warps=warps,
    )  # fmt: skip
    group_gradients_kernel[chunks, b * a // inputs.heads](
        dy_sbaw, x, *decays, b_sbgd, c_sbgd, starts, states_mbadw, dstates_mbadw, db, dc,
        *inputs.sizes, *inputs.rows, **constants, HEADS=inputs.heads, num_warps=8, num_stages=stages,
    )  # fmt: skip
    db, dc = (part[0] if parts == 1 else part.sum(0).to(x.dtype) for part in (db, dc))
    if inputs.rows != (b, 1):
        db, dc = db.transpose(0, 1), dc.transpose(0, 1)
    return dx, dstep, drate.sum((0, 1)), db, dc, dskip.sum((0, 1)), dfirst_badw


def _decays_of(inputs: StateSpaceInputs) -> tuple[Tensor, Tensor]:
    """Return the steps, 0 beyond s, and the running sums of the decays in each chunk; both `[b·a, m·L]`."""
    s, b, a, *_ = inputs.sizes
    chunks = ceil_div(s, CHUNK)
    step_bas, sums_bas = inputs.step_sba.new_empty(2, b * a, chunks * CHUNK)
    heads = min(_DECAY_HEADS, next_power_of_2(b * a))
    decays_kernel[chunks, ceil_div(b * a, heads)](
        inputs.step_sba, inputs.rate_a, step_bas, sums_bas, s, b * a, a, L=CHUNK, HEADS=heads
    )
    return step_bas, sums_bas


def _states(
    inputs: StateSpaceInputs, decays: tuple[Tensor, Tensor], keys_sbgd: Tensor, values_sbaw: Tensor,
    value_rows: tuple[int, int], first_badw: Tensor, *, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `states_kernel`; return the states (in reverse: gradients) of each chunk, and the last state.

    `value_rows` are the strides of the values, like `StateSpaceInputs.rows`.
    """
    s, b, a, _, d, w = inputs.sizes
    constants = inputs.constants()
    chunks_mbadw = values_sbaw.new_empty(ceil_div(s, CHUNK), b, a, d, w)
    first_badw = first_badw.contiguous()
    last_badw = torch.empty_like(first_badw)
    tile = min(_STATE_TILE, constants["D"])
    states_kernel[ceil_div(d, tile), b * a](
        keys_sbgd, values_sbaw, *decays, inputs.starts_sb, first_badw, chunks_mbadw, last_badw,
        *inputs.sizes, *inputs.rows, *value_rows, REVERSE=reverse, DOCUMENTS=constants["DOCUMENTS"], L=CHUNK,
        TILE=tile, W=constants["W"], num_warps=4, num_stages=3,
    )  # fmt: skip
    return chunks_mbadw, last_badw
