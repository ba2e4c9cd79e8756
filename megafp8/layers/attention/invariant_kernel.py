"""Batch-invariant attention kernels, for whole sequences and for single queries over a paged cache.

The reference is `megafp8.layers.attention.invariant_reference`, which defines the order in which keys are processed. A
program of `forward_kernel` has M queries of a head and iterates over their keys. A program of `attend_kernel` has the
heads of one group of a single query, padded to M rows, and iterates over parts of the keys, which `merge_kernel`
merges. Both kernels compute a block of keys with `_with_block`, using the same tiles, warps and instructions, and
combine parts with the factors of `_factors`, so they produce the same bits. Blocks are always masked, because compilers
contract and order other code differently. Multiplications and additions are never contracted. A block that contains no
key of a query does not change this query.

A tile of M queries may contain several sequences. Its program iterates over the keys of one sequence after the other.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width, w width of values, r
distances; n single queries, z tokens of a page, m pages of a sequence, u parts; tiles of M queries and N keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel
from megafp8.layers.attention.invariant_reference import KEYS, PART
from megafp8.layers.attention.kernel import score
from megafp8.layers.attention.mask import AttentionMask, key_origins, key_ranges
from megafp8.layers.attention.scores import Scores

_FAR: tl.constexpr = tl.constexpr(2**31 - 1)
_LOG2E = 1 / math.log(2)
_M = 64
"""Number of queries in a tile: Hopper's matrix instruction has 64 rows."""
_PROGRAMS = 1056
"""Largest number of programs for single queries, eight per multiprocessor of 132; each takes several parts."""


