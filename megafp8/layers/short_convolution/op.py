"""Causal convolution over a few tokens in each channel, before a recurrence, with SiLU and normalization of heads.

On a GPU, `megafp8.layers.short_convolution.kernel` computes all of this in one pass. On other devices, in fp64, and for
convolutions over many tokens, PyTorch's operations compute it.

Shapes: s sequence length, b micro-batch size, n channels, divided into parts of c channels; k tokens that the
convolution sees, t = k - 1 tokens before the current one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megafp8.kernels.limits import LENGTH_EPS
from megafp8.numerics.implementations import has_kernel, triton_module

if TYPE_CHECKING:
    from megafp8.layers.short_convolution.kernel import ConvolutionInputs

_kernels = triton_module("megafp8.layers.short_convolution.kernel")
_KERNEL_TOKENS = 8
"""Longest convolution that the kernels compute. Their loops over its tokens are unrolled; 40 compile in minutes."""


class ChannelGroup(NamedTuple):
    """Channels that the recurrence reads as one tensor.

    Args:
        heads: Number of heads.
        width: Channels of a head.
        norm: Whether each head is normalized to length 1.
    """

    heads: int
    width: int
    norm: bool = False


def convolve(
    x_sbn: Tensor, weight_nk: Tensor, last_btn: Tensor, starts_sb: Tensor | None, bias_n: Tensor | None = None
) -> Tensor:
    """Compute the causal convolution of each channel.

    Args:
        x_sbn: Inputs.
        weight_nk: Weights; the last one is for the current token.
        last_btn: Inputs of the t tokens before these.
        starts_sb: Tokens that begin a document and see no earlier tokens, bool.
        bias_n: Bias of each channel.

    Returns:
        Outputs `[s, b, n]`.
    """
    s, t = len(x_sbn), weight_nk.shape[1] - 1
    padded = torch.cat([last_btn.transpose(0, 1).to(x_sbn.dtype), x_sbn])
    document = None
    if starts_sb is not None:
        document = F.pad(starts_sb.cumsum(0), (0, 0, t, 0))
    y_sbn = x_sbn * weight_nk[:, t]
    for back in range(1, t + 1):
        earlier = padded[t - back : t - back + s]
        if document is not None:
            earlier = earlier * (document[t - back : t - back + s] == document[t:]).unsqueeze(-1)
        y_sbn = y_sbn + earlier * weight_nk[:, t - back]
    return y_sbn if bias_n is None else y_sbn + bias_n


def last_inputs(x_sbn: Tensor, t: int, last_btn: Tensor, starts_sb: Tensor | None) -> Tensor:
    """Return the last inputs `[b, t, n]`, which later tokens see, with zeros for tokens of earlier documents."""
    s = len(x_sbn)
    last = x_sbn[s - t :] if s >= t else torch.cat([last_btn.transpose(0, 1)[s:].to(x_sbn.dtype), x_sbn])
    if starts_sb is not None:
        document = F.pad(starts_sb[max(0, s - t) :].cumsum(0), (0, 0, max(0, t - s), 0))
        last = last * (document == document[-1]).unsqueeze(-1)
    return last.transpose(0, 1)


def convolve_parts(
    x_sbn: Tensor, weight_nk: Tensor, last_btn: Tensor, starts_sb: Tensor | None, parts: Sequence[ChannelGroup],
    bias_n: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute SiLU of `convolve` and split it into parts.

    Heads of parts with `norm` are divided by their length, √(Σx² + 1e-6). A part that a kernel wrote is
    `[b, s, heads, width]` in memory.

    Returns:
        A tensor `[s, b, heads, width]` for each part.
    """
    assert sum(part.heads * part.width for part in parts) == x_sbn.shape[2]
    if has_kernel(x_sbn) and x_sbn.stride(-1) == 1 and weight_nk.shape[1] <= _KERNEL_TOKENS:
        return _Convolved.apply(x_sbn, weight_nk, last_btn, starts_sb, bias_n, tuple(parts))
    y_sbn = F.silu(convolve(x_sbn, weight_nk, last_btn, starts_sb, bias_n))
    outputs = []
    for y, part in zip(y_sbn.split([part.heads * part.width for part in parts], dim=-1), parts, strict=True):
        heads = y.unflatten(-1, (part.heads, part.width))
        outputs.append(_of_length_one(heads) if part.norm else heads)
    return tuple(outputs)


def _of_length_one(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()).to(x.dtype)


class _Convolved(Function):
    @staticmethod
    def forward(
        ctx: Any, x_sbn: Tensor, weight_nk: Tensor, last_btn: Tensor, starts_sb: Tensor | None, bias_n: Tensor | None,
        parts: tuple[ChannelGroup, ...],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        last_btn = last_btn.to(x_sbn.dtype)
        ctx.save_for_backward(x_sbn, weight_nk, last_btn, starts_sb, bias_n)
        ctx.parts = parts
        outputs = []
        for part, inputs in zip(parts, _inputs(parts, x_sbn, weight_nk, last_btn, starts_sb, bias_n), strict=True):
            y_bsc = _kernels().forward(inputs, part.width, norm=part.norm)
            outputs.append(y_bsc.unflatten(-1, (part.heads, part.width)).transpose(0, 1))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_sbn, weight_nk, last_btn, starts_sb, bias_n = ctx.saved_tensors
        dx_sbn = torch.empty_like(x_sbn, memory_format=torch.contiguous_format)
        widths = [part.heads * part.width for part in ctx.parts]
        dparts = []
        inputs = _inputs(ctx.parts, x_sbn, weight_nk, last_btn, starts_sb, bias_n)
        for part, part_inputs, dy, dx in zip(ctx.parts, inputs, dys, dx_sbn.split(widths, dim=-1), strict=True):
            dy_bsc = dy.transpose(0, 1).flatten(-2).contiguous()
            dparts.append(_kernels().backward(part_inputs, part.width, dy_bsc, dx, norm=part.norm))
        dlast, dweight, dbias = zip(*dparts, strict=True)
        bias = None if bias_n is None else torch.cat(dbias).to(bias_n.dtype)
        return dx_sbn, torch.cat(dweight).to(weight_nk.dtype), torch.cat(dlast, dim=-1), None, bias, None


def _inputs(
    parts: Sequence[ChannelGroup], x_sbn: Tensor, weight_nk: Tensor, last_btn: Tensor, starts_sb: Tensor | None,
    bias_n: Tensor | None,
) -> list[ConvolutionInputs]:  # fmt: skip
    """Return the kernel inputs of each part."""
    widths = [part.heads * part.width for part in parts]
    starts = None if starts_sb is None else starts_sb.to(torch.int8).contiguous()
    biases = [None] * len(parts) if bias_n is None else bias_n.split(widths)
    return [
        _kernels().ConvolutionInputs(x, weight.contiguous(), last.contiguous(), starts, bias)
        for x, weight, last, bias in zip(
            x_sbn.split(widths, dim=-1), weight_nk.split(widths), last_btn.split(widths, dim=-1), biases, strict=True
        )
    ]
