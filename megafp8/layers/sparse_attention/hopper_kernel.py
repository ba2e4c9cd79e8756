"""Gluon kernels for attention to chosen keys on Hopper's warpgroup tensor cores.

`layers.sparse_attention.kernel` has the same functions in Triton. Triton copies the keys of a tile only after it has
multiplied the previous tile, and first waits for their positions. These kernels are written in Gluon, the language
below Triton, and control when each copy happens:

    attend      Two tiles of keys are in shared memory. While one is multiplied, the rows of the other and the
                positions of the next one arrive. Sums of probabilities stay in the threads until the last tile.
    queries     Shared memory holds one tile, the queries and the output gradients. One pass computes scores, their
                gradients and dq, so that keys are gathered once. Probabilities and gradients of scores go from shared
                to global memory in 16-byte accesses.

A program has 64 heads of a query: 64 is the smallest side of such a product, and registers can hold `[64, V]` in fp32.
All 8 warps do the same work, and each half of them has half of the keys or of the channels.

Shapes are as in `layers.sparse_attention.kernel`. V is 256 or 512; R is 0 or a power of two from 16 to 128; the
number of heads is a multiple of 64 (`takes`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megafp8.kernels.launch import TritonKernel

# Gluon renamed both functions in Triton 3.9.
_copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

HEADS = 64
"""Number of heads of a query that a program computes."""
_KEYS = 64
"""Number of keys that a program multiplies at a time."""
_SHARED_BYTES = 227 * 1024
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _rows(width):
    """Return the layout in which 8 warps copy rows of `width` 16-bit numbers.

    Each thread copies 16 bytes, and as few warps as possible share a row.
    """
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [8, 1], [1, 0])


@gluon.constexpr_function
def _shared(width):
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _sums(width):
    """Return the layout in which 8 warps hold the sums of a product `[64, width]`."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, width // 2, 16])


@gluon.jit
def _copy_rows(to, rows, row, first, STRIDE: gl.constexpr, W: gl.constexpr):
    """Copy W numbers, from column `first` on, of each `row` of `[..., STRIDE]`."""
    c = first + gl.arange(0, W, layout=gl.SliceLayout(0, _rows(W)))
    at = gl.expand_dims(row.to(gl.int64) * STRIDE, 1) + gl.expand_dims(c, 0)
    _copy_async(to, rows + at)


@gluon.jit
def _positions(chosen, first, count, N: gl.constexpr, W: gl.constexpr):
    """Load the positions of N keys from `first` on, in the layout of `_copy_rows`; missing keys become key 0."""
    lane = first + gl.arange(0, N, layout=gl.SliceLayout(1, _rows(W)))
    return gl.load(chosen + lane, mask=lane < count, other=0)


@gluon.jit
def _store_rows(to, tile, row, first, stop, STRIDE, M: gl.constexpr, N: gl.constexpr):
    """Store a tile `[M, N]` of shared memory as columns `first` to `stop` of rows of `[..., STRIDE]`."""
    i = gl.arange(0, M, layout=gl.SliceLayout(1, _rows(N)))
    j = first + gl.arange(0, N, layout=gl.SliceLayout(0, _rows(N)))
    at = gl.expand_dims((row + i) * STRIDE, 1) + gl.expand_dims(j, 0)
    gl.store(to + at, tile.load(_rows(N)), mask=gl.expand_dims(j < stop, 0))


@gluon.jit
def _store_sums(to, sums, row, first, STRIDE: gl.constexpr, M: gl.constexpr, W: gl.constexpr):
    """Store sums `[M, W]` as columns from `first` on of rows of `[..., STRIDE]`."""
    i = gl.arange(0, M, layout=gl.SliceLayout(1, _sums(W)))
    c = first + gl.arange(0, W, layout=gl.SliceLayout(0, _sums(W)))
    at = gl.expand_dims((row + i) * STRIDE, 1) + gl.expand_dims(c, 0)
    gl.store(to + at, sums.to(to.dtype.element_ty))


