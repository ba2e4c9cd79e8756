"""Rotary embedding: of the packed q, k and v in place, in backward fused with the cast of their gradient; or of heads.

Shapes: s sequence, b micro-batch, a query heads, g key-value heads of width d; c = (a + 2g)·d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version

from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import fused_gradient, runs_unfused
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.numerics.sources import QKVGrad, rotate


class _RotateAndSplit(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_sbc: Tensor,
        heads: int,
        groups: int,
        cos: Tensor,
        sin: Tensor,
        handoff: QuantizedGradHandoff | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.handoff = handoff
        # The linear layer needs its output for nothing; were it kept by another, autograd would complain.
        increment_version(qkv_sbc)
        qkv_sbc = qkv_sbc.detach()
        return _rotated_and_split(qkv_sbc, heads, groups, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        source = QKVGrad(dq.contiguous(), dk.contiguous(), dv.contiguous(), *ctx.saved_tensors)
        return fused_gradient(source, dq.shape[:2], dq, ctx.handoff), *[None] * 5


def rotate_and_split(
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, handoff: QuantizedGradHandoff | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[s, b, a, d]` and k `[s, b, g, d]`, rotated, and v `[s, b, g, d]`, from the packed heads [q | k | v].

    They are views of `qkv_sbc`, which is overwritten. cos and sin are `[s, 1 or b, 1, d/2]`. `handoff`: as for
    `swiglu`.
    """
    if runs_unfused(qkv_sbc):
        return _rotated_and_split(qkv_sbc, heads, groups, cos, sin)
    return _RotateAndSplit.apply(qkv_sbc, heads, groups, cos, sin, handoff)


def _rotated_and_split(
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of `qkv_sbc`, rotated in place."""
    d = 2 * cos.shape[-1]
    if qkv_sbc.is_cuda and cos.dtype == torch.float32:
        from megafp8.kernels.rotary import rotate_qkv_  # needs Triton, which comes with torch's CUDA builds

        rotate_qkv_(qkv_sbc, heads, cos, sin)
    else:
        rotated = qkv_sbc[..., : (heads + groups) * d].unflatten(-1, (-1, d))
        rotated.copy_(rotate(rotated, cos, sin))
    s, b, _ = qkv_sbc.shape
    q, k, v = qkv_sbc.view(s, b, heads + 2 * groups, d).split_with_sizes([heads, groups, groups], 2)
    return q, k, v


class _RotateHeads(Function):
    @staticmethod
    def forward(ctx: Any, x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_sbad, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dy_sbad, cos, -sin), None, None


def _rotated(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x_sbad.is_cuda and x_sbad.dtype != torch.float64 and cos.dtype == torch.float32:
        from megafp8.kernels import rotary  # needs Triton, which comes with torch's CUDA builds

        return rotary.rotate_heads(x_sbad.contiguous(), cos, sin)
    return rotate(x_sbad, cos, sin).to(x_sbad.dtype)


def rotate_heads(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[s, b, a, d]`, rotated; computed in fp32, or x's dtype if wider. cos and sin are `[s, 1 or b, 1, d/2]`."""
    return _RotateHeads.apply(x_sbad, cos, sin)
