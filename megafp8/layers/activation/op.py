"""Activations, fused with the cast of their output and, in backward, with the cast of the input gradient.

Forward saves the input for backward. The kernel also adds the bias before an ungated activation. The bias gradient
needs the gradient's values, but the kernel writes only their FP8 data. A second pass therefore recomputes and sums the
values: reading the inputs twice moves fewer bytes than writing the values.

xIELU has no kernel: PyTorch's ops compute it in fp32 or wider, from the input alone in backward.

Shapes: r rows (tokens; all leading dims), f width of the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megafp8.layers.activation import reference
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import FusedOutput, LinearInput, as_matrix, fused_gradient, runs_unfused
from megafp8.linear.state import InputFormat, QuantizedGradHandoff
from megafp8.numerics.quantizers import casts
from megafp8.numerics.sources import ACTIVATION_SOURCES


def _gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate).mul_(up)


_gelu_tanh = partial(F.gelu, approximate="tanh")
_OF_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": partial(_gated, F.silu),
    "geglu_tanh": partial(_gated, _gelu_tanh),
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square_(),
}
"""Activations made of PyTorch's ops, in the dtype of the input; used if `runs_unfused`."""


def _given(bias: Tensor | None) -> tuple[Tensor, ...]:
    """Return the bias as arguments of a source: none without a bias, since gated sources take no bias."""
    return () if bias is None else (bias,)


class _Activation(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, kind: str, handoff: QuantizedGradHandoff | None, fused: FusedOutput
    ) -> Tensor:
        source, ctx.gradient_source = ACTIVATION_SOURCES[kind]
        ctx.save_for_backward(x, bias)
        ctx.handoff = handoff
        return fused.compute(source(as_matrix(x), *_given(bias)), x.shape[:-1], x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        source = ctx.gradient_source(as_matrix(x), as_matrix(dy), *_given(bias))
        dbias = casts(source).column_sums(source).to(bias.dtype) if ctx.needs_input_grad[1] else None
        return fused_gradient(source, x.shape[:-1], x, ctx.handoff), dbias, None, None, None


def activation(
    kind: str, x: Tensor, bias: Tensor | None, form: InputFormat | None, handoff: QuantizedGradHandoff | None
) -> Tensor | LinearInput:
    """Compute an activation, fused with the cast of its output if the next layer takes quantized input.

    Args:
        kind: Name of the activation in `megafp8.layers.activation.record.ACTIVATIONS`.
        x: `[gate | up]`, `[..., 2f]`, if the activation is gated; otherwise `[..., f]`.
        bias: Bias `[f]` added to `x`, only for activations that are not gated.
        form: Input format of the next layer; None for values.
        handoff: Handoff that passes a quantized gradient to the layer that computed `x`; None to pass values. No other
            operation may use `x`.

    Returns:
        The activation `[..., f]` in the format `form`.
    """
    if form is None and kind in _OF_TORCH and runs_unfused(x):
        return _OF_TORCH[kind](x if bias is None else x + bias)
    fused = FusedOutput(form, torch.is_grad_enabled())
    return fused.result(_Activation.apply(x, bias, kind, handoff, fused))


class _Xielu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        return reference.xielu(_widened(x), _widened(alpha_p), _widened(alpha_n)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved = ctx.saved_tensors
        x, alpha_p, alpha_n, dy = map(_widened, (*saved, dy))
        positive = x > 0
        dp = dy.mul(x).mul_(x).masked_fill_(~positive, 0.0).sum().mul(alpha_p.sigmoid())
        exponential = torch.expm1(x.clamp(max=reference.EPS))
        dn = (exponential - x).mul_(dy).masked_fill_(positive, 0.0).sum().mul(alpha_n.sigmoid())
        exponential.masked_fill_(x > reference.EPS, -1.0).mul_(reference.BETA + F.softplus(alpha_n))
        slope = torch.where(positive, x.mul(2 * F.softplus(alpha_p)), exponential).add_(reference.BETA)
        dx, dp, dn = (gradient.to(t.dtype) for gradient, t in zip((slope.mul_(dy), dp, dn), saved, strict=True))
        return dx, dp, dn


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Compute xIELU (`reference.xielu`) of `x` `[..., f]`, in its dtype."""
    activated: Tensor = _Xielu.apply(x, alpha_p, alpha_n)
    return activated