@gluon.jit
def _visible():
    """Wait for the copies of all threads, and make shared memory visible to the products that follow."""
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()


@gluon.jit
def attend_kernel(
    q_bsac, kv_btc, chosen_bsk, count_bs, o_bsav, lse_bsa, s, t, k, a, scale,
    V: gl.constexpr, R: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Compute M heads of a query. `scale` is the factor of scores in base 2."""
    C: gl.constexpr = V + R
    dtype: gl.constexpr = q_bsac.dtype.element_ty
    row = (gl.program_id(0) // (a // M)).to(gl.int64)
    head = row * a + gl.program_id(0) % (a // M) * M
    kv = kv_btc + row // s * t * C
    count = gl.load(count_bs + row)
    chosen = chosen_bsk + row * k
    q_v = gl.allocate_shared_memory(dtype, [M, V], _shared(V))
    k_v = gl.allocate_shared_memory(dtype, [2, N, V], _shared(V))
    probabilities = gl.allocate_shared_memory(dtype, [M, N], _shared(N))
    _copy_rows(q_v, q_bsac, head + gl.arange(0, M, layout=gl.SliceLayout(1, _rows(V))), 0, C, V)
    next_v = _positions(chosen, 0, count, N, V)
    _copy_rows(k_v.index(0), kv, next_v, 0, C, V)
    next_v = _positions(chosen, N, count, N, V)
    if R > 0:
        q_r = gl.allocate_shared_memory(dtype, [M, R], _shared(R))
        k_r = gl.allocate_shared_memory(dtype, [2, N, R], _shared(R))
        _copy_rows(q_r, q_bsac, head + gl.arange(0, M, layout=gl.SliceLayout(1, _rows(R))), V, C, R)
        next_r = _positions(chosen, 0, count, N, R)
        _copy_rows(k_r.index(0), kv, next_r, V, C, R)
        next_r = _positions(chosen, N, count, N, R)
    async_copy.commit_group()
    lane = gl.arange(0, N, layout=gl.SliceLayout(0, _sums(N)))
    largest = gl.full([M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _sums(N)))
    zeros = gl.zeros([M, N], gl.float32, layout=_sums(N))
    totals = zeros
    o = gl.zeros([M, V], gl.float32, layout=_sums(V))
    tiles = (count + N - 1) // N
    for i in range(tiles):
        here = i % 2
        _visible()
        if i + 1 < tiles:
            _copy_rows(k_v.index(1 - here), kv, next_v, 0, C, V)
            next_v = _positions(chosen, (i + 2) * N, count, N, V)
            if R > 0:
                _copy_rows(k_r.index(1 - here), kv, next_r, V, C, R)
                next_r = _positions(chosen, (i + 2) * N, count, N, R)
            async_copy.commit_group()
        x = warpgroup_mma(q_v, k_v.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
        if R > 0:
            x = warpgroup_mma(q_r, k_r.index(here).permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, deps=(x,))
        x = gl.where(gl.expand_dims(i * N + lane < count, 0), x * scale, float("-inf"))
        larger = gl.maximum(largest, gl.max(x, axis=1))
        shrink = gl.exp2(largest - larger)
        p = gl.exp2(x - gl.expand_dims(larger, 1))
        totals = totals * gl.expand_dims(shrink, 1) + p
        largest = larger
        probabilities.store(p.to(dtype))
        o = o * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, _sums(V))), 1)
        fence_async_shared()
        _barrier()
        o = warpgroup_mma(probabilities, k_v.index(here), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    async_copy.wait_group(0)
    total = gl.sum(totals, axis=1)
    some = total > 0
    lse = gl.where(some, (largest + gl.log2(total)) * _LN2, float("-inf"))
    gl.store(lse_bsa + head + gl.arange(0, M, layout=gl.SliceLayout(1, _sums(N))), lse)
    inverse = gl.convert_layout(1.0 / gl.where(some, total, 1.0), gl.SliceLayout(1, _sums(V)))
    _store_sums(o_bsav, o * gl.expand_dims(inverse, 1), head, 0, V, M, V)


@gluon.jit
def queries_backward_kernel(
    do_bsav, q_bsac, kv_btc, chosen_bsk, count_bs, o_bsav, lse_bsa, p_bsak, ds_bsak, dq_bsac, s, t, k, a, scale,
    V: gl.constexpr, R: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Compute dq of M heads of a query, their probabilities, and the gradients of their scores.

    `scale` is the factor of scores.
    """
    C: gl.constexpr = V + R
    dtype: gl.constexpr = q_bsac.dtype.element_ty
    row = (gl.program_id(0) // (a // M)).to(gl.int64)
    head = row * a + gl.program_id(0) % (a // M) * M
    kv = kv_btc + row // s * t * C
    count = gl.load(count_bs + row)
    chosen = chosen_bsk + row * k
    q_v = gl.allocate_shared_memory(dtype, [M, V], _shared(V))
    do_v = gl.allocate_shared_memory(dtype, [M, V], _shared(V))
    k_v = gl.allocate_shared_memory(dtype, [N, V], _shared(V))
    probabilities = gl.allocate_shared_memory(dtype, [M, N], _shared(N))
    gradients = gl.allocate_shared_memory(dtype, [M, N], _shared(N))
    rows = head + gl.arange(0, M, layout=gl.SliceLayout(1, _rows(V)))
    _copy_rows(q_v, q_bsac, rows, 0, C, V)
    _copy_rows(do_v, do_bsav, rows, 0, V, V)
    next_v = _positions(chosen, 0, count, N, V)
    _copy_rows(k_v, kv, next_v, 0, C, V)
    next_v = _positions(chosen, N, count, N, V)
    if R > 0:
        q_r = gl.allocate_shared_memory(dtype, [M, R], _shared(R))
        k_r = gl.allocate_shared_memory(dtype, [N, R], _shared(R))
        _copy_rows(q_r, q_bsac, head + gl.arange(0, M, layout=gl.SliceLayout(1, _rows(R))), V, C, R)
        next_r = _positions(chosen, 0, count, N, R)
        _copy_rows(k_r, kv, next_r, V, C, R)
        next_r = _positions(chosen, N, count, N, R)
        dq_r = gl.zeros([M, R], gl.float32, layout=_sums(R))
    async_copy.commit_group()
    c = gl.arange(0, V, layout=gl.SliceLayout(0, _rows(V)))
    o = gl.load(o_bsav + gl.expand_dims(rows * V, 1) + gl.expand_dims(c, 0)).to(gl.float32)
    _visible()
    delta = gl.sum(o * do_v.load(_rows(V)).to(gl.float32), axis=1)
    delta = gl.expand_dims(gl.convert_layout(delta, gl.SliceLayout(1, _sums(N))), 1)
    lse = gl.load(lse_bsa + head + gl.arange(0, M, layout=gl.SliceLayout(1, _sums(N))))
    lse = gl.expand_dims(lse * _LOG2E, 1)
    lane = gl.arange(0, N, layout=gl.SliceLayout(0, _sums(N)))
    zeros = gl.zeros([M, N], gl.float32, layout=_sums(N))
    dq_v = gl.zeros([M, V], gl.float32, layout=_sums(V))
    tiles = (count + N - 1) // N
    for i in range(tiles):
        _visible()
        x = warpgroup_mma(q_v, k_v.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if R > 0:
            x = warpgroup_mma(q_r, k_r.permute((1, 0)), x, is_async=True)
        dp = warpgroup_mma(do_v, k_v.permute((1, 0)), zeros, use_acc=False, is_async=True)
        x, dp = warpgroup_mma_wait(0, deps=(x, dp))
        seen = gl.expand_dims(i * N + lane < count, 0)
        p = gl.where(seen, gl.exp2(x * (scale * _LOG2E) - lse), 0.0)
        probabilities.store(p.to(dtype))
        gradients.store((p * (dp - delta) * scale).to(dtype))
        fence_async_shared()
        _barrier()
        dq_v = warpgroup_mma(gradients, k_v, dq_v, is_async=True)
        if R > 0:
            dq_r = warpgroup_mma(gradients, k_r, dq_r, is_async=True)
        _store_rows(p_bsak, probabilities, head, i * N, k, k, M, N)
        _store_rows(ds_bsak, gradients, head, i * N, k, k, M, N)
        dq_v = warpgroup_mma_wait(0, deps=(dq_v,))
        if R > 0:
            dq_r = warpgroup_mma_wait(0, deps=(dq_r,))
        if i + 1 < tiles:
            _barrier()
            _copy_rows(k_v, kv, next_v, 0, C, V)
            next_v = _positions(chosen, (i + 2) * N, count, N, V)
            if R > 0:
                _copy_rows(k_r, kv, next_r, V, C, R)
                next_r = _positions(chosen, (i + 2) * N, count, N, R)
            async_copy.commit_group()
    _store_sums(dq_bsac, dq_v, head, 0, C, M, V)
    if R > 0:
        _store_sums(dq_bsac, dq_r, head, V, C, M, R)


_attend, _queries_backward = TritonKernel(attend_kernel), TritonKernel(queries_backward_kernel)
OPTIONS = {"M": HEADS, "N": _KEYS, "num_warps": 8}


def takes(q_bsac: Tensor, value_width: int) -> bool:
    """Return whether these kernels support attention with such queries on their device."""
    heads, r = q_bsac.shape[2], q_bsac.shape[3] - value_width
    fits = value_width in (256, 512) and r in (0, 16, 32, 64, 128) and heads % HEADS == 0
    bytes_of_row = 2 * max(3 * (value_width + r) + _KEYS, 3 * value_width + 2 * r + 2 * _KEYS)
    return (
        fits and q_bsac.is_cuda and q_bsac.dtype in (torch.bfloat16, torch.float16)
        and HEADS * bytes_of_row <= _SHARED_BYTES and torch.cuda.get_device_capability(q_bsac.device) == (9, 0)
    )  # fmt: skip


def attend(
    q_bsac: Tensor, kv_btc: Tensor, chosen_bsk: Tensor, count_bs: Tensor, o_bsav: Tensor, lse_bsa: Tensor, scale: float
) -> None:
    """Write outputs and log-sum-exps.

    All tensors are contiguous. `count_bs`, int32, is the number of chosen keys of each query.
    """
    (b, s, a, c), v = q_bsac.shape, o_bsav.shape[3]
    _attend.bind(V=v, R=c - v, **OPTIONS).launch(
        (b * s * (a // HEADS), 1), (q_bsac, kv_btc, chosen_bsk, count_bs, o_bsav, lse_bsa),
        (s, kv_btc.shape[1], chosen_bsk.shape[2], a, scale * _LOG2E.value),
    )  # fmt: skip


def queries_backward(
    do_bsav: Tensor, q_bsac: Tensor, kv_btc: Tensor, chosen_bsk: Tensor, count_bs: Tensor, o_bsav: Tensor,
    lse_bsa: Tensor, p_bsak: Tensor, ds_bsak: Tensor, dq_bsac: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write probabilities and score gradients, for tiles that have chosen keys, and the gradients of queries."""
    (b, s, a, c), v = q_bsac.shape, o_bsav.shape[3]
    tensors = (do_bsav, q_bsac, kv_btc, chosen_bsk, count_bs, o_bsav, lse_bsa, p_bsak, ds_bsak, dq_bsac)
    _queries_backward.bind(V=v, R=c - v, **OPTIONS).launch(
        (b * s * (a // HEADS), 1), tensors, (s, kv_btc.shape[1], chosen_bsk.shape[2], a, scale)
    )
