"""Kernels for a short causal convolution with SiLU and optional normalization of heads, one pass in each direction.

Reference: `convolve` in `megafp8.layers.short_convolution.op`. Its PyTorch operations read and write the channels about
ten times; the forward kernel reads and writes them once. Forward saves only the inputs, and backward recomputes the
outputs.

A program computes some tokens and the channels of one head, or `_CHANNELS` channels if heads are not normalized. It
loads the channels of each token once and keeps them in registers, so that a token is a vector and the loop over tokens
is unrolled. The input of a token affects the outputs of the next k - 1 tokens. So backward also computes the gradients
of the k - 1 outputs after its tokens, which the next program computes again.

Each program adds up the weight gradients over its tokens in fp32. PyTorch adds the sums of all programs in a fixed
order.

Shapes: s sequence length, b micro-batch size, c channels of one part, k tokens that the convolution sees, t = k - 1.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples in kernels grow in unrolled loops.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from megafp8.kernels.arithmetic import ceil_div, next_power_of_2
from megafp8.kernels.launch import TritonKernel
from megafp8.kernels.limits import LENGTH_EPS

_CHANNELS = 64
"""Channels of a program if heads are not normalized. Each thread of a warp has two."""
_TILES = 8
"""Tiles of tokens per program in backward. Each program writes one row of partial weight gradients."""
_EPS = tl.constexpr(LENGTH_EPS)


@jit
def _within(token, low, high, inside):
    """Return the mask of the channels `inside`, which is empty unless low <= token < high.

    Triton's interpreter (3.9) cannot combine a boolean scalar with a mask.
    """
    tokens = tl.full(inside.shape, token, tl.int32)
    return inside & (tokens >= low) & (tokens < high)


@jit
def _inputs(x, last, first, channel, inside, sample, s, stride_s, stride_b, c, K: tl.constexpr, T: tl.constexpr):
    """Load the inputs `[C]` of T tokens from `first` on in fp32, from `last` before the sequence; 0 outside of both."""
    values = ()
    for i in tl.static_range(T):
        token = first + i
        row = tl.where(
            token < 0,
            last + (sample * (K - 1) + token + K - 1) * c,
            x + token.to(tl.int64) * stride_s + sample * stride_b,
        )
        mask = _within(token, 1 - K, s, inside)
        values = values + (tl.load(row + channel, mask=mask, other=0.0).to(tl.float32),)
    return values


@jit
def _begins(starts, first, sample, b, s, DOCUMENTS: tl.constexpr, T: tl.constexpr):
    """Load whether T tokens from `first` on begin a document."""
    values = ()
    for i in tl.static_range(T):
        begins = False
        if DOCUMENTS:
            token = first + i
            begins = tl.load(starts + token * b + sample, mask=(token >= 0) & (token < s), other=0) != 0
        values = values + (begins,)
    return values


@jit
def _taps(weight, channel, inside, K: tl.constexpr):
    """Load the weights `[C]` in fp32; the last is for the current token."""
    values = ()
    for k in tl.static_range(K):
        values = values + (tl.load(weight + channel * K + k, mask=inside, other=0.0).to(tl.float32),)
    return values


@jit
def _sum_before(values, begins, taps, bias, i: tl.constexpr, K: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Compute the convolution in fp32 at token i of `values`, before which are K - 1 others."""
    total = bias + taps[K - 1] * values[i]
    seen = True
    for k in tl.static_range(1, K):
        value = values[i - k]
        if DOCUMENTS:
            seen = seen & (not begins[i - k + 1])
            value = tl.where(seen, value, 0.0)
        total += taps[K - 1 - k] * value
    return total


