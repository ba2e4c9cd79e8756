"""Kernels for a short causal convolution with SiLU and optional normalization of heads, one pass in each direction.

Reference: `convolve` in `megafp8.layers.short_convolution.op`. Its PyTorch operations read and write the channels about
ten times; the forward kernel reads and writes them once. Forward saves only the inputs, and backward recomputes the
outputs. The input of a token affects the outputs of the next k - 1 tokens. So a program computes the gradients of the
outputs of a tile once, shifts them in shared memory, and sums them to input gradients. The gradients of the last k - 1
inputs of a tile also need outputs of the next tile. Tiles overlap by these tokens, and the next tile stores them.

A program computes some tokens and the channels of one head, or `_CHANNELS` channels if heads are not normalized. It
adds up the weight gradients over its tokens in fp32; PyTorch adds the sums of all programs in a fixed order.

Shapes: s sequence length, b micro-batch size, c channels of one part, k tokens that the convolution sees, t = k - 1.
"""

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
"""Channels of a program if heads are not normalized."""
_TILES = 2
"""Tiles of tokens per program in backward. Each program writes one row of partial weight gradients."""
_EPS = tl.constexpr(LENGTH_EPS)


@jit
def _inputs(x, last, first, back: tl.constexpr, token, channel, inside, sample, s, stride_s, stride_b, c,
            K: tl.constexpr):  # fmt: skip
    """Load the inputs `[T, C]` of `token` in fp32, from `last` before the sequence; 0 outside of both.

    All tokens are at least `first - back`.
    """
    in_part = ((token >= 0) & (token < s))[:, None] & inside[None, :]
    value = tl.load(x + token.to(tl.int64)[:, None] * stride_s + sample * stride_b + channel[None, :], mask=in_part,
                    other=0.0).to(tl.float32)  # fmt: skip
    if first < back:
        in_last = ((token >= 1 - K) & (token < 0))[:, None] & inside[None, :]
        value += tl.load(last + (sample * (K - 1) + token + K - 1)[:, None] * c + channel[None, :], mask=in_last,
                         other=0.0).to(tl.float32)  # fmt: skip
    return value


