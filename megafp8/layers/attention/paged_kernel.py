"""Paged cache of keys and values: kernels that append to it and attend to it in place, for single queries.

The references are `PagedCache.append`, and `layers.attention.op` applied to the result of `PagedCache.read`.

A query of a sequence attends to the pages listed in the sequence's row of a table. There is only one query per
sequence, so the work consists of reading keys and values once. A program takes all heads of one group for one query and
a part of its keys (Dao et al. 2023, "Flash-Decoding"). Another kernel merges the parts. The number of parts depends
only on the number of queries, so that a CUDA graph fits sequences of any length; a part without keys costs nothing.

A cache in FP8 or int8 has a scale for each token and head. Scores are multiplied by the scales of the keys, and
probabilities by the scales of the values. Tiles therefore go to the tensor cores as they are read, which is exact.

Shapes: n tokens, a query heads, g key-value heads, d head width, w width of values, p pages of z tokens, m pages of a
sequence; tiles of M heads and N keys.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input, next_power_of_2, to_fp8
from megafp8.kernels.launch import TritonKernel
from megafp8.layers.attention.kernel import score
from megafp8.layers.attention.scores import Scores
from megafp8.numerics.formats import E4M3

_LOG2E = 1 / math.log(2)
_KEYS = 64
"""Number of keys in a tile."""
_PROGRAMS = 528
"""Target number of programs, enough to keep a GPU with 132 multiprocessors busy to the end."""
_MOST_PARTS = 64


@triton.jit
def _append_row(
    x, at, data, scale_inv, D, LARGEST: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    c = tl.arange(0, WIDTH)
    values = tl.load(x + c, mask=c < D, other=0.0)
    to = data + at * D + c
    if LARGEST == 0:
        tl.store(to, values.to(data.dtype.element_ty), mask=c < D)
    else:
        values = values.to(tl.float32)
        amax = tl.max(tl.abs(values), axis=0)
        inverse = tl.where(amax == 0, 1.0, tl.div_rn(amax, LARGEST * 1.0))
        tl.store(scale_inv + at, inverse)
        scaled = tl.div_rn(values, tl.full([WIDTH], 1.0, tl.float32) * inverse)
        if LARGEST == 127:
            rounded = (scaled + 12582912.0) - 12582912.0  # to nearest even: 1.5 · 2^23 has no fraction
            tl.store(to, rounded.to(tl.int8), mask=c < D)
        else:
            tl.store(to, to_fp8(scaled, "e4m3", LARGEST * 1.0, INTERPRETED), mask=c < D)


def append_kernel(
    k_ngd, v_ngd, slots_n, keys, values, key_scales, value_scales,
    stride_kn, stride_kg, stride_vn, stride_vg, D, W,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store one head of one token. `LARGEST` is the value to which the amax is scaled, 0 without quantization."""
    token, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.load(slots_n + token).to(tl.int64) * groups + group
    row = token.to(tl.int64)
    k, v = k_ngd + row * stride_kn + group * stride_kg, v_ngd + row * stride_vn + group * stride_vg
    _append_row(k, at, keys, key_scales, D, LARGEST, WIDTH, INTERPRETED)
    _append_row(v, at, values, value_scales, W, LARGEST, WIDTH, INTERPRETED)