@triton.jit
def _with_block(
    q, k, v, visible, position, j, bias_r, zero, r, inner, outer, largest, total, o,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the maxima, sums and outputs of a part."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    x, _tanh = score(x, position[:, None], j[None, :], bias_r, zero, r, inner, outer, SOFTCAP, BIAS)
    x = tl.where(visible, x, float("-inf"))
    larger = tl.maximum(largest, tl.max(x, axis=1))
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    shrink = tl.exp2(largest - finite)
    p = tl.exp2(x - finite[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
    return larger, total, o


@triton.jit
def _factors(largest, part_largest):
    """Return the larger maximum, and the factors of both sums."""
    larger = tl.maximum(largest, part_largest)
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, tl.exp2(largest - finite), tl.exp2(part_largest - finite)


@triton.jit
def _finished(largest, total):
    """Return the factors that normalize the outputs, and the log-sum-exps."""
    some = total > 0
    positive = tl.where(some, total, 1.0)
    lse = tl.where(some, (largest + tl.log2(positive)) * 0.6931471805599453, float("-inf"))
    return tl.div_rn(positive * 0.0 + 1.0, positive), lse


def forward_kernel(
    q_sbad, k_tbgd, v_tbgw, o_sbaw, lse_sba, first_bs, end_bs, origin_bs, positions_bs, bias_ar,
    s, t, b, a, g, r, range_stride, position_stride, inner, outer,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, D_TILE: tl.constexpr,
    W_TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute M queries of a head; the last queries come first, because they have the most keys."""
    i = (tl.num_programs(0) - 1 - tl.program_id(0)) * M + tl.arange(0, M)
    sample, head = tl.program_id(1) // a, tl.program_id(1) % a
    group, real = head // (a // g), i < s
    c, cw, row = tl.arange(0, D_TILE), tl.arange(0, W_TILE), i.to(tl.int64) * (b * a) + sample * a + head
    q = tl.load(q_sbad + row[:, None] * D + c[None, :], mask=real[:, None] & (c < D)[None, :], other=0.0)
    first = tl.load(first_bs + sample * range_stride + i, mask=real, other=0).to(tl.int32)
    end = tl.load(end_bs + sample * range_stride + i, mask=real, other=0).to(tl.int32)
    origin = tl.load(origin_bs + sample * range_stride + i, mask=real, other=0).to(tl.int32)
    position = tl.load(positions_bs + sample * position_stride + i, mask=real, other=0).to(tl.int32)
    origin = tl.where(end > first, origin, _FAR)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, W_TILE], tl.float32)
    current = tl.min(origin, axis=0)
    while current < _FAR:
        is_own = origin == current
        stop = tl.max(tl.where(is_own, end, 0), axis=0)
        start = current + (tl.min(tl.where(is_own, first, _FAR), axis=0) - current) // N * N
        part_start = current + (start - current) // PART * PART
        while part_start < stop:
            part_largest = tl.full([M], float("-inf"), tl.float32)
            part_total = tl.zeros([M], tl.float32)
            part_o = tl.zeros([M, W_TILE], tl.float32)
            for n in range(tl.maximum(start, part_start), tl.minimum(stop, part_start + PART), N):
                j = n + tl.arange(0, N)
                key = (j.to(tl.int64) * b + sample) * g + group
                k = tl.load(k_tbgd + key[:, None] * D + c[None, :], mask=(j < t)[:, None] & (c < D)[None, :], other=0.0)
                v = tl.load(
                    v_tbgw + key[:, None] * W + cw[None, :], mask=(j < t)[:, None] & (cw < W)[None, :], other=0.0
                )
                visible = is_own[:, None] & (j[None, :] >= first[:, None]) & (j[None, :] < end[:, None])
                part_largest, part_total, part_o = _with_block(
                    q, k, v, visible, position, j, bias_ar + head * r, r - t, r, inner, outer, part_largest,
                    part_total, part_o, SOFTCAP, BIAS,
                )  # fmt: skip
            larger, shrink, part_shrink = _factors(largest, part_largest)
            total = total * shrink + part_total * part_shrink
            o = o * shrink[:, None] + part_o * part_shrink[:, None]
            largest = larger
            part_start += PART
        current = tl.min(tl.where(origin > current, origin, _FAR), axis=0)
    inverse, lse = _finished(largest, total)
    o = o * inverse[:, None]
    tl.store(
        o_sbaw + row[:, None] * W + cw[None, :], o.to(o_sbaw.dtype.element_ty),
        mask=real[:, None] & (cw < W)[None, :],
    )  # fmt: skip
    tl.store(lse_sba + row, lse, mask=real)


def attend_kernel(
    q_nad, keys, values, table_nm, positions_n, bias_ar, o_nuaw, largest_nua, total_nua,
    a, g, pages, r, window, chunk, u, inner, outer,
    PAGE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    D_TILE: tl.constexpr, W_TILE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute some parts of the keys for one query and one group; outputs are not normalized."""
    query, group = tl.program_id(1) // g, tl.program_id(1) % g
    heads = a // g
    i, c, cw = tl.arange(0, M), tl.arange(0, D_TILE), tl.arange(0, W_TILE)
    head, row = group * heads + i, query.to(tl.int64)
    real = i < heads
    q = tl.load(q_nad + (row * a + head[:, None]) * D + c[None, :], mask=real[:, None] & (c < D)[None, :], other=0.0)
    position = tl.load(positions_n + query).to(tl.int32)
    origin = position // chunk * chunk
    first = tl.maximum(position + 1 - window, origin)
    start = origin + (first - origin) // N * N
    position_m = position + i * 0
    bias = bias_ar + tl.minimum(head, a - 1)[:, None] * r
    part = (start - origin) // PART + tl.program_id(0)
    while origin + part * PART <= position:
        part_start = origin + part * PART
        largest = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        o = tl.zeros([M, W_TILE], tl.float32)
        for n in range(tl.maximum(start, part_start), tl.minimum(position + 1, part_start + PART), N):
            j = n + tl.arange(0, N)
            written = j <= position
            page = tl.load(table_nm + row * pages + j // PAGE, mask=written, other=0).to(tl.int64)
            slot = (page * PAGE + j % PAGE) * g + group
            k = tl.load(keys + slot[:, None] * D + c[None, :], mask=written[:, None] & (c < D)[None, :], other=0.0)
            v = tl.load(values + slot[:, None] * W + cw[None, :], mask=written[:, None] & (cw < W)[None, :], other=0.0)
            visible = real[:, None] & (j[None, :] >= first) & (j[None, :] <= position)
            largest, total, o = _with_block(
                q, k, v, visible, position_m, j, bias, r // 2, r, inner, outer, largest, total, o, SOFTCAP, BIAS
            )
        at = (row * u + part) * a + head
        tl.store(largest_nua + at, largest, mask=real)
        tl.store(total_nua + at, total, mask=real)
        tl.store(o_nuaw + at[:, None] * W + cw[None, :], o, mask=real[:, None] & (cw < W)[None, :])
        part += tl.num_programs(0)


def merge_kernel(
    o_nuaw, largest_nua, total_nua, positions_n, o_naw, lse_na, a, window, chunk, u,
    W: tl.constexpr, W_TILE: tl.constexpr, N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one head of a query into the output."""
    query, head, cw = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, W_TILE)
    position = tl.load(positions_n + query).to(tl.int32)
    origin = position // chunk * chunk
    first = tl.maximum(position + 1 - window, origin)
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    o = tl.zeros([W_TILE], tl.float32)
    for part in range((first - origin) // PART, (position - origin) // PART + 1):
        at = (query * u + part) * a + head + tl.arange(0, 1)
        part_largest, part_total = tl.load(largest_nua + at), tl.load(total_nua + at)
        part_o = tl.load(o_nuaw + ((query * u + part) * a + head) * W + cw, mask=cw < W, other=0.0)
        larger, shrink, part_shrink = _factors(largest, part_largest)
        total = total * shrink + part_total * part_shrink
        o = o * shrink + part_o * part_shrink
        largest = larger
    inverse, lse = _finished(largest, total)
    o = o * inverse
    tl.store(o_naw + (query * a + head) * W + cw, o.to(o_naw.dtype.element_ty), mask=cw < W)
    tl.store(lse_na + query * a + head + tl.arange(0, 1), lse)


_forward, _attend, _merge = TritonKernel(forward_kernel), TritonKernel(attend_kernel), TritonKernel(merge_kernel)


def _constants(d: int, w: int, scores: Scores, dtype: torch.dtype) -> dict[str, object]:
    """Return the constants of `forward_kernel` and `attend_kernel`, which must be the same for both."""
    wide = max(d, w) > 128 or dtype == torch.float32
    stages = 1 if dtype == torch.float32 else (2 if wide else 3)
    return {
        "SOFTCAP": scores.softcap is not None, "BIAS": scores.distance_bias_ar is not None, "D": d, "W": w,
        "D_TILE": max(16, next_power_of_2(d)), "W_TILE": max(16, next_power_of_2(w)), "M": _M, "N": KEYS,
        "PART": PART, "num_warps": 8 if wide else 4, "num_stages": stages, "enable_fp_fusion": False,
    }  # fmt: skip


def _numbers(scores: Scores, d: int) -> tuple[float, float]:
    """Return the factors of q·k inside and outside the soft cap, in base 2."""
    cap, scale = scores.softcap, scores.scale_of(d)
    return 0.0 if cap is None else 2 * _LOG2E * scale / cap, _LOG2E * (scale if cap is None else cap)


def _bias(scores: Scores, like: Tensor) -> tuple[Tensor, int]:
    """Return the bias by distance in base 2, and its length."""
    bias_ar = scores.distance_bias_ar
    return (like, 1) if bias_ar is None else (bias_ar.detach().float().mul(_LOG2E).contiguous(), bias_ar.shape[1])


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgw: Tensor, mask: AttentionMask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return the output `[s, b, a, w]` and the log-sum-exps `[s, b, a]`, fp32. Does not synchronize the host."""
    q, k, v = (kernel_input(x.contiguous()) for x in (q_sbad, k_tbgd, v_tbgw))
    (s, b, a, d), (t, _, g, w), device = q.shape, v.shape, q.device
    first_bs, end_bs = (x.contiguous() for x in key_ranges(mask, s, t, device))
    origin_bs = key_origins(mask, s, t, device).contiguous()
    positions_bs = torch.arange(s, device=device)[None] if mask.positions_bs is None else mask.positions_bs
    positions_bs = positions_bs.contiguous()
    o_sbaw = torch.empty(s, b, a, w, dtype=q.dtype, device=device)
    lse_sba = torch.empty(s, b, a, dtype=torch.float32, device=device)
    bias_ar, r = _bias(scores, q)
    bound = _forward.bind(**_constants(d, w, scores, q.dtype))
    bound.launch(
        (ceil_div(s, _M), b * a), (q, k, v, o_sbaw, lse_sba, first_bs, end_bs, origin_bs, positions_bs, bias_ar),
        (s, t, b, a, g, r, s if len(first_bs) > 1 else 0, s if len(positions_bs) > 1 else 0, *_numbers(scores, d)),
    )  # fmt: skip
    return o_sbaw.to(q_sbad.dtype), lse_sba


def attend(
    q_nad: Tensor, keys: Tensor, values: Tensor, table_nm: Tensor, positions_n: Tensor, window: int | None,
    chunk: int | None, scores: Scores,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of each query to its sequence's keys up to its position, and the log-sum-exps.

    The shapes are `[n, a, w]` and `[n, a]`.

    `keys` is `[p, z, g, d]` and `values` is `[p, z, g, w]`. The other arguments are as in `paged_kernel.attend`.
    Does not synchronize the host.
    """
    q = kernel_input(q_nad.contiguous())
    if INTERPRETED:
        keys, values = kernel_input(keys), kernel_input(values)
    (n, a, d), (_, page, g, w), pages = q.shape, values.shape, table_nm.shape[1]
    u = ceil_div(pages * page, PART)
    o_nuaw = torch.empty(n, u, a, w, dtype=torch.float32, device=q.device)
    largest_nua, total_nua = torch.empty(2, n, u, a, dtype=torch.float32, device=q.device).unbind()
    bias_ar, r = _bias(scores, q)
    limits = window or 2**30, chunk or 2**30
    constants = _constants(d, w, scores, q.dtype)
    programs = max(1, min(u, _PROGRAMS // (n * g)))
    _attend.bind(PAGE=page, **constants).launch(
        (programs, n * g), (q, keys, values, table_nm, positions_n, bias_ar, o_nuaw, largest_nua, total_nua),
        (a, g, pages, r, *limits, u, *_numbers(scores, d)),
    )  # fmt: skip
    o_naw = torch.empty(n, a, w, dtype=q.dtype, device=q.device)
    lse_na = torch.empty(n, a, dtype=torch.float32, device=q.device)
    names = ("W", "W_TILE", "N", "PART", "enable_fp_fusion")
    _merge.bind(**{name: constants[name] for name in names}, num_warps=1).launch(
        (n, a), (o_nuaw, largest_nua, total_nua, positions_n, o_naw, lse_na), (a, *limits, u)
    )
    return o_naw.to(q_nad.dtype), lse_na
