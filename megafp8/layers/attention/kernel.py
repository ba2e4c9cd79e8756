"""Triton attention kernels for all scores and masks of `layers.attention.op`: forward, gradients of q, k, v and bias.

The reference is `megafp8.layers.attention.reference`. The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691): a
program takes a block of queries and iterates over blocks of keys with a running maximum and sum. Backward recomputes
probabilities from the log-sum-exps. Sums are fp32, in an order that depends only on shapes, so all results are
deterministic.

*Masks* of any kind reach a program as a range of keys for each query (`mask.key_ranges`). A program iterates over the
blocks between the smallest first key and the largest last key of its queries. If all its queries attend to all keys of
a block, it compares nothing. A program of keys has a range of blocks of queries, derived from the ranges of keys.
Boolean masks are read tile by tile.

*Scores* are in base 2, the base of the hardware's exponential: their factors include log2(e). *Dropout* generates four
words of Philox for four adjacent keys; `scores.kept` defines the words.

*The gradient of the bias* of a distance is a sum along a diagonal. `bias_kernel` rotates each row m of a square tile of
score gradients by m + 1, so that diagonals become columns: some diagonals end in this tile, and others continue in the
next tile, so their sums are carried over. A block of queries writes the sums of its diagonals to memory, and these sums
are added up afterwards. If positions of queries have gaps, rows on the same diagonals are processed together.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width, r distances; tiles of M
queries and N keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.layers.attention.mask import AttentionMask, key_ranges
from megafp8.layers.attention.scores import Scores

_FAR: tl.constexpr = tl.constexpr(2**31 - 1)
_LOG2E = 1 / math.log(2)


class _Tile(NamedTuple):
    """Numbers of queries, keys, warps and software-pipelining stages of a program."""

    m: int
    n: int
    warps: int
    stages: int


class _Tiles(NamedTuple):
    forward: _Tile
    dq: _Tile
    dkv: _Tile
    bias: _Tile  # square


def _tiles(width: int, numbers: bool) -> _Tiles:
    """Return the tiles for heads up to `width`, a power of 2.

    They fit into 255 registers per thread and 227 KiB of shared memory. `numbers` says whether scores have a bias or
    dropout. Pipelining keeps these additional numbers in shared memory, too.
    """
    if width <= 64:
        forward = _Tile(128, 64, 8, 2) if numbers else _Tile(128, 64, 4, 3)
        return _Tiles(forward, _Tile(128, 64, 8, 2), _Tile(64, 128, 8, 2), _Tile(64, 64, 4, 2))
    if width <= 128:
        forward = _Tile(128, 64, 8, 3) if numbers else _Tile(128, 128, 8, 2)
        return _Tiles(forward, _Tile(128, 64, 8, 2), _Tile(64, 128, 8, 2), _Tile(64, 64, 8, 2))
    forward = _Tile(64, 64, 8, 2) if numbers else _Tile(128, 64, 8, 2)
    return _Tiles(forward, _Tile(64, 64, 8, 2), _Tile(32, 64, 8, 2), _Tile(64, 64, 8, 1))


# --- parts of the kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, i, n, row_stride, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows `i` of a head, `[len(i), WIDTH]`, with zeros beyond n rows and D columns."""
    c = tl.arange(0, WIDTH)
    at = i.to(tl.int64)[:, None] * row_stride + c[None, :]
    return tl.load(x + at, mask=(i < n)[:, None] & (c < D)[None, :], other=0.0)


@triton.jit
def _store_rows(x, i, n, row_stride, values, D: tl.constexpr, WIDTH: tl.constexpr):
    c = tl.arange(0, WIDTH)
    at = i.to(tl.int64)[:, None] * row_stride + c[None, :]
    tl.store(x + at, values.to(x.dtype.element_ty), mask=(i < n)[:, None] & (c < D)[None, :])