@TritonKernel
def forward_kernel(x, last, weight, bias, starts, y, b, s, stride_s, stride_b, c, K: tl.constexpr,
                   DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
                   C: tl.constexpr):  # fmt: skip
    """Compute the outputs, in `[b, s, c]`, of T tokens and D channels, which are a head if heads are normalized."""
    tiles = tl.cdiv(s, T)
    sample, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T
    j = tl.arange(0, C)
    channel = tl.program_id(1) * D + j
    inside = (j < D) & (channel < c)
    before: tl.constexpr = K - 1
    added = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
    taps = _taps(weight, channel, inside, K)
    values = _inputs(x, last, first - before, channel, inside, sample, s, stride_s, stride_b, c, K, T + before)
    begins = _begins(starts, first - before, sample, b, s, DOCUMENTS, T + before)
    for i in tl.static_range(T):
        u = _sum_before(values, begins, taps, added, i + before, K, DOCUMENTS)
        out = tl.where(inside, u / (1 + tl.exp(-u)), 0.0)
        if NORM:
            out *= tl.rsqrt(tl.sum(out * out, axis=0) + _EPS)
        tl.store(y + (sample.to(tl.int64) * s + first + i) * c + channel, out.to(y.dtype.element_ty),
                 mask=_within(first + i, 0, s, inside))  # fmt: skip


@TritonKernel
def backward_kernel(x, last, weight, bias, starts, dy, dx, dlast, dweight, b, s, stride_s, stride_b, dx_stride_s,
                    dx_stride_b, c, K: tl.constexpr, DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                    D: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr,
                    ROWS: tl.constexpr):  # fmt: skip
    """Compute the input gradients of TILES × T tokens, and this program's partial weight gradients.

    The tokens begin K - 1 before the first token, to include the last inputs of the earlier tokens. `dweight` is
    `[programs, K + 1, c]`, with the bias gradient in the last row.
    """
    programs = tl.cdiv(s + K - 1, T * TILES)
    sample, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    j, row = tl.arange(0, C), tl.arange(0, ROWS)
    channel = tl.program_id(1) * D + j
    inside = (j < D) & (channel < c)
    before: tl.constexpr = K - 1
    added = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
    taps = _taps(weight, channel, inside, K)
    sums = tl.zeros((ROWS, C), tl.float32)
    for tile in range(TILES):
        first = (program * TILES + tile) * T - before
        values = _inputs(x, last, first - before, channel, inside, sample, s, stride_s, stride_b, c, K, T + 2 * before)
        begins = _begins(starts, first - before, sample, b, s, DOCUMENTS, T + 2 * before)
        gradients = ()  # before SiLU
        for i in tl.static_range(T + before):
            token = first + i
            exists = _within(token, 0, s, inside)
            u = _sum_before(values, begins, taps, added, i + before, K, DOCUMENTS)
            du = tl.load(dy + (sample.to(tl.int64) * s + token) * c + channel, mask=exists, other=0.0).to(tl.float32)
            sigmoid = 1 / (1 + tl.exp(-u))
            if NORM:
                y = tl.where(exists, u * sigmoid, 0.0)
                r = tl.rsqrt(tl.sum(y * y, axis=0) + _EPS)
                du = r * (du - y * (r * r * tl.sum(du * y, axis=0)))
            gradients = gradients + (tl.where(exists, du * sigmoid * (1 + u * (1 - sigmoid)), 0.0),)
        products = ()  # of each weight
        for _k in tl.static_range(K + BIAS):
            products = products + (tl.zeros((C,), tl.float32),)
        for i in tl.static_range(T):
            token, total, seen = first + i, taps[K - 1] * gradients[i], True
            added_products = (products[0] + values[i + before] * gradients[i],)
            for k in tl.static_range(1, K):
                du = gradients[i + k]
                if DOCUMENTS:
                    seen = seen & (not begins[i + before + k])
                    du = tl.where(seen, du, 0.0)
                total += taps[K - 1 - k] * du
                added_products = added_products + (products[k] + values[i + before] * du,)
            if BIAS:
                added_products = added_products + (products[K] + gradients[i],)
            products = added_products
            target = tl.where(
                token < 0,
                dlast + (sample * before + token + before) * c,
                dx + token.to(tl.int64) * dx_stride_s + sample * dx_stride_b,
            )
            tl.store(target + channel, total.to(dx.dtype.element_ty), mask=_within(token, 1 - K, s, inside))
        for k in tl.static_range(K):
            sums += tl.where((row == K - 1 - k)[:, None], products[k][None, :], 0.0)
        if BIAS:
            sums += tl.where((row == K)[:, None], products[K][None, :], 0.0)
    at = (tl.program_id(0).to(tl.int64) * (K + 1) + row)[:, None] * c + channel[None, :]
    tl.store(dweight + at, sums, mask=(row <= K)[:, None] & inside[None, :])


