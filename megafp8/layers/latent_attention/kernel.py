"""Heads of multi-head latent attention from their projections, and the gradients, in one pass each way.

The projections give q and kv with the channels of a head side by side, and one rotary key for all heads. Attention
reads q, k and v separately, with the rotated channels after the other channels, and the rotary key repeated for each
head. In PyTorch this takes splits, rotations, concatenations and copies, and each is a pass over memory. Here forward
reads and writes every element once. Backward reads the gradients in whatever layout attention left them, and writes
them packed.

Rotated pairs are neighboring channels of the projections. They are loaded together and separated in registers. After
rotation, the first channels of all pairs come before the second channels (`megafp8.layers.rotary.op`).

Each program processes some tokens. In forward it processes some of their heads, one after the other, and rotates the
rotary key once for these heads. In backward it processes all heads of its tokens: the gradient of the rotary key is the
sum over heads, in fp32 and in head order, and is rounded before it is rotated back, as autograd does.

The results equal the reference in `megafp8.layers.latent_attention.op` bit for bit: fp32, products and sums without
contraction, and a rounding wherever PyTorch has one. In Triton's interpreter, kernels receive fp32 instead of bf16
(`kernel_input`): roundings inside the kernels are explicit there (`_rounded`), and torch rounds the results.

Shapes: s sequence, b micro-batch, m = s·b tokens, a heads; n channels of a head without positions, r rotary channels, d
= n + r; v channels of a value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import BoundKernel, TritonKernel
from megafp8.layers.rotary.kernel import angle_strides

# Tokens and warps per program, heads per forward program, and pipelining stages of backward. Measured on an H200.
_TOKENS, _WARPS, _HEADS = 4, 2, 16
_GRAD_TOKENS, _GRAD_WARPS, _GRAD_STAGES = 4, 2, 3


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, BF16: tl.constexpr):
    """Round fp32 to DTYPE. BF16 requests explicit rounding to bf16, for the interpreter."""
    if BF16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(first, second, cosine, sine):
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def _angles(cos, sin, token, b, stride_s, stride_b, j, inside):
    """Load the cosines and sines of the pairs j of tokens."""
    at = (token // b * stride_s + token % b * stride_b)[:, None] + j
    return tl.load(cos + at, mask=inside, other=1.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _load_pairs(x, inside, TOKENS: tl.constexpr, HALF: tl.constexpr):
    """Load the first and second channels of pairs of neighbors, in fp32.

    `x` holds pointers to channels `[TOKENS, 2·HALF]`.
    """
    pairs = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(pairs, (TOKENS, HALF, 2)))


@triton.jit
def _store_pairs(y, first, second, inside, TOKENS: tl.constexpr, HALF: tl.constexpr):
    """Store pairs of neighbors at the pointers `y` `[TOKENS, 2·HALF]`."""
    pairs = tl.reshape(tl.join(first, second), (TOKENS, 2 * HALF))
    tl.store(y, pairs.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _copy(x, y, inside, factor, SCALES: tl.constexpr):
    """Copy channels from the pointers `x` to the pointers `y`, multiplied by `factor` if SCALES."""
    values = tl.load(x, mask=inside, other=0.0)
    if SCALES:
        values = (values.to(tl.float32) * factor).to(y.dtype.element_ty)
    tl.store(y, values, mask=inside)


@TritonKernel
def forward_kernel(q_mc, kv_mc, k_rotary_mr, cos, sin, q_mad, k_mad, v_mav, cos_stride_s, cos_stride_b, m, b, a, factor,
                   ROTATES: tl.constexpr, SCALES: tl.constexpr, BF16: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
                   V: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr,
                   VALUE: tl.constexpr):  # fmt: skip
    """Compute HEADS heads of TOKENS tokens. SCALES: multiply queries by `factor`."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, row = (token < m)[:, None], token.to(tl.int64)[:, None]
    i, j, c = tl.arange(0, NOPE)[None, :], tl.arange(0, HALF)[None, :], tl.arange(0, VALUE)[None, :]
    p = tl.arange(0, 2 * HALF)[None, :]
    nope, half, rotary, value = inside & (i < N), inside & (j < R // 2), inside & (p < R), inside & (c < V)
    DTYPE: tl.constexpr = q_mad.dtype.element_ty
    keys = k_rotary_mr + row * R + p
    if ROTATES:
        cosine, sine = _angles(cos, sin, token, b, cos_stride_s, cos_stride_b, j, half)
        key, key2 = _load_pairs(keys, rotary, TOKENS, HALF)
        key, key2 = _rotated(key, key2, cosine, sine)
        key, key2 = key.to(DTYPE), key2.to(DTYPE)
    else:
        key = tl.load(keys, mask=rotary, other=0.0)
    before = tl.program_id(1) * HEADS
    for head in range(before, tl.minimum(before + HEADS, a)):
        at = row * a + head
        q, kv, q_out, k_out = q_mc + at * (N + R), kv_mc + at * (N + V), q_mad + at * (N + R), k_mad + at * (N + R)
        _copy(q + i, q_out + i, nope, factor, SCALES)
        _copy(kv + i, k_out + i, nope, factor, False)
        _copy(kv + N + c, v_mav + at * V + c, value, factor, False)
        if ROTATES:
            first, second = _load_pairs(q + N + p, rotary, TOKENS, HALF)
            first, second = _rotated(first, second, cosine, sine)
            if SCALES:
                first, second = _rounded(first, DTYPE, BF16) * factor, _rounded(second, DTYPE, BF16) * factor
            tl.store(q_out + N + j, first.to(DTYPE), mask=half)
            tl.store(q_out + N + R // 2 + j, second.to(DTYPE), mask=half)
            tl.store(k_out + N + j, key, mask=half)
            tl.store(k_out + N + R // 2 + j, key2, mask=half)
        else:
            _copy(q + N + p, q_out + N + p, rotary, factor, SCALES)
            tl.store(k_out + N + p, key, mask=rotary)


@TritonKernel
def backward_kernel(dq_mad, dk_mad, dv_mav, cos, sin, dq_mc, dkv_mc, dk_rotary_mr, dq_stride_s, dq_stride_b,
                    dq_stride_a, dk_stride_s, dk_stride_b, dk_stride_a, dv_stride_s, dv_stride_b, dv_stride_a,
                    cos_stride_s, cos_stride_b, m, b, a, factor, ROTATES: tl.constexpr, SCALES: tl.constexpr,
                    BF16: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr,
                    STAGES: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, VALUE: tl.constexpr):  # fmt: skip
    """Compute the gradients of all heads of TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, row = (token < m)[:, None], token.to(tl.int64)[:, None]
    i, j, c = tl.arange(0, NOPE)[None, :], tl.arange(0, HALF)[None, :], tl.arange(0, VALUE)[None, :]
    p = tl.arange(0, 2 * HALF)[None, :]
    nope, half, rotary, value = inside & (i < N), inside & (j < R // 2), inside & (p < R), inside & (c < V)
    DTYPE: tl.constexpr = dq_mc.dtype.element_ty
    dq_mad += row // b * dq_stride_s + row % b * dq_stride_b
    dk_mad += row // b * dk_stride_s + row % b * dk_stride_b
    dv_mav += row // b * dv_stride_s + row % b * dv_stride_b
    if ROTATES:
        cosine, sine = _angles(cos, sin, token, b, cos_stride_s, cos_stride_b, j, half)
        sine = sine * -1.0
        total = tl.zeros([TOKENS, HALF], tl.float32)
        total2 = tl.zeros([TOKENS, HALF], tl.float32)
    else:
        total = tl.zeros([TOKENS, 2 * HALF], tl.float32)
    for head in tl.range(0, a, num_stages=STAGES):
        at = row * a + head
        dq, dk, dv = dq_mad + head * dq_stride_a, dk_mad + head * dk_stride_a, dv_mav + head * dv_stride_a
        dq_out, dkv_out = dq_mc + at * (N + R), dkv_mc + at * (N + V)
        _copy(dq + i, dq_out + i, nope, factor, SCALES)
        _copy(dk + i, dkv_out + i, nope, factor, False)
        _copy(dv + c, dkv_out + N + c, value, factor, False)
        if ROTATES:
            first = tl.load(dq + N + j, mask=half, other=0.0).to(tl.float32)
            second = tl.load(dq + N + R // 2 + j, mask=half, other=0.0).to(tl.float32)
            if SCALES:
                first, second = _rounded(first * factor, DTYPE, BF16), _rounded(second * factor, DTYPE, BF16)
            first, second = _rotated(first, second, cosine, sine)
            _store_pairs(dq_out + N + p, first, second, rotary, TOKENS, HALF)
            total += tl.load(dk + N + j, mask=half, other=0.0).to(tl.float32)
            total2 += tl.load(dk + N + R // 2 + j, mask=half, other=0.0).to(tl.float32)
        else:
            _copy(dq + N + p, dq_out + N + p, rotary, factor, SCALES)
            total += tl.load(dk + N + p, mask=rotary, other=0.0).to(tl.float32)
    sums = dk_rotary_mr + row * R + p
    if ROTATES:
        first, second = _rotated(_rounded(total, DTYPE, BF16), _rounded(total2, DTYPE, BF16), cosine, sine)
        _store_pairs(sums, first, second, rotary, TOKENS, HALF)
    else:
        tl.store(sums, total.to(DTYPE), mask=rotary)


def constants(kernel: TritonKernel, n: int, r: int, v: int, rotates: bool, scales: bool, bf16: bool) -> dict[str, Any]:
    """Return the kernel's constants for heads of these widths.

    `bf16` is set in the interpreter if fp32 tensors stand for bf16.
    """
    options = {"TOKENS": _TOKENS, "HEADS": _HEADS, "num_warps": _WARPS}
    if kernel is backward_kernel:
        options = {"TOKENS": _GRAD_TOKENS, "STAGES": _GRAD_STAGES, "num_warps": _GRAD_WARPS}
    widths = {"N": n, "R": r, "V": v, "NOPE": next_power_of_2(n), "HALF": next_power_of_2(ceil_div(r, 2))}
    kind = {"ROTATES": rotates, "SCALES": scales, "BF16": bf16}
    return {**kind, **widths, "VALUE": next_power_of_2(v), **options, "enable_fp_fusion": False}


@cache
def _bound(kernel: TritonKernel, *of_heads: Any) -> BoundKernel:
    """Return the kernel with its `constants`."""
    return kernel.bind(**constants(kernel, *of_heads))


def forward(
    q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: tuple[Tensor, Tensor] | None, heads: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `megafp8.layers.latent_attention.op.forward_reference` for contiguous tensors of 16 or 32 bits."""
    dtype = q_sbc.dtype
    q_sbc, kv_sbc, k_rotary_sbr = kernel_input(q_sbc), kernel_input(kv_sbc), kernel_input(k_rotary_sbr)
    assert q_sbc.is_contiguous()
    assert kv_sbc.is_contiguous()
    assert k_rotary_sbr.is_contiguous()
    (s, b, c), r = q_sbc.shape, k_rotary_sbr.shape[2]
    d = c // heads
    v = kv_sbc.shape[2] // heads - (d - r)
    q, k, values = (q_sbc.new_empty(s, b, heads, width) for width in (d, d, v))
    if q.numel():
        cos, sin, strides = _angle_tensors(rotary, s, b)
        bf16 = dtype == torch.bfloat16 and INTERPRETED
        kernel = _bound(forward_kernel, d - r, r, v, rotary is not None, factor != 1, bf16)
        tensors = (q_sbc, kv_sbc, k_rotary_sbr, cos, sin, q, k, values)
        grid = ceil_div(s * b, _TOKENS), ceil_div(heads, _HEADS)
        kernel.launch(grid, tensors, (*strides, s * b, b, heads, factor))
    return q.to(dtype), k.to(dtype), values.to(dtype)


def backward(
    dq_sbad: Tensor, dk_sbad: Tensor, dv_sbav: Tensor, rotary: tuple[Tensor, Tensor] | None, r: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `megafp8.layers.latent_attention.op.backward_reference` for tensors of 16 or 32 bits in any layout."""
    dtype = dq_sbad.dtype
    gradients = [_adjacent(kernel_input(x)) for x in (dq_sbad, dk_sbad, dv_sbav)]
    (s, b, a, d), v = dq_sbad.shape, dv_sbav.shape[3]
    widths = a * d, a * (d - r + v), r
    dq_sbc, dkv_sbc, dk_rotary_sbr = (gradients[0].new_empty(s, b, width) for width in widths)
    if dq_sbc.numel():
        cos, sin, strides = _angle_tensors(rotary, s, b)
        bf16 = dtype == torch.bfloat16 and INTERPRETED
        kernel = _bound(backward_kernel, d - r, r, v, rotary is not None, factor != 1, bf16)
        numbers = (*(n for x in gradients for n in x.stride()[:3]), *strides, s * b, b, a, factor)
        tensors = (*gradients, cos, sin, dq_sbc, dkv_sbc, dk_rotary_sbr)
        kernel.launch((ceil_div(s * b, _GRAD_TOKENS), 1), tensors, numbers)
    return dq_sbc.to(dtype), dkv_sbc.to(dtype), dk_rotary_sbr.to(dtype)


def _adjacent(x: Tensor) -> Tensor:
    """Return `x` with the channels of a head adjacent in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _angle_tensors(
    rotary: tuple[Tensor, Tensor] | None, s: int, b: int
) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """Return cosines, sines, and the strides of their tokens and samples."""
    if rotary is None:
        return None, None, (0, 0)
    return *rotary, angle_strides(*rotary, s, b)