@triton.jit
def _ranges(first_bs, end_bs, row, i, s):
    """Return each query's first and end key, the range of keys that any query sees, and the range that all queries see.

    Queries beyond s count as attending to all keys. Queries without keys do not count for the range that any query
    sees.
    """
    real = i < s
    first = tl.load(first_bs + row + i, mask=real, other=0)
    end = tl.load(end_bs + row + i, mask=real, other=_FAR)
    some = real & (end > first)
    start = tl.min(tl.where(some, first, _FAR), axis=0)
    stop = tl.max(tl.where(some, end, 0), axis=0)
    return first, end, tl.minimum(start, stop), stop, tl.max(first, axis=0), tl.min(end, axis=0)


@triton.jit
def _parts(start, stop, full_start, full_stop, N: tl.constexpr):
    """Return multiples of N that bound three groups of key blocks: partly visible, fully visible, partly visible."""
    start = start // N * N
    full_start = tl.maximum(start, (full_start + N - 1) // N * N)
    full_stop = tl.maximum(full_start, tl.minimum(full_stop, stop) // N * N)
    return start, full_start, full_stop


@triton.jit
def _positions(positions_bs, row, i, s, POSITIONS: tl.constexpr):
    position = i
    if POSITIONS:
        position = tl.load(positions_bs + row + i, mask=i < s, other=0)
    return position


@triton.jit
def score(x, i, j, bias_r, zero, r, inner, outer, SOFTCAP: tl.constexpr, BIAS: tl.constexpr):
    """Return scores in base 2 from q·k, and the soft cap's tanh.

    `i` and `j` are the positions of queries and keys, one as a column and the other as a row.
    """
    tanh = x
    if SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.exp2(x * inner) + 1.0)
        x = tanh
    x = x * outer
    if BIAS:
        at = j - i + zero
        x += tl.load(bias_r + at, mask=(at >= 0) & (at < r), other=0.0)
    return x, tanh


@triton.jit
def _masked_scores(
    q, k, i, j, position, first, end, seen, bias_r, s, t, r, inner, outer,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, VISIBLE: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """Return `score` of queries i and keys j, `[M, N]`, with -inf where masked, and the soft cap's tanh.

    `PARTLY` says whether the ranges of keys end inside the block.
    """
    x = tl.dot(q, tl.trans(k))
    x, tanh = score(x, position[:, None], j[None, :], bias_r, r - t, r, inner, outer, SOFTCAP, BIAS)
    if PARTLY:
        x = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < end[:, None]), x, float("-inf"))
    if VISIBLE:
        at = i.to(tl.int64)[:, None] * t + j[None, :]
        see = tl.load(seen + at, mask=(i < s)[:, None] & (j < t)[None, :], other=0)
        x = tl.where(see != 0, x, float("-inf"))
    return x, tanh


