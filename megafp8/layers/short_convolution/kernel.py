"""Kernels for a short causal convolution with SiLU and optional normalization of heads, one pass in each direction.

Reference: `convolve` in `megafp8.layers.short_convolution.op`. Its PyTorch operations read and write the channels about
ten times; the forward kernel reads and writes them once. Forward saves only the inputs, and backward recomputes the
outputs. The input of a token affects the outputs of the next k - 1 tokens. Each program recomputes the gradients of
these outputs, because this costs no memory traffic.

A program computes some tokens and the channels of one head. It adds up the weight gradients over its tokens in fp32;
PyTorch adds the sums of all programs in a fixed order.

Shapes: s sequence length, b micro-batch size, c channels of one part, k tokens that the convolution sees, t = k - 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from megafp8.kernels.arithmetic import ceil_div
from megafp8.kernels.launch import TritonKernel
from megafp8.kernels.limits import LENGTH_EPS

_TOKENS = 32
_TILES = 8
"""Tiles of tokens per program in backward. Each program writes one row of partial weight gradients."""
_EPS = tl.constexpr(LENGTH_EPS)


@jit
def _sum_before(x, last, weight, bias, starts, token, channel, inside, sample, b, s, stride_s, stride_b, c,
                K: tl.constexpr, DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Compute the convolution at tokens `[T]` of channels `[C]` in fp32; undefined outside the sequence."""
    total = tl.zeros((T, C), tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    seen = (token >= 0) & (token < s)
    for j in tl.static_range(K):
        earlier = token - j
        tap = tl.load(weight + channel * K + (K - 1 - j), mask=inside, other=0.0).to(tl.float32)
        in_part = (seen & (earlier >= 0))[:, None] & inside[None, :]
        in_last = (seen & (earlier < 0))[:, None] & inside[None, :]
        value = tl.load(x + earlier.to(tl.int64)[:, None] * stride_s + sample * stride_b + channel[None, :],
                        mask=in_part, other=0.0).to(tl.float32)  # fmt: skip
        if j > 0:
            value += tl.load(last + (sample * (K - 1) + earlier + K - 1)[:, None] * c + channel[None, :],
                             mask=in_last, other=0.0).to(tl.float32)  # fmt: skip
        total += tap[None, :] * value
        if DOCUMENTS:
            begins = tl.load(starts + earlier * b + sample, mask=(earlier >= 0) & (earlier < s), other=0)
            seen = seen & (begins == 0)
    return total


@jit
def _gradient_before(x, last, weight, bias, starts, dy, token, channel, inside, sample, b, s, stride_s, stride_b, c,
                     K: tl.constexpr, DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
                     T: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Compute the gradient of the convolution before SiLU at tokens `[T]` in fp32; 0 outside the sequence."""
    u = _sum_before(x, last, weight, bias, starts, token, channel, inside, sample, b, s, stride_s, stride_b, c, K,
                    DOCUMENTS, BIAS, T, C)  # fmt: skip
    inside_part = ((token >= 0) & (token < s))[:, None] & inside[None, :]
    gradient = tl.load(
        dy + (sample.to(tl.int64) * s + token)[:, None] * c + channel[None, :], mask=inside_part, other=0.0
    )
    gradient = gradient.to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-u))
    if NORM:
        y = tl.where(inside_part, u * sigmoid, 0.0)
        r = tl.rsqrt(tl.sum(y * y, axis=1) + _EPS)
        gradient = r[:, None] * (gradient - y * (r * r * tl.sum(gradient * y, axis=1))[:, None])
    return tl.where(inside_part, gradient * sigmoid * (1 + u * (1 - sigmoid)), 0.0)


@TritonKernel
def forward_kernel(x, last, weight, bias, starts, y, b, s, stride_s, stride_b, c, K: tl.constexpr,
                   DOCUMENTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
                   C: tl.constexpr):  # fmt: skip
    """Compute the outputs, in `[b, s, c]`, of T tokens and one head of D channels."""
    tiles = tl.cdiv(s, T)
    sample, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    token = tile * T + tl.arange(0, T)
    j = tl.arange(0, C)
    channel, inside = tl.program_id(1) * D + j, j < D
    u = _sum_before(x, last, weight, bias, starts, token, channel, inside, sample, b, s, stride_s, stride_b, c, K,
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
    """Compute the input gradients of TILES × T tokens, and this program's partial weight gradients.

    The tokens begin K - 1 before the first token, to include the last inputs of the earlier tokens. `dweight` is
    `[programs, K + 1, c]`, with the bias gradient in the last row.
    """
    programs = tl.cdiv(s + K - 1, T * TILES)
    sample, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    j = tl.arange(0, C)
    channel, inside = tl.program_id(1) * D + j, j < D
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, C), tl.float32)
    for tile in range(TILES):
        token = (program * TILES + tile) * T + tl.arange(0, T) - (K - 1)
        in_part = ((token >= 0) & (token < s))[:, None] & inside[None, :]
        in_last = (token < 0)[:, None] & inside[None, :]
        value = tl.load(x + token.to(tl.int64)[:, None] * stride_s + sample * stride_b + channel[None, :],
                        mask=in_part, other=0.0).to(tl.float32)  # fmt: skip
        value += tl.load(last + (sample * (K - 1) + token + K - 1)[:, None] * c + channel[None, :], mask=in_last,
                         other=0.0).to(tl.float32)  # fmt: skip
        total = tl.zeros((T, C), tl.float32)
        seen = token < s
        for k in tl.static_range(K):
            later = token + k
            if DOCUMENTS and k > 0:
                begins = tl.load(starts + later * b + sample, mask=(later >= 0) & (later < s), other=0)
                seen = seen & (begins == 0)
            du = _gradient_before(x, last, weight, bias, starts, dy, later, channel, inside, sample, b, s, stride_s,
                                  stride_b, c, K, DOCUMENTS, BIAS, NORM, T, C)  # fmt: skip
            if BIAS and k == 0:
                sums += tl.where((row == K)[:, None], tl.sum(du, axis=0)[None, :], 0.0)
            du = tl.where(seen[:, None], du, 0.0)
            tap = tl.load(weight + channel * K + (K - 1 - k), mask=inside, other=0.0).to(tl.float32)
            total += tap[None, :] * du
            sums += tl.where((row == K - 1 - k)[:, None], tl.sum(du * value, axis=0)[None, :], 0.0)
        tl.store(dx + token.to(tl.int64)[:, None] * dx_stride_s + sample * dx_stride_b + channel[None, :],
                 total.to(dx.dtype.element_ty), mask=in_part)  # fmt: skip
        tl.store(dlast + (sample * (K - 1) + token + K - 1)[:, None] * c + channel[None, :],
                 total.to(dlast.dtype.element_ty), mask=in_last)  # fmt: skip
    at = (tl.program_id(0).to(tl.int64) * (K + 1) + row)[:, None] * c + channel[None, :]
    tl.store(dweight + at, sums, mask=(row <= K)[:, None] & inside[None, :])


def _width(d: int) -> int:
    return 1 << (d - 1).bit_length()


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
    kernel = forward_kernel.bind(
        K=k, DOCUMENTS=starts_sb is not None, BIAS=bias_c is not None, NORM=norm, D=d, T=_TOKENS, C=_width(d),
        num_warps=4,
    )  # fmt: skip
    grid = b * ceil_div(s, _TOKENS), c // d
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
    programs = b * ceil_div(s + k - 1, _TOKENS * _TILES)
    sums = torch.empty(programs, k + 1, c, dtype=torch.float32, device=x_sbc.device)
    dlast_btc = torch.empty_like(last_btc)
    kernel = backward_kernel.bind(
        K=k, DOCUMENTS=starts_sb is not None, BIAS=bias_c is not None, NORM=norm, D=d, T=_TOKENS, TILES=_TILES,
        C=_width(d), ROWS=_width(k + 1), num_warps=4,
    )  # fmt: skip
    tensors = (x_sbc, last_btc, weight_ck, bias_c, starts_sb, dy_bsc, dx_sbc, dlast_btc, sums)
    kernel.launch((programs, c // d), tensors, (b, s, *x_sbc.stride()[:2], *dx_sbc.stride()[:2], c))
    total = sums.sum(0)
    return dlast_btc, total[:k].t(), total[k]
