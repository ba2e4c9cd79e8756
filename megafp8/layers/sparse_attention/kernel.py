"""DeepSeek Sparse Attention: scores of an indexer, the choice of keys, attention to chosen keys, the indexer's loss.

The reference is `megafp8.layers.sparse_attention.reference`.

*Scores* of a block of queries form a tile of queries and keys in registers. The heads of the indexer add their parts to
the tile one after the other. Products of bf16 are summed in fp32.

*The choice* is exact and deterministic. The k-th largest score is found from its bits, 8 bits per pass over the row
(radix select). A last pass writes the positions of all greater scores, and of the first scores equal to it, in order.

*Attention.* All heads of a query attend to the same keys. They are the rows of the products with a tile of these keys,
which a program gathers by their positions: M heads of a query with N keys at a time. Forward has a running maximum and
sum. Backward first recomputes probabilities from the log-sum-exps and writes them to memory together with the gradients
of scores, for some queries at a time. It then multiplies them with the keys, and a last kernel multiplies them with
queries and output gradients. No program therefore has more sums than registers can hold. On Hopper, with a multiple of
64 heads, forward and the first part of backward are in `layers.sparse_attention.hopper_kernel`. A query's contribution
to a key is added to fp32 sums in memory by atomic additions, in an order that differs between runs. If
torch.use_deterministic_algorithms is on, the contributions are written for each pair of a query and a key instead, and
torch adds them up in a fixed order.

Shapes: b sequences, s queries of a block, t keys, k chosen keys of a query; a heads of c = v + r channels, the first v
of them the value; i heads of the indexer with d channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel
from megafp8.layers.sparse_attention import hopper_kernel as hopper
from megafp8.layers.sparse_attention.reference import Index, Keys

_LOG2E = 1 / math.log(2)
_PAIR_BYTES = 1 << 29
"""Bytes in memory at once of tensors with one number per query, key, and head or channel."""

# --- the indexer ------------------------------------------------------------------------------------------------------


def scores_kernel(
    q_bsid, k_btd, weights_bsi, first_bs, stop_bs, scores_bst, s, t, heads,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the scores of M queries and N keys; skip tiles in which no key is in the range of a query."""
    sample = tl.program_id(1)
    columns = tl.cdiv(t, N)
    m, n = tl.program_id(0) // columns * M, tl.program_id(0) % columns * N
    i, j, c = m + tl.arange(0, M), n + tl.arange(0, N), tl.arange(0, WIDTH)
    real, known, wide = i < s, j < t, c < D
    row = sample.to(tl.int64) * s + i
    first = tl.load(first_bs + row, mask=real, other=t)
    stop = tl.load(stop_bs + row, mask=real, other=0)
    if (tl.min(first, axis=0) < n + N) & (tl.max(stop, axis=0) > n):
        key = sample.to(tl.int64) * t + j
        k = tl.load(k_btd + key[:, None] * D + c[None, :], mask=known[:, None] & wide[None, :], other=0.0)
        total = tl.zeros([M, N], tl.float32)
        for head in range(heads):
            q = tl.load(
                q_bsid + (row[:, None] * heads + head) * D + c[None, :], mask=real[:, None] & wide[None, :], other=0.0
            )
            weight = tl.load(weights_bsi + row * heads + head, mask=real, other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            total += tl.maximum(x, 0.0) * weight[:, None]
        tl.store(scores_bst + row[:, None] * t + j[None, :], total, mask=real[:, None] & known[None, :])


def block_maxima_kernel(scores_bst, first_bs, stop_bs, maxima_bsn, t, n, size, M: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the largest score in each block of a row's range, M blocks at a time; -inf for blocks after the range."""
    row = tl.program_id(0).to(tl.int64)
    first, stop = tl.load(first_bs + row), tl.load(stop_bs + row)
    lane = tl.arange(0, WIDTH)
    for at in range(0, n, M):
        block = at + tl.arange(0, M)
        j = first + block[:, None] * size + lane[None, :]
        seen = (lane < size)[None, :] & (j < stop)
        x = tl.load(scores_bst + row * t + j, mask=seen, other=float("-inf"))
        tl.store(maxima_bsn + row * n + block, tl.max(x, axis=1), mask=block < n)


@triton.jit
def _ordered(x):
    """Map fp32 numbers to unsigned integers in the same order; minus zero counts as zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


def choose_kernel(
    scores_bst, first_bs, stop_bs, chosen_bsk, t, k, BLOCK: tl.constexpr, BINS: tl.constexpr, BITS: tl.constexpr
):
    """Write the positions of a row's k largest scores, the first ones of equal scores; -1 pads the end."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(first_bs + row).to(tl.int32)
    stop = tl.load(stop_bs + row).to(tl.int32)
    scores = scores_bst + row * t
    lane, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    wanted = tl.minimum(k, stop - first)  # number of keys still to choose among those that match the threshold's bits
    threshold = tl.full([], 0, tl.uint32)
    if stop - first > k:
        for step in tl.static_range(32 // BITS):
            counts = tl.zeros([BINS], tl.int32)
            for at in range(first, stop, BLOCK):
                j = at + lane
                key = _ordered(tl.load(scores + j, mask=j < stop, other=0.0))
                alike = j < stop
                if step > 0:
                    alike &= (key >> (32 - BITS * step)) == (threshold >> (32 - BITS * step))
                digits = ((key >> (32 - BITS * (step + 1))) & (BINS - 1)).to(tl.int32)
                counts += tl.histogram(digits, BINS, mask=alike)
            upto = tl.cumsum(counts, axis=0)
            above = tl.sum(counts, axis=0) - upto
            digit = tl.max(tl.where((above < wanted) & (above + counts >= wanted), bins, 0), axis=0)
            wanted -= tl.sum(tl.where(bins == digit, above, 0), axis=0)
            threshold |= digit.to(tl.uint32) << (32 - BITS * (step + 1))
    written = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for at in range(first, stop, BLOCK):
        j = at + lane
        key = _ordered(tl.load(scores + j, mask=j < stop, other=0.0))
        same = (key == threshold) & (j < stop)
        take = (key > threshold) & (j < stop)
        if stop - first > k:
            take |= same & (equal + tl.cumsum(same.to(tl.int32), axis=0) <= wanted)
        else:
            take = j < stop
        place = written + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(chosen_bsk + row * k + place, j, mask=take)
        written += tl.sum(take.to(tl.int32), axis=0)
        equal += tl.sum(same.to(tl.int32), axis=0)
    for at in range(written, k, BLOCK):
        tl.store(chosen_bsk + row * k + at + lane, lane * 0 - 1, mask=at + lane < k)


def index_loss_kernel(
    q_bsid, k_btd, weights_bsi, chosen_bsk, count_bs, p_bsk, factor, dq_bsid, dk, dweights_bsi, loss_bs, s, t, k, heads,
    ATOMIC: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute one query's divergence of the softmax of its scores from p, and the gradients.

    M is at least the number of heads.
    """
    row = tl.program_id(0).to(tl.int64)
    base = row // s * t
    i, c, lane = tl.arange(0, M), tl.arange(0, WIDTH), tl.arange(0, N)
    inside = (i < heads)[:, None] & (c < D)[None, :]
    at_q = (row * heads + i[:, None]) * D + c[None, :]
    q = tl.load(q_bsid + at_q, mask=inside, other=0.0)
    weight = tl.load(weights_bsi + row * heads + i, mask=i < heads, other=0.0)
    count = tl.load(count_bs + row)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for n in range(0, count, N):
        seen = n + lane < count
        key = tl.load(chosen_bsk + row * k + n + lane, mask=seen, other=0)
        rows = tl.load(k_btd + (base + key)[:, None] * D + c[None, :], mask=seen[:, None] & (c < D)[None, :], other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(rows), input_precision="ieee"), 0.0)
        x = tl.where(seen, tl.sum(products * weight[:, None], axis=0), float("-inf"))
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    lse = largest + tl.log(total)
    scale = tl.load(factor)
    dq = tl.zeros([M, WIDTH], tl.float32)
    dweight = tl.zeros([M], tl.float32)
    loss = tl.full([], 0.0, tl.float32)
    for n in range(0, count, N):
        seen = n + lane < count
        key = tl.load(chosen_bsk + row * k + n + lane, mask=seen, other=0)
        rows = tl.load(k_btd + (base + key)[:, None] * D + c[None, :], mask=seen[:, None] & (c < D)[None, :], other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(rows), input_precision="ieee"), 0.0)
        x = tl.sum(products * weight[:, None], axis=0) - lse
        p = tl.load(p_bsk + row * k + n + lane, mask=seen, other=0.0)
        loss += tl.sum(tl.where(p > 0, p * (tl.log(tl.where(p > 0, p, 1.0)) - x), 0.0), axis=0)
        dx = tl.where(seen, (tl.exp(x) - p) * scale, 0.0)
        dweight += tl.sum(products * dx[None, :], axis=1)
        dproducts = tl.where(products > 0, dx[None, :] * weight[:, None], 0.0).to(rows.dtype)
        dq = tl.dot(dproducts, rows, dq, input_precision="ieee")
        drows = tl.dot(tl.trans(dproducts), q, input_precision="ieee")
        valid = seen[:, None] & (c < D)[None, :]
        if ATOMIC:
            tl.atomic_add(dk + (base + key)[:, None] * D + c[None, :], drows, mask=valid, sem="relaxed")
        else:
            tl.store(dk + (row * k + n + lane)[:, None] * D + c[None, :], drows, mask=valid)
    tl.store(dq_bsid + at_q, dq.to(dq_bsid.dtype.element_ty), mask=inside)
    tl.store(dweights_bsi + row * heads + i, dweight, mask=i < heads)
    tl.store(loss_bs + row, loss)


# --- attention to chosen keys -----------------------------------------------------------------------------------------


@triton.jit
def _inside(keep, c, END: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mask of the rows to keep and columns c below END.

    If all columns are below END, the mask has one column, so that registers hold nothing per column.
    """
    if END == WIDTH:
        return keep[:, None]
    else:
        return keep[:, None] & (c < END)[None, :]


def attend_kernel(
    q_bsac, kv_btc, chosen_bsk, count_bs, o_bsav, lse_bsa, s, t, k, a, scale,
    V: tl.constexpr, R: tl.constexpr, WV: tl.constexpr, WR: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute M heads of a query. `scale` is the factor of scores in base 2."""
    blocks = tl.cdiv(a, M)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * M + tl.arange(0, M)
    c, r, lane = tl.arange(0, WV), tl.arange(0, WR), tl.arange(0, N)
    real = head < a
    q = q_bsac + (row * a + head)[:, None] * (V + R)
    q_v = tl.load(q + c[None, :], mask=_inside(real, c, V, WV), other=0.0)
    q_r = tl.load(q + V + r[None, :], mask=_inside(real, r, R, WR), other=0.0)
    kv = kv_btc + row // s * t * (V + R)
    count = tl.load(count_bs + row)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, WV], tl.float32)
    for n in range(0, count, N):
        seen = n + lane < count
        key = tl.load(chosen_bsk + row * k + n + lane, mask=seen, other=0).to(tl.int64)
        rows = kv + key[:, None] * (V + R)
        k_v = tl.load(rows + c[None, :], mask=_inside(seen, c, V, WV), other=0.0)
        k_r = tl.load(rows + V + r[None, :], mask=_inside(seen, r, R, WR), other=0.0)
        x = tl.dot(q_v, tl.trans(k_v), input_precision="ieee")
        x = tl.dot(q_r, tl.trans(k_r), x, input_precision="ieee")
        x = tl.where(seen[None, :], x * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, axis=1))
        shrink = tl.exp2(largest - larger)
        p = tl.exp2(x - larger[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        o = tl.dot(p.to(k_v.dtype), k_v, o * shrink[:, None], input_precision="ieee")
        largest = larger
    some = total > 0
    o = o / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (largest + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    at = row * a + head
    tl.store(o_bsav + at[:, None] * V + c[None, :], o.to(o_bsav.dtype.element_ty), mask=_inside(real, c, V, WV))
    tl.store(lse_bsa + at, lse, mask=real)


def scores_backward_kernel(
    do_bsav, q_bsac, kv_btc, chosen_bsk, count_bs, lse_bsa, delta_bsa, p_bsak, ds_bsak,
    s, t, k, a, scale, scale2,
    V: tl.constexpr, R: tl.constexpr, WV: tl.constexpr, WR: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities of M heads of a query, and the gradients of their scores.

    `scale` is the factor of scores, and `scale2` the factor of scores in base 2.
    """
    blocks = tl.cdiv(a, M)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head, c, r, lane = block * M + tl.arange(0, M), tl.arange(0, WV), tl.arange(0, WR), tl.arange(0, N)
    real = head < a
    at = row * a + head
    q = q_bsac + at[:, None] * (V + R)
    q_v = tl.load(q + c[None, :], mask=_inside(real, c, V, WV), other=0.0)
    q_r = tl.load(q + V + r[None, :], mask=_inside(real, r, R, WR), other=0.0)
    do = tl.load(do_bsav + at[:, None] * V + c[None, :], mask=_inside(real, c, V, WV), other=0.0)
    lse = tl.load(lse_bsa + at, mask=real, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_bsa + at, mask=real, other=0.0)
    kv = kv_btc + row // s * t * (V + R)
    count = tl.load(count_bs + row)
    for n in range(0, count, N):
        seen = n + lane < count
        key = tl.load(chosen_bsk + row * k + n + lane, mask=seen, other=0).to(tl.int64)
        rows = kv + key[:, None] * (V + R)
        k_v = tl.load(rows + c[None, :], mask=_inside(seen, c, V, WV), other=0.0)
        k_r = tl.load(rows + V + r[None, :], mask=_inside(seen, r, R, WR), other=0.0)
        x = tl.dot(q_v, tl.trans(k_v), input_precision="ieee")
        x = tl.dot(q_r, tl.trans(k_r), x, input_precision="ieee")
        p = tl.where(seen[None, :] & real[:, None], tl.exp2(x * scale2 - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(k_v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * scale
        to = at[:, None] * k + n + lane[None, :]
        valid = real[:, None] & seen[None, :]
        tl.store(ds_bsak + to, ds.to(ds_bsak.dtype.element_ty), mask=valid)
        tl.store(p_bsak + to, p.to(p_bsak.dtype.element_ty), mask=valid)


def queries_backward_kernel(
    kv_btc, ds_bsak, chosen_bsk, count_bs, dq_bsac, s, t, k, a,
    C: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute W of the C channels of dq for M heads of a query."""
    parts, blocks = tl.cdiv(C, W), tl.cdiv(a, M)
    row = (tl.program_id(0) // (parts * blocks)).to(tl.int64)
    head = tl.program_id(0) // parts % blocks * M + tl.arange(0, M)
    c, lane = tl.program_id(0) % parts * W + tl.arange(0, W), tl.arange(0, N)
    real = head < a
    at = row * a + head
    kv = kv_btc + row // s * t * C
    count = tl.load(count_bs + row)
    dq = tl.zeros([M, W], tl.float32)
    for n in range(0, count, N):
        seen = n + lane < count
        key = tl.load(chosen_bsk + row * k + n + lane, mask=seen, other=0).to(tl.int64)
        rows = tl.load(kv + key[:, None] * C + c[None, :], mask=seen[:, None] & (c < C)[None, :], other=0.0)
        ds = tl.load(ds_bsak + at[:, None] * k + n + lane[None, :], mask=real[:, None] & seen[None, :], other=0.0)
        dq = tl.dot(ds, rows, dq, input_precision="ieee")
    tl.store(
        dq_bsac + at[:, None] * C + c[None, :], dq.to(dq_bsac.dtype.element_ty),
        mask=real[:, None] & (c < C)[None, :],
    )  # fmt: skip


def keys_backward_kernel(
    do_bsav, q_bsac, p_bsak, ds_bsak, chosen_bsk, count_bs, dkv, p_bsk, s, t, k, a,
    ATOMIC: tl.constexpr, V: tl.constexpr, R: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of N keys from one query, W channels at a time.

    They are sums over its heads, M heads at a time, and the probabilities and score gradients of the heads are read
    once. `dkv` has a row for each key, or for each pair of a query and a key. `p_bsk` receives the probabilities summed
    over heads.
    """
    tiles = tl.cdiv(k, N)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    n = tl.program_id(0) % tiles * N
    count = tl.load(count_bs + row)
    if n < count:
        lane = n + tl.arange(0, N)
        seen = lane < count
        key = tl.load(chosen_bsk + row * k + lane, mask=seen, other=0).to(tl.int64)
        if ATOMIC:
            to = dkv + (row // s * t + key) * (V + R)
        else:
            to = dkv + (row * k + lane) * (V + R)
        head_sums = tl.zeros([N], tl.float32)
        for m in range(0, a, M):
            head = m + tl.arange(0, M)
            real = head < a
            at = row * a + head
            valid = real[:, None] & seen[None, :]
            p = tl.load(p_bsak + at[:, None] * k + lane[None, :], mask=valid, other=0.0)
            ds = tl.load(ds_bsak + at[:, None] * k + lane[None, :], mask=valid, other=0.0)
            head_sums += tl.sum(p.to(tl.float32), axis=0)
            for first in range(0, V + R, W):
                c = first + tl.arange(0, W)
                q = tl.load(
                    q_bsac + at[:, None] * (V + R) + c[None, :], mask=real[:, None] & (c < V + R)[None, :], other=0.0
                )
                do = tl.load(do_bsav + at[:, None] * V + c[None, :], mask=real[:, None] & (c < V)[None, :], other=0.0)
                total = tl.dot(tl.trans(q), ds, input_precision="ieee")
                total = tl.dot(tl.trans(do), p, total, input_precision="ieee")
                mask = (c < V + R)[:, None] & seen[None, :]
                if ATOMIC:
                    tl.atomic_add(to[None, :] + c[:, None], total, mask=mask, sem="relaxed")
                else:
                    if m > 0:
                        total += tl.load(to[None, :] + c[:, None], mask=mask, other=0.0)
                    tl.store(to[None, :] + c[:, None], total, mask=mask)
        tl.store(p_bsk + row * k + lane, head_sums, mask=seen)


_scores, _block_maxima = TritonKernel(scores_kernel), TritonKernel(block_maxima_kernel)
_choose, _index_loss = TritonKernel(choose_kernel), TritonKernel(index_loss_kernel)
_attend, _scores_backward = TritonKernel(attend_kernel), TritonKernel(scores_backward_kernel)
_queries_backward, _keys_backward = TritonKernel(queries_backward_kernel), TritonKernel(keys_backward_kernel)

SCORES: dict[str, Any] = {"M": 64, "N": 128, "num_warps": 4, "num_stages": 3}
BLOCK_MAXIMA: dict[str, Any] = {"M": 16, "num_warps": 4}
CHOOSE: dict[str, Any] = {"BLOCK": 2048, "BITS": 8, "num_warps": 4}
INDEX_LOSS: dict[str, Any] = {"N": 128, "num_warps": 4, "num_stages": 2}
ATTEND: dict[str, Any] = {"M": 32, "N": 64, "num_warps": 4, "num_stages": 3}
SCORES_BACKWARD: dict[str, Any] = {"M": 64, "N": 32, "num_warps": 8, "num_stages": 3}
QUERIES_BACKWARD: dict[str, Any] = {"M": 128, "N": 64, "W": 128, "num_warps": 8, "num_stages": 3}
KEYS_BACKWARD: dict[str, Any] = {"M": 128, "N": 64, "W": 64, "num_warps": 4, "num_stages": 2}
"""Tiles and Triton's options of each kernel, tuned on an H200; `_heads` limits M to the heads of a query."""


def _heads(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return options | {"M": min(options["M"], max(16, next_power_of_2(heads)))}


def _wide(width: int) -> int:
    return max(16, next_power_of_2(width))


def _counts(keys: Keys) -> Tensor:
    """Return the number of chosen keys of each query, int32."""
    assert keys.chosen is not None
    return (keys.stop - keys.first).clamp(max=keys.chosen.shape[-1]).int().contiguous()


def index_scores(index: Index, first_bs: Tensor, stop_bs: Tensor) -> Tensor:
    """Compute `reference.index_scores` in fp32."""
    (b, s, heads, d), t = index.q.shape, index.k.shape[1]
    q, k = (kernel_input(x.contiguous()) for x in (index.q, index.k))
    first, stop = first_bs.int().contiguous(), stop_bs.int().contiguous()
    scores_bst = torch.empty(b, s, t, dtype=torch.float32, device=q.device)
    bound = _scores.bind(D=d, WIDTH=_wide(d), **SCORES)
    grid = ceil_div(s, SCORES["M"]) * ceil_div(t, SCORES["N"]), b
    bound.launch(grid, (q, k, index.weights.float().contiguous(), first, stop, scores_bst), (s, t, heads))
    return scores_bst


def block_maxima(scores_bst: Tensor, first_bs: Tensor, stop_bs: Tensor, size: int) -> Tensor:
    """Compute `reference.block_maxima`."""
    (b, s, t), ranges = scores_bst.shape, (first_bs.int().contiguous(), stop_bs.int().contiguous())
    maxima_bsn = scores_bst.new_empty(b, s, ceil_div(t, size))
    bound = _block_maxima.bind(WIDTH=next_power_of_2(size), **BLOCK_MAXIMA)
    bound.launch((b * s, 1), (scores_bst, *ranges, maxima_bsn), (t, maxima_bsn.shape[2], size))
    return maxima_bsn


def choose(scores_bst: Tensor, first_bs: Tensor, stop_bs: Tensor, top_k: int) -> Tensor:
    """Compute `reference.choose`."""
    b, s, t = scores_bst.shape
    chosen_bsk = torch.empty(b, s, top_k, dtype=torch.int32, device=scores_bst.device)
    bound = _choose.bind(BINS=1 << CHOOSE["BITS"], **CHOOSE)
    ranges = first_bs.int().contiguous(), stop_bs.int().contiguous()
    bound.launch((b * s, 1), (scores_bst, *ranges, chosen_bsk), (t, top_k))
    return chosen_bsk


def attend(q_bsac: Tensor, kv_btc: Tensor, keys: Keys, value_width: int, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `reference.attend` for chosen keys."""
    (b, s, a, c), t, v = q_bsac.shape, kv_btc.shape[1], value_width
    assert keys.chosen is not None
    q, kv = kernel_input(q_bsac.contiguous()), kernel_input(kv_btc)
    o_bsav = torch.empty(b, s, a, v, dtype=q.dtype, device=q.device)
    lse_bsa = torch.empty(b, s, a, dtype=torch.float32, device=q.device)
    chosen, counts = keys.chosen.contiguous(), _counts(keys)
    if hopper.takes(q, v):
        hopper.attend(q, kv, chosen, counts, o_bsav, lse_bsa, scale)
    else:
        options = _heads(ATTEND, a)
        bound = _attend.bind(V=v, R=c - v, WV=_wide(v), WR=_wide(c - v), **options)
        bound.launch(
            (b * s * ceil_div(a, options["M"]), 1), (q, kv, chosen, counts, o_bsav, lse_bsa),
            (s, t, chosen.shape[-1], a, scale * _LOG2E),
        )  # fmt: skip
    return o_bsav.to(q_bsac.dtype), lse_bsa


def attend_backward(
    do_bsav: Tensor, q_bsac: Tensor, kv_btc: Tensor, keys: Keys, o_bsav: Tensor, lse_bsa: Tensor, scale: float,
    dkv_btc: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `reference.attend_backward` for chosen keys."""
    (b, s, a, c), t, v = q_bsac.shape, kv_btc.shape[1], do_bsav.shape[-1]
    assert keys.chosen is not None
    top_k = keys.chosen.shape[-1]
    q, kv, do, o = (kernel_input(x.contiguous()) for x in (q_bsac, kv_btc, do_bsav, o_bsav))
    dq_bsac, p_bsk = torch.empty_like(q), torch.zeros(b, s, top_k, dtype=torch.float32, device=q.device)
    atomic, key_heads = not torch.are_deterministic_algorithms_enabled(), _heads(KEYS_BACKWARD, a)
    counts = _counts(keys)
    sums, tiles = _keys_backward.bind(ATOMIC=atomic, V=v, R=c - v, **key_heads), ceil_div(top_k, key_heads["N"])
    size = max(1, _PAIR_BYTES // (b * top_k * (4 * a if atomic else 4 * max(a, c))))
    for rows in (slice(at, min(at + size, s)) for at in range(0, s, size)):
        n = rows.stop - rows.start
        own_do, own_q, own_o, chosen, count, lse = (
            x[:, rows].contiguous() for x in (do, q, o, keys.chosen, counts, lse_bsa)
        )
        dq, p = torch.empty_like(own_q), p_bsk.new_zeros(b, n, top_k)
        probabilities, dscores = own_q.new_empty(2, b, n, a, top_k)
        tensors = own_do, own_q, kv, chosen, count, own_o, lse, probabilities, dscores, dq
        if hopper.takes(q, v):
            hopper.queries_backward(*tensors, scale)
        else:
            _queries_backward_by_triton(*tensors, scale)
        dkv = dkv_btc if atomic else dkv_btc.new_zeros(b, n, top_k, c)
        sums.launch(
            (b * n * tiles, 1), (own_do, own_q, probabilities, dscores, chosen, count, dkv, p), (n, t, top_k, a)
        )
        dq_bsac[:, rows], p_bsk[:, rows] = dq, p
        if not atomic:
            _add_rows(dkv_btc, chosen, dkv)
    return dq_bsac.to(q_bsac.dtype), p_bsk


def _queries_backward_by_triton(
    do_bsav: Tensor, q_bsac: Tensor, kv_btc: Tensor, chosen_bsk: Tensor, count_bs: Tensor, o_bsav: Tensor,
    lse_bsa: Tensor, p_bsak: Tensor, ds_bsak: Tensor, dq_bsac: Tensor, scale: float,
) -> None:  # fmt: skip
    """Compute `hopper_kernel.queries_backward` in Triton."""
    (b, s, a, c), v = q_bsac.shape, do_bsav.shape[3]
    numbers = s, kv_btc.shape[1], chosen_bsk.shape[2], a
    delta_bsa = torch.linalg.vecdot(do_bsav.float(), o_bsav.float())
    score_heads, query_heads = _heads(SCORES_BACKWARD, a), _heads(QUERIES_BACKWARD, a)
    _scores_backward.bind(V=v, R=c - v, WV=_wide(v), WR=_wide(c - v), **score_heads).launch(
        (b * s * ceil_div(a, score_heads["M"]), 1),
        (do_bsav, q_bsac, kv_btc, chosen_bsk, count_bs, lse_bsa, delta_bsa, p_bsak, ds_bsak),
        (*numbers, scale, scale * _LOG2E),
    )
    programs = ceil_div(a, query_heads["M"]) * ceil_div(c, query_heads["W"])
    _queries_backward.bind(C=c, **query_heads).launch(
        (b * s * programs, 1), (kv_btc, ds_bsak, chosen_bsk, count_bs, dq_bsac), numbers
    )


def _add_rows(into_btc: Tensor, chosen_bsk: Tensor, rows_bskc: Tensor) -> None:
    """Add rows to the rows of chosen keys; deterministic if torch is in deterministic mode."""
    b, t, c = into_btc.shape
    sample = torch.arange(b, device=rows_bskc.device).view(b, 1, 1) * t
    into_btc.view(b * t, c).index_add_(0, (chosen_bsk.clamp(min=0) + sample).flatten().long(), rows_bskc.reshape(-1, c))


def index_loss_backward(
    index: Index, keys: Keys, p_bsk: Tensor, factor: Tensor, dk_btd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reference.index_loss_backward` for chosen keys."""
    (b, s, heads, d), t = index.q.shape, index.k.shape[1]
    assert keys.chosen is not None
    top_k = keys.chosen.shape[-1]
    q, k = (kernel_input(x.contiguous()) for x in (index.q, index.k))
    weights, p_bsk = index.weights.float().contiguous(), p_bsk.contiguous()
    dq, dweights = torch.empty_like(q), torch.empty_like(weights)
    loss_bs = torch.empty(b, s, dtype=torch.float32, device=q.device)
    atomic, counts, chosen = not torch.are_deterministic_algorithms_enabled(), _counts(keys), keys.chosen.contiguous()
    bound = _index_loss.bind(ATOMIC=atomic, D=d, WIDTH=_wide(d), M=_wide(heads), **INDEX_LOSS)
    size = s if atomic else max(1, _PAIR_BYTES // (4 * b * top_k * d))
    for at in range(0, s, size):
        rows = slice(at, min(at + size, s))
        n = rows.stop - rows.start
        dk = dk_btd if atomic else dk_btd.new_zeros(b, n, top_k, d)
        row_inputs = [x[:, rows].contiguous() for x in (q, weights, chosen, counts, p_bsk)]
        whole = dq, dweights, loss_bs
        outs = whole if size >= s else tuple(torch.empty_like(x[:, rows]) for x in whole)
        bound.launch(
            (b * n, 1), (row_inputs[0], k, *row_inputs[1:], factor, outs[0], dk, *outs[1:]), (n, t, top_k, heads)
        )
        if size < s:
            for x, part in zip(whole, outs, strict=True):
                x[:, rows] = part
        if not atomic:
            _add_rows(dk_btd, chosen[:, rows], dk)
    return dq.to(index.q.dtype), dweights.to(index.weights.dtype), loss_bs.sum(dtype=torch.float64)