@jit
def _sum_before(x, last, weight, bias, starts, first, channel, inside, sample, b, s, stride_s, stride_b, c,
                K: tl.constexpr, DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Compute the convolution in fp32 at tokens `[T]` from `first` on; undefined outside the sequence."""
    token = first + tl.arange(0, T)
    total = tl.zeros((T, C), tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    seen = (token >= 0) & (token < s)
    for j in tl.static_range(K):
        earlier = token - j
        tap = tl.load(weight + channel * K + (K - 1 - j), mask=inside, other=0.0).to(tl.float32)
        value = _inputs(x, last, first, j, earlier, channel, inside, sample, s, stride_s, stride_b, c, K)
        if DOCUMENTS:
            value = tl.where(seen[:, None], value, 0.0)
            begins = tl.load(starts + earlier * b + sample, mask=(earlier >= 0) & (earlier < s), other=0)
            seen = seen & (begins == 0)
        total += tap[None, :] * value
    return total


@TritonKernel
def forward_kernel(x, last, weight, bias, starts, y, b, s, stride_s, stride_b, c, K: tl.constexpr,
                   DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
                   C: tl.constexpr):  # fmt: skip
    """Compute the outputs, in `[b, s, c]`, of T tokens and D channels, which are a head if heads are normalized."""
    tiles = tl.cdiv(s, T)
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    token = tile * T + tl.arange(0, T)
    j = tl.arange(0, C)
    channel = tl.program_id(1) * D + j
    inside = (j < D) & (channel < c)
    u = _sum_before(x, last, weight, bias, starts, tile * T, channel, inside, sample, b, s, stride_s, stride_b, c, K,
                    DOCUMENTS, BIAS, T, C)  # fmt: skip
    in_part = (token < s)[:, None] & inside[None, :]
    out = tl.where(in_part, u / (1 + tl.exp(-u)), 0.0)
    if NORM:
        out *= tl.rsqrt(tl.sum(out * out, axis=1) + _EPS)[:, None]
    tl.store(y + (sample.to(tl.int64) * s + token)[:, None] * c + channel[None, :], out.to(y.dtype.element_ty),
             mask=in_part)  # fmt: skip


@TritonKernel
def backward_kernel(x, last, weight, bias, starts, dy, dx, dlast, dweight, b, s, stride_s, stride_b, dx_stride_s,
                    dx_stride_b, c, K: tl.constexpr, DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                    D: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr,
                    ROWS: tl.constexpr):  # fmt: skip
    """Compute the input gradients of TILES tiles of T - K + 1 tokens, and this program's partial weight gradients.

    The tokens begin K - 1 before the first token, to include the last inputs of the earlier tokens. `dweight` is
    `[programs, K + 1, c]`, with the bias gradient in the last row.
    """
    OWN: tl.constexpr = T - K + 1
    programs = tl.cdiv(s + K - 1, OWN * TILES)
    sample, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    j = tl.arange(0, C)
    channel = tl.program_id(1) * D + j
    inside = (j < D) & (channel < c)
    i, row = tl.arange(0, T), tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, C), tl.float32)
    for tile in range(TILES):
        first = (program * TILES + tile) * OWN - (K - 1)
        token = first + i
        u = _sum_before(x, last, weight, bias, starts, first, channel, inside, sample, b, s, stride_s, stride_b, c, K,
                        DOCUMENTS, BIAS, T, C)  # fmt: skip
        in_part = ((token >= 0) & (token < s))[:, None] & inside[None, :]
        du = tl.load(dy + (sample.to(tl.int64) * s + token)[:, None] * c + channel[None, :], mask=in_part, other=0.0)
        du = du.to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-u))
        if NORM:
            y = tl.where(in_part, u * sigmoid, 0.0)
            r = tl.rsqrt(tl.sum(y * y, axis=1) + _EPS)
            du = r[:, None] * (du - y * (r * r * tl.sum(du * y, axis=1))[:, None])
        du = tl.where(in_part, du * sigmoid * (1 + u * (1 - sigmoid)), 0.0)
        value = _inputs(x, last, first, K - 1, token, channel, inside, sample, s, stride_s, stride_b, c, K)
        total = tl.zeros((T, C), tl.float32)
        seen = i < OWN
        if BIAS:
            counted = tl.where(seen[:, None], du, 0.0)
            sums += tl.where((row == K)[:, None], tl.sum(counted, axis=0)[None, :], 0.0)
        for k in range(K):
            if DOCUMENTS:
                later = token + k
                begins = tl.load(starts + later * b + sample, mask=(later >= 0) & (later < s) & (k > 0), other=0)
                seen = seen & (begins == 0)
            shifted = tl.gather(du, tl.broadcast_to(tl.minimum(i + k, T - 1)[:, None], T, C), 0)
            shifted = tl.where(seen[:, None], shifted, 0.0)
            tap = tl.load(weight + channel * K + (K - 1 - k), mask=inside, other=0.0).to(tl.float32)
            total += tap[None, :] * shifted
            sums += tl.where((row == K - 1 - k)[:, None], tl.sum(shifted * value, axis=0)[None, :], 0.0)
        own_tokens = (i < OWN)[:, None]
        tl.store(dx + token.to(tl.int64)[:, None] * dx_stride_s + sample * dx_stride_b + channel[None, :],
                 total.to(dx.dtype.element_ty), mask=in_part & own_tokens)  # fmt: skip
        if first < 0:
            in_last = (token < 0)[:, None] & inside[None, :] & own_tokens
            tl.store(dlast + (sample * (K - 1) + token + K - 1)[:, None] * c + channel[None, :],
                     total.to(dlast.dtype.element_ty), mask=in_last)  # fmt: skip
    at = (tl.program_id(0).to(tl.int64) * (K + 1) + row)[:, None] * c + channel[None, :]
    tl.store(dweight + at, sums, mask=(row <= K)[:, None] & inside[None, :])


def _tile(channels: int, k: int) -> tuple[int, int]:
    """Return the tokens of a tile, and the warps that compute it in backward.

    More tokens would not fit into registers. But tiles of backward overlap by k - 1 tokens, so there are at least 2k.
    """
    tokens, warps = (64 if channels <= 64 else 32), (4 if channels < 32 else 8 if channels <= 64 else 16)
    return max(tokens, next_power_of_2(2 * k)), warps


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
    tokens, _ = _tile(width, k)
    kernel = forward_kernel.bind(
        K=k, DOCUMENTS=starts_sb is not None, BIAS=bias_c is not None, NORM=norm, D=d, T=tokens, C=width, num_warps=4
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
    tokens, warps = _tile(width, k)
    programs = b * ceil_div(s + k - 1, (tokens - k + 1) * _TILES)
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