def _tile(channels: int) -> tuple[int, int]:
    """Return the tokens of a tile, which are all in registers, and the warps that compute it."""
    return (16 if channels <= 64 else 8), max(1, channels // 128)


class ConvolutionInputs(NamedTuple):
    """Inputs of the forward and backward kernels. All tensors except `x_sbc` are contiguous."""

    x_sbc: Tensor
    """Inputs of the tokens, contiguous in the last dim."""
    weight_ck: Tensor
    """Weights of the convolution."""
    last_btc: Tensor
    """Inputs of the t tokens before the first."""
    starts_sb: Tensor | None
    """Tokens that begin a document and see no earlier tokens, int8; None if none does."""
    bias_c: Tensor | None
    """Bias of each channel, or None."""


def forward(inputs: ConvolutionInputs, d: int, *, norm: bool) -> Tensor:
    """Return the outputs `[b, s, c]`, contiguous. With `norm`, heads of d channels are normalized to length 1."""
    x_sbc, weight_ck, last_btc, starts_sb, bias_c = inputs
    (s, b, c), k = x_sbc.shape, weight_ck.shape[1]
    y_bsc = x_sbc.new_empty(b, s, c)
    d = d if norm else _CHANNELS
    width = next_power_of_2(d)
    tokens, warps = _tile(width)
    kernel = forward_kernel.bind(
        K=k, DOCUMENTS=starts_sb is not None, BIAS=bias_c is not None, NORM=norm, D=d, T=tokens, C=width,
        num_warps=warps,
    )  # fmt: skip
    grid = b * ceil_div(s, tokens), ceil_div(c, d)
    kernel.launch(grid, (x_sbc, last_btc, weight_ck, bias_c, starts_sb, y_bsc), (b, s, *x_sbc.stride()[:2], c))
    return y_bsc


def backward(
    inputs: ConvolutionInputs, d: int, dy_bsc: Tensor, dx_sbc: Tensor, *, norm: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Write the input gradient to `dx_sbc`, and return the other gradients. `dy_bsc` is contiguous.

    Returns:
        Gradients of the last inputs `[b, t, c]`, of the weight `[c, k]` in fp32, and of the bias `[c]` in fp32.
    """
    x_sbc, weight_ck, last_btc, starts_sb, bias_c = inputs
    (s, b, c), k = x_sbc.shape, weight_ck.shape[1]
    d = d if norm else _CHANNELS
    width = next_power_of_2(d)
    tokens, warps = _tile(width)
    programs = b * ceil_div(s + k - 1, tokens * _TILES)
    sums = torch.empty(programs, k + 1, c, dtype=torch.float32, device=x_sbc.device)
    dlast_btc = torch.empty_like(last_btc)
    kernel = backward_kernel.bind(
        K=k, DOCUMENTS=starts_sb is not None, BIAS=bias_c is not None, NORM=norm, D=d, T=tokens, TILES=_TILES,
        C=width, ROWS=next_power_of_2(k + 1), num_warps=warps,
    )  # fmt: skip
    tensors = (x_sbc, last_btc, weight_ck, bias_c, starts_sb, dy_bsc, dx_sbc, dlast_btc, sums)
    kernel.launch((programs, ceil_div(c, d)), tensors, (b, s, *x_sbc.stride()[:2], *dx_sbc.stride()[:2], c))
    total = sums.sum(0)
    return dlast_btc, total[:k].t(), total[k]
