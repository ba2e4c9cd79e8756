"""Rotary embedding of queries and keys, in place or after norms.

The reference is `rotate` in `megafp8.numerics.sources`.

PyTorch rotates q and k through nine fp32 temporaries and moves about sixty bytes per element. Four bytes are enough:
each element of a q or k head is read and written once. One kernel therefore rotates both in the output of the qkv
linear layer, and leaves v unchanged. The layer's backward does not need the overwritten values. This module has no
kernel for backward: `sources.QKVGrad` gathers the gradients of q, k and v, rotates them back and casts them in one
pass.

If q and k have an RMSNorm, the same kernel normalizes and rotates them into another tensor, because the gradient of a
norm is computed from its input. The norm's statistics belong to one head, and the kernel computes them, or they are
given. The gradient has two passes. The first (`norm_grad_kernel`) reads the gradients of q and k and the norms' input,
and reduces them in two ways: along each head to the number that the gradient of the head's norm needs, and over tokens
to the gradients of the weights, as one partial sum per program. The second pass is again `sources.QKVGrad`. The
references are in `megafp8.layers.norm.reference`.

A program processes some rows. A row is one head of one token, and its two halves, d/2 apart, are read as two tiles with
16-byte accesses. Rows run over tokens and heads, so that any number of heads fills the programs. The heads of a token
read the same angles, from L1. In `norm_grad_kernel`, a program has some heads of many tokens, one tile after the other.

The results equal the reference bit for bit, except for sums over tokens: fp32, products and sums without contraction,
one rounding at the end; sums along heads are float64. Triton's interpreter reads and rounds bf16 incorrectly, so there
the kernel receives fp32, and torch rounds.

Shapes: s sequence, b micro-batch, r = s·b tokens, c = (a + 2g)·d channels of a query heads, g key heads and g value
heads of width d; h = a + g heads; p programs.
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
from megafp8.layers.norm.reference import EXACT

_PAIRS = 2048  # pairs per program: 16 per thread, with four 16-byte loads in flight
_NORM_PAIRS = 1024  # pairs per program with norms
# Constants of `norm_grad_kernel`: pairs per tile, tiles per program, pipelining stages (one tile is loaded while the
# previous one is computed), and the largest number of heads per tile, which share angles. Measured on an H200
# (docs/measurements/2026-11-26-query-key-norms).
_GRADIENT_PAIRS, _TILES, _STAGES, _HEADS = 512, 2 if INTERPRETED else 32, 2, 4


@triton.jit
def _halves(x, at, inside, D: tl.constexpr):
    """Load both halves of heads in fp32."""
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(x + D // 2 + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _exact_sum(first, second):
    """Return the sums along rows of both halves, float64."""
    return tl.sum(first.to(tl.float64) + second.to(tl.float64), axis=1)


@triton.jit
def _square_sum(first, second):
    """Return the sums of squares along rows of both halves, float64."""
    first, second = first.to(tl.float64), second.to(tl.float64)
    return tl.sum(first * first + second * second, axis=1)


@triton.jit
def _factors(weight_hd, at, inside, D: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Return a norm's factors for both halves of heads: the weights, or 1 + weights if zero-centered."""
    first, second = _halves(weight_hd, at, inside, D)
    return (1.0 + first, 1.0 + second) if ZERO_CENTERED else (first, second)


