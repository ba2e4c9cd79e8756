"""SwiGLU and GELU, fused with the cast of their output and, in backward, of their input's gradient.

Kept for backward: the input. A bias in front of GELU is added within. Its gradient needs values that the FP8 data
replaces, so a kernel computes them once more and sums them: reading twice still moves fewer bytes than writing them.

Shapes: r rows (tokens; all leading dims), f width of the activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.fp8.linear_state import InputFormat, QuantizedGradHandoff
from megafp8.fp8.quantizers import casts
from megafp8.fp8.sources import GELU, GELUGrad, SwiGLU, SwiGLUGrad
from megafp8.ops.fusion import FusedOutput, LinearInput, as_matrix, fused_gradient


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, handoff: QuantizedGradHandoff | None, fused: FusedOutput) -> Tensor:
        x_rc, smoothing = as_matrix(gate_up), None if fused.format is None else fused.format.smoothing
        if smoothing is not None:
            smoothing.note(SwiGLU(x_rc))
        scale_f = None if smoothing is None else smoothing.scale_f
        ctx.save_for_backward(gate_up, scale_f)
        ctx.handoff = handoff
        return fused.compute(SwiGLU(x_rc, scale_f), gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, scale_f = ctx.saved_tensors
        source = SwiGLUGrad(as_matrix(gate_up), as_matrix(dy), scale_f)
        return fused_gradient(source, gate_up, ctx.handoff), None, None


def swiglu(gate_up: Tensor, form: InputFormat | None, handoff: QuantizedGradHandoff | None) -> Tensor | LinearInput:
    """`silu(gate) · up` of `[..., 2f]`: values `[..., f]`, or what the layer after it takes, as `form` says.

    `handoff`: where the layer that made `gate_up`, its only other user, takes the gradient.
    """
    fused = FusedOutput(form, torch.is_grad_enabled())
    return fused.result(_SwiGLU.apply(gate_up, handoff, fused))


class _GELU(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, handoff: QuantizedGradHandoff | None, fused: FusedOutput
    ) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.handoff = handoff
        return fused.compute(GELU(as_matrix(x), bias), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        source = GELUGrad(as_matrix(x), bias, dy_rc=as_matrix(dy))
        dbias = casts(source).column_sums(source).to(bias.dtype) if ctx.needs_input_grad[1] else None
        return fused_gradient(source, x, ctx.handoff), dbias, None, None


def gelu(
    x: Tensor, bias: Tensor | None, form: InputFormat | None, handoff: QuantizedGradHandoff | None
) -> Tensor | LinearInput:
    """GELU's tanh form of x + bias, x `[..., f]`, bias `[f]`. `form`, `handoff`: as for `swiglu`."""
    fused = FusedOutput(form, torch.is_grad_enabled())
    return fused.result(_GELU.apply(x, bias, handoff, fused))