@triton.jit
def _kept(i, n, head, sample, key0, key1, threshold, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return which probabilities of positions `i` and the N keys from n on are kept, `[M, N]` or `[N, M]`."""
    group, query = (n // 4 + tl.arange(0, N // 4)).to(tl.uint32), i.to(tl.uint32)
    if TRANSPOSED:
        zero = (group[:, None] + query[None, :]) * 0
        w0, w1, w2, w3 = tl.philox_impl(
            zero + group[:, None], zero + query[None, :], zero + head, zero + sample, key0, key1
        )
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [N / 4, M, 2, 2]
        word = tl.permute(word, (0, 2, 3, 1)).reshape(N, M)
    else:
        zero = (query[:, None] + group[None, :]) * 0
        w0, w1, w2, w3 = tl.philox_impl(
            zero + group[None, :], zero + query[:, None], zero + head, zero + sample, key0, key1
        )
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(M, N)
    return word >= threshold


@triton.jit
def _statistic(x_sba, i, s, stride, other):
    """Return one number per query."""
    return tl.load(x_sba + i.to(tl.int64) * stride, mask=i < s, other=other)


@triton.jit
def _log_sum_exp(lse_sba, i, s, stride):
    """Return log-sum-exps in base 2.

    Queries without keys and beyond s get infinity, which makes their probabilities 0.
    """
    lse = _statistic(lse_sba, i, s, stride, float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def _bits(number):
    return number.to(tl.uint32, bitcast=True)


# --- kernels ----------------------------------------------------------------------------------------------------------
# A program works on head `head` of sample `sample`; `seen` points to the start of its boolean mask.


@triton.jit(do_not_specialize=["key0", "key1", "threshold", "first_head"])
def forward_kernel(
    q_sbad, k_tbgd, v_tbgd, o_sbad, lse_sba, first_bs, end_bs, positions_bs, bias_ar, visible_bast, sample_b,
    s, t, b, a, g, r, range_stride, position_stride, visible_stride_b, visible_stride_a,
    inner, outer, factor, key0, key1, threshold, first_head,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, VISIBLE: tl.constexpr, POSITIONS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute M queries; the last queries come first, because they have the most keys if the mask is causal."""
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    group = head // (a // g)
    q = _rows(q_sbad + (sample * a + head) * D, i, s, b * a * D, D, WIDTH)
    k_head, v_head = k_tbgd + (sample * g + group) * D, v_tbgd + (sample * g + group) * D
    first, end, start, stop, full_start, full_stop = _ranges(first_bs, end_bs, sample * range_stride, i, s)
    start, full_start, full_stop = _parts(start, stop, full_start, full_stop, N)
    position = _positions(positions_bs, sample * position_stride, i, s, POSITIONS)
    seen = visible_bast + sample.to(tl.int64) * visible_stride_b + head.to(tl.int64) * visible_stride_a
    if DROPOUT:
        run_sample, run_head = tl.load(sample_b + sample).to(tl.uint32), (first_head + head).to(tl.uint32)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, WIDTH], tl.float32)
    for part in tl.static_range(3):
        begin = start if part == 0 else (full_start if part == 1 else full_stop)
        until = full_start if part == 0 else (full_stop if part == 1 else stop)
        for n in range(begin, until, N):
            j = n + tl.arange(0, N)
            k = _rows(k_head, j, t, b * g * D, D, WIDTH)
            x, _tanh = _masked_scores(
                q, k, i, j, position, first, end, seen, bias_ar + head * r, s, t, r, inner, outer,
                SOFTCAP, BIAS, VISIBLE, part != 1,
            )  # fmt: skip
            larger = tl.maximum(largest, tl.max(x, axis=1))
            finite = tl.where(larger == float("-inf"), 0.0, larger)
            shrink = tl.exp2(largest - finite)
            p = tl.exp2(x - finite[:, None])
            total = total * shrink + tl.sum(p, axis=1)
            if DROPOUT:
                keep = _kept(position, n, run_head, run_sample, _bits(key0), _bits(key1), _bits(threshold), M, N, False)
                p = tl.where(keep, p * factor, 0.0)
            v = _rows(v_head, j, t, b * g * D, D, WIDTH)
            o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
            largest = larger
    some = total > 0
    total = tl.where(some, total, 1.0)
    _store_rows(o_sbad + (sample * a + head) * D, i, s, b * a * D, o / total[:, None], D, WIDTH)
    lse = tl.where(some, (largest + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_sba + i.to(tl.int64) * (b * a) + sample * a + head, lse, mask=i < s)


@triton.jit
def largest_kernel(
    q_sbad, k_tbgd, largest_mba, first_bs, end_bs, visible_bast,
    s, t, b, a, g, range_stride, visible_stride_b, visible_stride_a, scale,
    VISIBLE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the largest score of M queries, using only the first product of `forward_kernel`."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    i = block * M + tl.arange(0, M)
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    q = _rows(q_sbad + (sample * a + head) * D, i, s, b * a * D, D, WIDTH)
    k_head = k_tbgd + (sample * g + head // (a // g)) * D
    first, end, start, stop, full_start, full_stop = _ranges(first_bs, end_bs, sample * range_stride, i, s)
    start, full_start, full_stop = _parts(start, stop, full_start, full_stop, N)
    seen = visible_bast + sample.to(tl.int64) * visible_stride_b + head.to(tl.int64) * visible_stride_a
    largest = tl.full([M], float("-inf"), tl.float32)
    for part in tl.static_range(3):
        begin = start if part == 0 else (full_start if part == 1 else full_stop)
        until = full_start if part == 0 else (full_stop if part == 1 else stop)
        for n in range(begin, until, N):
            j = n + tl.arange(0, N)
            k = _rows(k_head, j, t, b * g * D, D, WIDTH)
            x, _tanh = _masked_scores(
                q, k, i, j, i, first, end, seen, q_sbad, s, t, 0, 0.0, scale, False, False, VISIBLE, part != 1
            )
            largest = tl.maximum(largest, tl.max(x, axis=1))
    largest = tl.where(i < s, largest, float("-inf"))
    tl.store(largest_mba + block * (b * a) + tl.program_id(1), tl.max(largest, axis=0))


@triton.jit(do_not_specialize=["key0", "key1", "threshold", "first_head"])
def dq_kernel(
    do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad, lse_sba, dq_sbad, delta_sba, first_bs, end_bs, positions_bs, bias_ar,
    visible_bast, sample_b,
    s, t, b, a, g, r, range_stride, position_stride, visible_stride_b, visible_stride_a,
    inner, outer, scale, factor, key0, key1, threshold, first_head,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, VISIBLE: tl.constexpr, POSITIONS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of M queries, and do·o of each query, which the other kernels read."""
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    group = head // (a // g)
    head_at = (sample * a + head) * D
    q, do = _rows(q_sbad + head_at, i, s, b * a * D, D, WIDTH), _rows(do_sbad + head_at, i, s, b * a * D, D, WIDTH)
    o = _rows(o_sbad + head_at, i, s, b * a * D, D, WIDTH)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
    tl.store(delta_sba + i.to(tl.int64) * (b * a) + sample * a + head, delta, mask=i < s)
    lse = _log_sum_exp(lse_sba + sample * a + head, i, s, b * a)
    k_head, v_head = k_tbgd + (sample * g + group) * D, v_tbgd + (sample * g + group) * D
    first, end, start, stop, full_start, full_stop = _ranges(first_bs, end_bs, sample * range_stride, i, s)
    start, full_start, full_stop = _parts(start, stop, full_start, full_stop, N)
    position = _positions(positions_bs, sample * position_stride, i, s, POSITIONS)
    seen = visible_bast + sample.to(tl.int64) * visible_stride_b + head.to(tl.int64) * visible_stride_a
    if DROPOUT:
        run_sample, run_head = tl.load(sample_b + sample).to(tl.uint32), (first_head + head).to(tl.uint32)
    dq = tl.zeros([M, WIDTH], tl.float32)
    for part in tl.static_range(3):
        begin = start if part == 0 else (full_start if part == 1 else full_stop)
        until = full_start if part == 0 else (full_stop if part == 1 else stop)
        for n in range(begin, until, N):
            j = n + tl.arange(0, N)
            k = _rows(k_head, j, t, b * g * D, D, WIDTH)
            x, tanh = _masked_scores(
                q, k, i, j, position, first, end, seen, bias_ar + head * r, s, t, r, inner, outer,
                SOFTCAP, BIAS, VISIBLE, part != 1,
            )  # fmt: skip
            p = tl.exp2(x - lse[:, None])
            v = _rows(v_head, j, t, b * g * D, D, WIDTH)
            dp = tl.dot(do, tl.trans(v))
            if DROPOUT:
                keep = _kept(position, n, run_head, run_sample, _bits(key0), _bits(key1), _bits(threshold), M, N, False)
                dp = tl.where(keep, dp * factor, 0.0)
            ds = p * (dp - delta[:, None])
            if SOFTCAP:
                ds *= 1.0 - tanh * tanh
            dq = tl.dot(ds.to(k.dtype), k, dq)
    _store_rows(dq_sbad + head_at, i, s, b * a * D, dq * scale, D, WIDTH)


@triton.jit(do_not_specialize=["key0", "key1", "threshold", "first_head"])
def dkv_kernel(
    do_sbad, q_sbad, k_tbgd, v_tbgd, lse_sba, delta_sba, dk_tbgd, dv_tbgd, first_bs, end_bs, from_bk, to_bk,
    positions_bs, bias_ar, visible_bast, sample_b,
    s, t, b, a, g, r, range_stride, block_stride, position_stride, visible_stride_b, visible_stride_a,
    inner, outer, scale, factor, key0, key1, threshold, first_head,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, VISIBLE: tl.constexpr, POSITIONS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N keys and values from all heads of their group; tiles are `[N, M]`."""
    block = tl.program_id(0)
    j = block * N + tl.arange(0, N)
    sample, group = tl.program_id(1) // g, tl.program_id(1) % g
    group_at = (sample * g + group) * D
    k, v = _rows(k_tbgd + group_at, j, t, b * g * D, D, WIDTH), _rows(v_tbgd + group_at, j, t, b * g * D, D, WIDTH)
    begin, until = tl.load(from_bk + sample * block_stride + block), tl.load(to_bk + sample * block_stride + block)
    if DROPOUT:
        run_sample = tl.load(sample_b + sample).to(tl.uint32)
    dk, dv = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    for head in range(group * (a // g), (group + 1) * (a // g)):
        q_head, do_head = q_sbad + (sample * a + head) * D, do_sbad + (sample * a + head) * D
        for m in range(begin * M, until * M, M):
            i = m + tl.arange(0, M)
            q = _rows(q_head, i, s, b * a * D, D, WIDTH)
            x = tl.dot(k, tl.trans(q))
            position = _positions(positions_bs, sample * position_stride, i, s, POSITIONS)
            x, tanh = score(x, position[None, :], j[:, None], bias_ar + head * r, r - t, r, inner, outer, SOFTCAP, BIAS)
            first = tl.load(first_bs + sample * range_stride + i, mask=i < s, other=0)
            end = tl.load(end_bs + sample * range_stride + i, mask=i < s, other=0)
            see = (j[:, None] >= first[None, :]) & (j[:, None] < end[None, :])
            if VISIBLE:
                seen = visible_bast + sample.to(tl.int64) * visible_stride_b + head * visible_stride_a
                at = i.to(tl.int64)[None, :] * t + j[:, None]
                see &= tl.load(seen + at, mask=(i < s)[None, :] & (j < t)[:, None], other=0) != 0
            lse = _log_sum_exp(lse_sba + sample * a + head, i, s, b * a)
            p = tl.where(see, tl.exp2(x - lse[None, :]), 0.0)
            do = _rows(do_head, i, s, b * a * D, D, WIDTH)
            dp = tl.dot(v, tl.trans(do))
            dropped = p
            if DROPOUT:
                run_head = (first_head + head).to(tl.uint32)
                keep = _kept(
                    position, block * N, run_head, run_sample, _bits(key0), _bits(key1), _bits(threshold), M, N, True
                )
                dropped, dp = tl.where(keep, p * factor, 0.0), tl.where(keep, dp * factor, 0.0)
            dv = tl.dot(dropped.to(do.dtype), do, dv)
            ds = p * (dp - _statistic(delta_sba + sample * a + head, i, s, b * a, 0.0)[None, :])
            if SOFTCAP:
                ds *= 1.0 - tanh * tanh
            dk = tl.dot(ds.to(q.dtype), q, dk)
    _store_rows(dk_tbgd + group_at, j, t, b * g * D, dk * scale, D, WIDTH)
    _store_rows(dv_tbgd + group_at, j, t, b * g * D, dv, D, WIDTH)


@triton.jit(do_not_specialize=["key0", "key1", "threshold", "first_head"])
def bias_kernel(
    do_sbad, q_sbad, k_tbgd, v_tbgd, lse_sba, delta_sba, dbias_bmar, first_bs, end_bs, positions_bs, bias_ar,
    visible_bast, sample_b,
    s, t, b, a, g, r, range_stride, position_stride, visible_stride_b, visible_stride_a,
    inner, outer, factor, key0, key1, threshold, first_head,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, VISIBLE: tl.constexpr, POSITIONS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add the bias gradient of N queries to their row of `dbias_bmar`, which is initially zero."""
    m = tl.arange(0, N)
    i = tl.program_id(0) * N + m
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    group = head // (a // g)
    head_at = (sample * a + head) * D
    q, do = _rows(q_sbad + head_at, i, s, b * a * D, D, WIDTH), _rows(do_sbad + head_at, i, s, b * a * D, D, WIDTH)
    lse = _log_sum_exp(lse_sba + sample * a + head, i, s, b * a)
    delta = _statistic(delta_sba + sample * a + head, i, s, b * a, 0.0)
    k_head, v_head = k_tbgd + (sample * g + group) * D, v_tbgd + (sample * g + group) * D
    first, end, start, stop, _all_from, _all_to = _ranges(first_bs, end_bs, sample * range_stride, i, s)
    start = start // N * N
    position = _positions(positions_bs, sample * position_stride, i, s, POSITIONS)
    seen = visible_bast + sample.to(tl.int64) * visible_stride_b + head.to(tl.int64) * visible_stride_a
    if DROPOUT:
        run_sample, run_head = tl.load(sample_b + sample).to(tl.uint32), (first_head + head).to(tl.uint32)
    row = dbias_bmar + ((sample * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * a + head) * r
    ends_here = m[:, None] + m[None, :] + 1 >= N
    rotated = (m[:, None] + m[None, :] + 1) % N
    diagonal = tl.where(i < s, position - m, _FAR)  # position of row 0 if rows had no gaps
    base = tl.min(diagonal, axis=0)
    while base != _FAR:
        at = r - t - base - (N - 1) + m  # index of the first diagonals of the tile at key 0
        carried = tl.zeros([N], tl.float32)
        for n in range(start, stop, N):
            j = n + m
            k = _rows(k_head, j, t, b * g * D, D, WIDTH)
            x = tl.dot(q, tl.trans(k))
            x, _tanh = score(
                x, position[:, None], j[None, :], bias_ar + head * r, r - t, r, inner, outer, SOFTCAP, True
            )
            see = (j[None, :] >= first[:, None]) & (j[None, :] < end[:, None]) & (diagonal == base)[:, None]
            if VISIBLE:
                tile_at = i.to(tl.int64)[:, None] * t + j[None, :]
                see &= tl.load(seen + tile_at, mask=(i < s)[:, None] & (j < t)[None, :], other=0) != 0
            p = tl.where(see, tl.exp2(x - lse[:, None]), 0.0)
            dp = tl.dot(do, tl.trans(_rows(v_head, j, t, b * g * D, D, WIDTH)))
            if DROPOUT:
                keep = _kept(position, n, run_head, run_sample, _bits(key0), _bits(key1), _bits(threshold), N, N, False)
                dp = tl.where(keep, dp * factor, 0.0)
            ds = tl.gather(p * (dp - delta[:, None]), rotated, 1)
            sums = carried + tl.sum(tl.where(ends_here, ds, 0.0), axis=0)
            to, inside = row + at + n, (at + n >= 0) & (at + n < r)
            tl.store(to, tl.load(to, mask=inside, other=0.0) + sums, mask=inside)
            carried = tl.sum(tl.where(ends_here, 0.0, ds), axis=0)
        last = start + tl.maximum(stop - start + N - 1, 0) // N * N
        to, inside = row + at + last, (at + last >= 0) & (at + last < r)
        tl.store(to, tl.load(to, mask=inside, other=0.0) + carried, mask=inside)
        tl.debug_barrier()  # other threads then add to the same sums
        base = tl.min(tl.where(diagonal > base, diagonal, _FAR), axis=0)


# --- launches ---------------------------------------------------------------------------------------------------------


class _Mask(NamedTuple):
    """Mask in the form that kernels read: int32 ranges and positions, and their strides from one sample to the next."""

    first_bs: Tensor
    end_bs: Tensor
    positions_bs: Tensor | None
    visible: Tensor | None
    range_stride: int
    position_stride: int
    visible_strides: tuple[int, int]


def _read(mask: AttentionMask, s: int, t: int, device: torch.device) -> _Mask:
    def make() -> _Mask:
        first_bs, end_bs = (x.int().contiguous() for x in key_ranges(mask, s, t, device))
        positions = None if mask.positions_bs is None else mask.positions_bs.int().contiguous()
        visible = None if mask.visible is None else mask.visible.contiguous().view(torch.uint8)
        strides = (0, 0)
        if visible is not None:
            samples, heads = visible.shape[:2]
            strides = heads * s * t if samples > 1 else 0, s * t if heads > 1 else 0
        return _Mask(
            first_bs, end_bs, positions, visible, s if len(first_bs) > 1 else 0,
            s if positions is not None and len(positions) > 1 else 0, strides,
        )  # fmt: skip

    return mask.once(("ranges", s, t), make)


def _query_blocks(mask: AttentionMask, read: _Mask, s: int, t: int, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Return the first query block of each key block, and the block after its last, int32 `[1 or b, blocks]`."""

    def make() -> tuple[Tensor, Tensor]:
        blocks, some = ceil_div(s, tile.m), read.end_bs > read.first_bs
        rest = blocks * tile.m - s

        def of_blocks(x: Tensor, other: int) -> Tensor:
            padded = torch.nn.functional.pad(torch.where(some, x, other), (0, rest), value=other)
            return padded.unflatten(1, (blocks, tile.m))

        first, end = of_blocks(read.first_bs, t).amin(2, keepdim=True), of_blocks(read.end_bs, 0).amax(2, keepdim=True)
        key = torch.arange(0, t, tile.n, dtype=torch.int32, device=first.device)
        sees = (first < key + tile.n) & (end > key)  # [1 or b, blocks of queries, blocks of keys]
        block = torch.arange(blocks, dtype=torch.int32, device=first.device)[:, None]
        to = torch.where(sees, block + 1, 0).amax(1)
        return torch.minimum(torch.where(sees, block, blocks).amin(1), to).contiguous(), to.contiguous()

    return mask.once(("blocks of queries", s, t, tile.m, tile.n), make)


class _Launch:
    """Sizes, mask, score settings and constants that all kernels of a call share."""

    def __init__(self, q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> None:
        (self.s, self.b, self.a, self.d), (self.t, _, self.g, _) = q_sbad.shape, k_tbgd.shape
        self.width = max(16, next_power_of_2(self.d))
        self.tiles = _tiles(self.width, scores.depend_on_positions)
        self.mask = _read(mask, self.s, self.t, q_sbad.device)
        self.scale = scores.scale_of(self.d)
        bias, cap = scores.distance_bias_ar, scores.softcap
        self.bias = None if bias is None else bias.detach().float() * _LOG2E
        r = 1 if bias is None else bias.shape[1]
        self.sizes = self.s, self.t, self.b, self.a, self.g, r
        self.strides = self.mask.position_stride, *self.mask.visible_strides
        self.inner = 0.0 if cap is None else 2 * _LOG2E * self.scale / cap
        self.outer = _LOG2E * (self.scale if cap is None else cap)
        dropout = scores.dropout
        self.sample_b = None if dropout is None else dropout.sample_b
        if dropout is None:
            self.dropout: tuple[float, ...] = 1.0, 0, 0, 0, 0
        else:
            words = np.array([*dropout.key, dropout.threshold], dtype=np.uint32).view(np.int32).tolist()
            self.dropout = 1 / (1 - dropout.p), *words, dropout.first_head
        self.constants = {
            "SOFTCAP": cap is not None, "DROPOUT": dropout is not None, "VISIBLE": self.mask.visible is not None,
            "POSITIONS": self.mask.positions_bs is not None, "D": self.d, "WIDTH": self.width,
        }  # fmt: skip

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Last tensor arguments of each kernel: positions, bias, boolean mask and sample indices."""
        unread = self.mask.first_bs  # replaces None, because kernels add offsets even to pointers that they do not read
        tensors = (self.mask.positions_bs, self.bias, self.mask.visible, self.sample_b)
        return tuple(unread if x is None else x for x in tensors)


def _options(tile: _Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Compute `layers.attention.op.forward` for d up to 256. Does not synchronize the host."""
    q, k, v = (kernel_input(x) for x in (q_sbad, k_tbgd, v_tbgd))
    call = _Launch(q, k, mask, scores)
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tile = call.tiles.forward
    forward_kernel[ceil_div(call.s, tile.m), call.b * call.a](
        q, k, v, o, lse, call.mask.first_bs, call.mask.end_bs, *call.tensors, *call.sizes, call.mask.range_stride,
        *call.strides, call.inner, call.outer, *call.dropout, **call.constants, BIAS=call.bias is not None,
        M=tile.m, N=tile.n, **_options(tile),
    )  # fmt: skip
    return o.to(q_sbad.dtype), lse


def largest(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> Tensor:
    """Compute `layers.attention.op.largest` for d up to 256. Does not synchronize the host."""
    q, k = kernel_input(q_sbad), kernel_input(k_tbgd)
    call = _Launch(q, k, mask, scores)
    tile, read = call.tiles.forward, call.mask
    blocks = ceil_div(call.s, tile.m)
    largest_mba = torch.empty(blocks, call.b, call.a, dtype=torch.float32, device=q.device)
    largest_kernel[blocks, call.b * call.a](
        q, k, largest_mba, read.first_bs, read.end_bs, call.tensors[2], *call.sizes[:5], read.range_stride,
        *read.visible_strides, call.scale, VISIBLE=read.visible is not None, D=call.d, WIDTH=call.width,
        M=tile.m, N=tile.n, **_options(tile),
    )  # fmt: skip
    return largest_mba.amax((0, 1))


def backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scores: Scores, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `layers.attention.op.backward` for d up to 256. Does not synchronize the host."""
    do, q, k, v, o = (kernel_input(x) for x in (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    call = _Launch(q, k, mask, scores)
    ranges, range_stride = (call.mask.first_bs, call.mask.end_bs), call.mask.range_stride
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse_sba)
    numbers, bias = (call.inner, call.outer), call.bias is not None
    tile = call.tiles.dq
    dq_kernel[ceil_div(call.s, tile.m), call.b * call.a](
        do, q, k, v, o, lse_sba, dq, delta, *ranges, *call.tensors, *call.sizes, range_stride, *call.strides,
        *numbers, call.scale, *call.dropout, **call.constants, BIAS=bias, M=tile.m, N=tile.n, **_options(tile),
    )  # fmt: skip
    tile = call.tiles.dkv
    first, to = _query_blocks(mask, call.mask, call.s, call.t, tile)
    block_stride = first.shape[1] if len(first) > 1 else 0
    dkv_kernel[ceil_div(call.t, tile.n), call.b * call.g](
        do, q, k, v, lse_sba, delta, dk, dv, *ranges, first, to, *call.tensors, *call.sizes, range_stride,
        block_stride, *call.strides, *numbers, call.scale, *call.dropout, **call.constants, BIAS=bias,
        M=tile.m, N=tile.n, **_options(tile),
    )  # fmt: skip
    gradients = dq.to(q_sbad.dtype), dk.to(k_tbgd.dtype), dv.to(v_tbgd.dtype)
    if not bias_grad:
        return *gradients, None
    tile = call.tiles.bias
    blocks, r = ceil_div(call.s, tile.n), call.sizes[-1]
    dbias_bmar = torch.zeros(call.b, blocks, call.a, r, dtype=torch.float32, device=q.device)
    bias_kernel[blocks, call.b * call.a](
        do, q, k, v, lse_sba, delta, dbias_bmar, *ranges, *call.tensors, *call.sizes, range_stride, *call.strides,
        *numbers, *call.dropout, **call.constants, N=tile.n, **_options(tile),
    )  # fmt: skip
    return *gradients, dbias_bmar.sum((0, 1))