def attend_kernel(
    q_nad, keys, values, key_scales, value_scales, table_nm, positions_n, bias_ar, o_nkaw, lse_nka,
    a, g, pages, r, window, chunk, inner, outer,
    PAGE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, QUANTIZED: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend to one part of the keys for one query and one group; log-sum-exps are in base 2."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    query, group = tl.program_id(1) // g, tl.program_id(1) % g
    heads = a // g
    i, c = tl.arange(0, M), tl.arange(0, WIDTH)
    head = group * heads + i
    row = query.to(tl.int64)
    q = tl.load(
        q_nad + (row * a + head[:, None]) * D + c[None, :], mask=(i < heads)[:, None] & (c < D)[None, :], other=0.0
    )
    position = tl.load(positions_n + query).to(tl.int32)
    first = tl.maximum(position + 1 - window, position // chunk * chunk)
    start = first // N * N
    blocks = tl.cdiv(position + 1 - start, N)
    own_blocks = tl.cdiv(blocks, parts)
    begin = start + part * own_blocks * N
    until = tl.minimum(begin + own_blocks * N, position + 1)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, WIDTH], tl.float32)
    for n in range(begin, until, N):
        j = n + tl.arange(0, N)
        seen = (j >= first) & (j < until)
        page = tl.load(table_nm + row * pages + j // PAGE, mask=seen, other=0).to(tl.int64)
        slot = (page * PAGE + j % PAGE) * g + group
        k = tl.load(keys + slot[:, None] * D + c[None, :], mask=seen[:, None] & (c < D)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if QUANTIZED:
            x = x * tl.load(key_scales + slot, mask=seen, other=0.0)[None, :]
        x, _tanh = score(
            x,
            position,
            j[None, :],
            bias_ar + tl.minimum(head, a - 1)[:, None] * r,
            r // 2,
            r,
            inner,
            outer,
            SOFTCAP,
            BIAS,
        )
        x = tl.where(seen[None, :], x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, axis=1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        shrink = tl.exp2(largest - finite)
        p = tl.exp2(x - finite[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(values + slot[:, None] * W + c[None, :], mask=seen[:, None] & (c < W)[None, :], other=0.0)
        if QUANTIZED:
            p = p * tl.load(value_scales + slot, mask=seen, other=0.0)[None, :]
        o = tl.dot(p.to(q.dtype), v.to(q.dtype), o * shrink[:, None], input_precision="ieee")
        largest = larger
    some = total > 0
    o = o / tl.where(some, total, 1.0)[:, None]
    to = (row * parts + part) * a + head
    tl.store(lse_nka + to, tl.where(some, largest + tl.log2(total), float("-inf")), mask=i < heads)
    # The merging kernel does not read the output of a part without keys.
    tl.store(o_nkaw + to[:, None] * D + c[None, :], o, mask=((i < heads) & some)[:, None] & (c < D)[None, :])


def merge_kernel(
    o_nkaw, lse_nka, sink_a, y_nad, a, parts,
    SINK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one head of a query, and the head's sink, into the output."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, c = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    at = (query * parts + k) * a + head
    lse = tl.load(lse_nka + at, mask=k < parts, other=float("-inf"))
    largest = tl.max(lse, axis=0)
    if SINK:
        sink = tl.load(sink_a + head).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    share = tl.exp2(lse - largest)
    total = tl.sum(share, axis=0)
    if SINK:
        total += tl.exp2(sink - largest)
    o = tl.load(o_nkaw + at[:, None] * D + c[None, :], mask=(share > 0)[:, None] & (c < D)[None, :], other=0.0)
    y = tl.sum(o * (share / total)[:, None], axis=0)
    tl.store(y_nad + (query * a + head) * D + c, y.to(y_nad.dtype.element_ty), mask=c < D)


_append, _attend, _merge = TritonKernel(append_kernel), TritonKernel(attend_kernel), TritonKernel(merge_kernel)


def append(
    k_ngd: Tensor, v_ngd: Tensor, slots_n: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None
) -> None:
    """Store tokens in the slots `slots_n` of `keys` `[p, z, g, d]` and `values` `[p, z, g, w]`.

    Only the first w columns of `v_ngd` are stored. `scales` holds the scales of keys and of values, float32 `[p, z,
    g]`, if the cache is in E4M3 or int8.
    """
    k_ngd, v_ngd = kernel_input(k_ngd), kernel_input(v_ngd)
    assert k_ngd.stride(2) == v_ngd.stride(2) == 1
    n, g, d = k_ngd.shape
    largest = 0
    if scales is not None:
        largest = 127 if keys.dtype == torch.int8 else int(E4M3.max)
        if keys.dtype != torch.int8:
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    key_scales, value_scales = scales or (slots_n, slots_n)  # not read
    bound = _append.bind(LARGEST=largest, WIDTH=next_power_of_2(d), INTERPRETED=INTERPRETED, num_warps=1)
    bound.launch(
        (n, g), (k_ngd, v_ngd, slots_n, keys, values, key_scales, value_scales),
        (*k_ngd.stride()[:2], *v_ngd.stride()[:2], d, values.shape[-1]),
    )  # fmt: skip


def attend(
    q_nad: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, table_nm: Tensor,
    positions_n: Tensor, window: int | None, chunk: int | None, sink_a: Tensor | None, scores: Scores,
) -> Tensor:  # fmt: skip
    """Return the attention of each query to its sequence's keys up to its position, `[n, a, d]`.

    Columns from w on are zeros. Does not synchronize the host.

    Args:
        q_nad: Queries.
        keys: Cached keys, `[p, z, g, d]`.
        values: Cached values, `[p, z, g, w]`.
        scales: Scales of keys and of values, float32 `[p, z, g]`, if the cache is quantized.
        table_nm: Pages of each query's sequence, int32.
        positions_n: Position of each query, int64.
        window: Number of latest keys to which a query attends; None means all.
        chunk: Size in keys of the chunks within which attention stays; None means no chunks.
        sink_a: Sink of each head; None means no sinks.
        scores: Score settings; a bias by distance may cover any number of keys.
    """
    q = kernel_input(q_nad.contiguous())
    if INTERPRETED:
        keys, values = (kernel_input(x) if scales is None else x.float() for x in (keys, values))
    (n, a, d), (_, page, g, w) = q.shape, values.shape
    parts = max(1, min(_MOST_PARTS, ceil_div(_PROGRAMS, n * g)))
    o_nkad = torch.empty(n, parts, a, d, dtype=torch.float32, device=q.device)
    lse_nka = torch.empty(n, parts, a, dtype=torch.float32, device=q.device)
    bias, cap, scale = scores.distance_bias_ar, scores.softcap, scores.scale_of(d)
    key_scales, value_scales = scales or (positions_n, positions_n)  # not read
    width = max(16, next_power_of_2(d))
    bound = _attend.bind(
        PAGE=page, SOFTCAP=cap is not None, BIAS=bias is not None, QUANTIZED=scales is not None, D=d, W=w, WIDTH=width,
        M=max(16, next_power_of_2(a // g)), N=_KEYS, num_warps=4, num_stages=3 if width <= 128 else 2,
    )  # fmt: skip
    bound.launch(
        (parts, n * g),
        (q, keys, values, key_scales, value_scales, table_nm, positions_n,
         q if bias is None else bias.float() * _LOG2E, o_nkad, lse_nka),
        (a, g, table_nm.shape[1], 1 if bias is None else bias.shape[1], window or 2**31 - 1, chunk or 2**31 - 1,
         0.0 if cap is None else 2 * _LOG2E * scale / cap, _LOG2E * (scale if cap is None else cap)),
    )  # fmt: skip
    y_nad = torch.empty_like(q)
    merge = _merge.bind(
        SINK=sink_a is not None, D=d, WIDTH=width, PARTS=next_power_of_2(parts), num_warps=2 if parts > 8 else 1
    )
    merge.launch((n, a), (o_nkad, lse_nka, q if sink_a is None else sink_a, y_nad), (a, parts))
    return y_nad.to(q_nad.dtype)