@TritonKernel
def rotary_kernel(x_sbc, out_sbc, cos, sin, rstd_rh, weight_hd, cos_stride_s, cos_stride_b, rows, b, c, out_c, heads,
                  eps, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                  HALF: tl.constexpr):  # fmt: skip
    """Rotate some rows of the first `heads` heads of each token; without norms, `out_sbc` may be `x_sbc`.

    NORM is "" for no norm, "heads" to compute and store the statistics, or "given" to read them.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    j = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (j < D // 2)[None, :]
    at = (token.to(tl.int64) * c + row % heads * D)[:, None] + j[None, :]
    angle = (token // b * cos_stride_s + token % b * cos_stride_b)[:, None] + j[None, :]
    first, second = _halves(x_sbc, at, inside, D)
    if NORM != "":
        if NORM == "heads":
            mean = (_square_sum(first, second) / D).to(tl.float32)
            rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
            tl.store(rstd_rh + row, rstd, mask=row < rows)
        else:
            rstd = tl.load(rstd_rh + row, mask=row < rows, other=0.0)
        first, second = first * rstd[:, None], second * rstd[:, None]
        if weight_hd is not None:
            factor = _factors(weight_hd, (row % heads * D)[:, None] + j[None, :], inside, D, ZERO_CENTERED)
            first, second = first * factor[0], second * factor[1]
    cosine = tl.load(cos + angle, mask=inside, other=1.0)
    sine = tl.load(sin + angle, mask=inside, other=0.0)
    at = (token.to(tl.int64) * out_c + row % heads * D)[:, None] + j[None, :]
    tl.store(out_sbc + at, (first * cosine - second * sine).to(out_sbc.dtype.element_ty), mask=inside)
    tl.store(out_sbc + D // 2 + at, (second * cosine + first * sine).to(out_sbc.dtype.element_ty), mask=inside)


@TritonKernel
def square_means_kernel(x_rc, means_rh, rows, c, heads, count, D: tl.constexpr, ROWS: tl.constexpr,
                        HALF: tl.constexpr):  # fmt: skip
    """Compute the sums of squares of some rows of the first `heads` heads of each token, divided by `count`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, HALF)
    at = ((row // heads).to(tl.int64) * c + row % heads * D)[:, None] + j[None, :]
    first, second = _halves(x_rc, at, (row < rows)[:, None] & (j < D // 2)[None, :], D)
    tl.store(means_rh + row, (_square_sum(first, second) / count).to(tl.float32), mask=row < rows)


@TritonKernel
def norm_grad_kernel(dq_rad, dk_rgd, x_rc, cos, sin, rstd_rh, weight_hd, statistics_2rh, partials_kpd, cos_stride_s,
                     cos_stride_b, r, b, c, a, g, count, SHARED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
                     D: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
                     STAGES: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Compute `norm_reference.head_gradients` for TILES tiles of TOKENS tokens and HEADS heads of queries or keys.

    SHARED means that heads share a weight: a program then has one sum of their gradients, otherwise one for each head.
    """
    query_programs = tl.cdiv(a, HEADS)
    is_key = tl.program_id(0) >= query_programs
    dy_rd, heads, before = tl.where(is_key, dk_rgd, dq_rad), tl.where(is_key, g, a), tl.where(is_key, a, 0)
    head0 = (tl.program_id(0) - tl.where(is_key, query_programs, 0)) * HEADS
    i, j = tl.arange(0, TOKENS * HEADS), tl.arange(0, HALF)
    head = head0 + i % HEADS
    columns = (j < D // 2)[None, :]
    if weight_hd is not None:
        at = ((before + head) * D)[:, None] + j[None, :]
        factor, factor2 = _factors(weight_hd, at, (head < heads)[:, None] & columns, D, ZERO_CENTERED)
    sums = tl.zeros([TOKENS * HEADS, HALF], tl.float32)
    sums2 = tl.zeros([TOKENS * HEADS, HALF], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        token = (tl.program_id(1) * TILES + tile) * TOKENS + i // HEADS
        valid = (token < r) & (head < heads)
        inside = valid[:, None] & columns
        dy, dy2 = _halves(dy_rd, ((token.to(tl.int64) * heads + head) * D)[:, None] + j[None, :], inside, D)
        x, x2 = _halves(x_rc, (token.to(tl.int64) * c + (before + head) * D)[:, None] + j[None, :], inside, D)
        angle = (token // b * cos_stride_s + token % b * cos_stride_b)[:, None] + j[None, :]
        cosine = tl.load(cos + angle, mask=inside, other=1.0)
        sine = tl.load(sin + angle, mask=inside, other=0.0) * -1.0
        dy, dy2 = dy * cosine - dy2 * sine, dy2 * cosine + dy * sine
        row = token * (a + g) + before + head
        rstd = tl.load(rstd_rh + row, mask=valid, other=0.0)
        x, x2 = x * rstd[:, None], x2 * rstd[:, None]
        sums += dy * x
        sums2 += dy2 * x2
        if weight_hd is not None:
            dy, dy2 = dy * factor, dy2 * factor2
        tl.store(statistics_2rh + row, rstd, mask=valid)
        tl.store(statistics_2rh + r * (a + g) + row, (_exact_sum(dy * x, dy2 * x2) / count).to(tl.float32), mask=valid)
    if weight_hd is not None:
        LANES: tl.constexpr = 1 if SHARED else HEADS
        k = tl.arange(0, LANES) + (tl.program_id(0) if SHARED else before + head0)
        at = ((k * tl.num_programs(1) + tl.program_id(1)) * D)[:, None] + j[None, :]
        inside = (k >= 0 if SHARED else k < before + heads)[:, None] & columns
        sums = tl.sum(sums.reshape(TOKENS * HEADS // LANES, LANES, HALF).to(tl.float64), axis=0)
        sums2 = tl.sum(sums2.reshape(TOKENS * HEADS // LANES, LANES, HALF).to(tl.float64), axis=0)
        tl.store(partials_kpd + at, sums, mask=inside)
        tl.store(partials_kpd + D // 2 + at, sums2, mask=inside)


@cache
def _bound(kernel: TritonKernel, half: int, pairs: int, **constants: Any) -> tuple[BoundKernel, int]:
    """Return the kernel for heads with two halves, and the number of rows per program."""
    width = next_power_of_2(half)
    tile = max(1, pairs // width)
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    return kernel.bind(**constants, D=2 * half, ROWS=tile, HALF=width, **options), tile


@cache
def _bound_gradient(half: int, groups: int, shared: bool, zero_centered: bool) -> tuple[BoundKernel, int, int]:
    """Return `norm_grad_kernel` for heads with two halves, and the numbers of tokens and heads per program."""
    width = next_power_of_2(half)
    rows = max(1, _GRADIENT_PAIRS // width)
    heads = min(rows, _HEADS, next_power_of_2(groups))
    tokens = rows // heads
    kernel = norm_grad_kernel.bind(
        SHARED=shared, ZERO_CENTERED=zero_centered, D=2 * half, TOKENS=tokens, HEADS=heads, TILES=_TILES,
        STAGES=_STAGES, HALF=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return kernel, tokens * _TILES, heads


def rotate_qkv_(qkv_sbc: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the q and k heads of `qkv_sbc` in place and return it.

    `qkv_sbc` `[s, b, (a + 2g)·d]`, contiguous bf16 or fp32, is [q heads | k heads | v heads]; `num_heads` is a. `cos`
    and `sin` are fp32 `[s, 1 or b, 1, d/2]` in one layout, contiguous in the last dim. Autograd does not notice the
    change.
    """
    d = 2 * cos.shape[-1]
    groups = (qkv_sbc.shape[2] // d - num_heads) // 2
    heads = num_heads + groups
    assert qkv_sbc.shape[2] == (heads + groups) * d, f"not {num_heads} q heads of {d}, and k and v heads"
    target = kernel_input(qkv_sbc)
    _launch(target, target, heads, cos, sin)
    if target is not qkv_sbc:
        qkv_sbc.copy_(target)
    return qkv_sbc


def rotate_heads(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the contiguous heads `x_sbad`, of 16 or 32 bits, rotated; `cos` and `sin` are as in `rotate_qkv_`."""
    x_sbc = kernel_input(x_sbad.flatten(2))
    out_sbc = torch.empty_like(x_sbc)
    _launch(x_sbc, out_sbc, x_sbad.shape[2], cos, sin)
    return out_sbc.to(x_sbad.dtype).view_as(x_sbad)


def norm_and_rotate(
    qkv_sbc: Tensor, heads: int, cos: Tensor, sin: Tensor, weight_hd: Tensor | None, eps: float,
    rstd_rh: Tensor | None = None, *, zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the first `heads` heads of `qkv_sbc`, normalized and rotated, `[s, b, h, d]`, and `rstd_rh`.

    `rstd_rh` holds the reciprocal root mean squares, fp32; None computes them for each head. `weight_hd` is contiguous,
    of 16 or 32 bits; None means a constant one. The other arguments are as in `rotate_qkv_`.
    """
    s, b, _ = qkv_sbc.shape
    d, norm = 2 * cos.shape[-1], "heads" if rstd_rh is None else "given"
    x_sbc, weight_hd = kernel_input(qkv_sbc), None if weight_hd is None else kernel_input(weight_hd)
    out_sbc = x_sbc.new_empty(s, b, heads * d)
    if rstd_rh is None:
        rstd_rh = torch.empty(s * b, heads, dtype=torch.float32, device=x_sbc.device)
    _launch(x_sbc, out_sbc, heads, cos, sin, norm, rstd_rh, weight_hd, eps, zero_centered=zero_centered)
    return out_sbc.to(qkv_sbc.dtype).view(s, b, heads, d), rstd_rh


def square_means(qkv_sbc: Tensor, heads: int, d: int, count: int) -> Tensor:
    """Return the sum of squares of each of the first `heads` heads, divided by `count`, `[r, h]` fp32."""
    x_rc = kernel_input(qkv_sbc).flatten(0, 1)
    rows = len(x_rc) * heads
    means_rh = torch.empty(len(x_rc), heads, dtype=torch.float32, device=x_rc.device)
    if rows:
        kernel, tile = _bound(square_means_kernel, d // 2, _NORM_PAIRS)
        kernel.launch((ceil_div(rows, tile), 1), (x_rc, means_rh), (rows, x_rc.shape[1], heads, count))
    return means_rh


def head_gradients(
    dq_sbad: Tensor, dk_sbgd: Tensor, qkv_sbc: Tensor, rstd_rh: Tensor, weight_hd: Tensor | None, cos: Tensor,
    sin: Tensor, count: int, *, shared: bool, zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `norm_reference.head_gradients`, with the gradients of weights as float64 partial sums for q and for k.

    With `shared`, all q heads share one weight, and all k heads share another: the partial sums are `[p, d]`. Otherwise
    they are `[a, p, d]` and `[g, p, d]`. dq and dk must be contiguous.
    """
    (s, b, a, d), g = dq_sbad.shape, dk_sbgd.shape[2]
    stride_s, stride_b = angle_strides(cos, sin, s, b)
    kernel, tokens, heads = _bound_gradient(d // 2, g, shared, zero_centered)
    r, programs = s * b, ceil_div(s * b, tokens)
    query_programs, key_programs = ceil_div(a, heads), ceil_div(g, heads)
    sizes = [query_programs, key_programs] if shared else [a, g]
    statistics_2rh = torch.empty(2, r, a + g, dtype=torch.float32, device=dq_sbad.device)
    partials_kpd = torch.empty(sum(sizes), programs, d, dtype=EXACT, device=dq_sbad.device)
    if r:
        x_sbc = kernel_input(qkv_sbc)
        assert x_sbc.is_contiguous()
        tensors = (
            kernel_input(dq_sbad), kernel_input(dk_sbgd), x_sbc, cos, sin, rstd_rh,
            None if weight_hd is None else kernel_input(weight_hd), statistics_2rh, partials_kpd,
        )  # fmt: skip
        numbers = (stride_s, stride_b, r, b, x_sbc.shape[2], a, g, count)
        kernel.launch((query_programs + key_programs, programs), tensors, numbers)
    q_partials, k_partials = (x.flatten(0, 1) if shared else x for x in partials_kpd.split_with_sizes(sizes))
    return statistics_2rh, q_partials, k_partials


def angle_strides(cos: Tensor, sin: Tensor, s: int, b: int) -> tuple[int, int]:
    """Return the strides of angles from one token and one sample to the next; 0 if samples share angles."""
    assert cos.dtype == sin.dtype == torch.float32
    stride_s, stride_b, _, stride_d = cos.stride()
    assert cos.stride() == sin.stride()
    assert stride_d == 1
    assert cos.shape == sin.shape == (s, cos.shape[1], 1, cos.shape[3])
    assert cos.shape[1] in (1, b)
    return stride_s, stride_b if cos.shape[1] == b else 0


def _launch(
    x_sbc: Tensor, out_sbc: Tensor, heads: int, cos: Tensor, sin: Tensor, norm: str = "",
    rstd_rh: Tensor | None = None, weight_hd: Tensor | None = None, eps: float = 0.0, *, zero_centered: bool = False,
) -> None:  # fmt: skip
    """Rotate the first `heads` heads."""
    (s, b, c), half = x_sbc.shape, cos.shape[-1]
    assert x_sbc.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert x_sbc.is_contiguous()
    strides = angle_strides(cos, sin, s, b)
    if out_sbc.numel():
        rows = s * b * heads
        pairs = _NORM_PAIRS if norm else _PAIRS
        kernel, tile = _bound(rotary_kernel, half, pairs, NORM=norm, ZERO_CENTERED=zero_centered)
        tensors = (x_sbc, out_sbc, cos, sin, rstd_rh, weight_hd)
        kernel.launch((ceil_div(rows, tile), 1), tensors, (*strides, rows, b, c, out_sbc.shape[2], heads, eps))
