"""What lies between linear layers, fused with the cast that follows it: norm, SwiGLU, GELU and rotary embedding.

A linear layer that runs in FP8 wants its input as codes, rows and columns, and never looks at the bf16 values; so a
norm or an activation in front of it hands over the codes (`Quantized`) and the values are not stored at all. Backward
of an activation likewise leaves the gradient of the layer before it as codes in that layer's `GradSlot`. In front of a
layer in high precision the same Functions compute the values, in x's dtype.

Kept for backward: the norm's input and a statistic of each row; the activation's input. What follows from those is
computed again in the kernel that needs it.

A bias in front of GELU is added within. Its gradient needs the values that the codes replace, so it is summed by a
kernel that computes them once more: reading twice still moves fewer bytes than writing the values would.

Shapes: r rows (tokens; all leading dims), c columns, f width of an activation; s sequence, b micro-batch, a query
heads, g key-value heads of width d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megafp8.fp8 import normalization
from megafp8.fp8.linear import GradSlot, InputCast, Quantized, carrier
from megafp8.fp8.matrix import Operand
from megafp8.fp8.quantizers import casts
from megafp8.fp8.sources import GELU, GELUGrad, Normalized, QKVGrad, Source, SwiGLU, SwiGLUGrad, rotate


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _hand_over(
    source: Source, like: Tensor, cast: InputCast | None, grad_enabled: bool, operands: list[Operand]
) -> Tensor:
    """The source's values shaped like `like` but for the last dim; or a carrier, its operand put into `operands`."""
    shape = (*like.shape[:-1], source.shape[1])
    if cast is None or source.shape[0] % cast.token_block:
        return casts(source).materialize(source).view(shape)
    operands.append(cast.quantizer(source, rows=True, columns=cast.columns and grad_enabled))
    return carrier(like, shape)


def _gradient(source: Source, like: Tensor, slot: GradSlot | None) -> Tensor:
    """The source's values shaped like `like` but for the last dim; or a carrier, its operand put into `slot`."""
    shape = (*like.shape[:-1], source.shape[1])
    if slot is None:
        return casts(source).materialize(source).view(shape)
    slot.operand = slot.quantizer(source, rows=True, columns=True)
    return carrier(like, shape)


def _quantized(y: Tensor, operands: list[Operand]) -> Tensor | Quantized:
    return Quantized(y, operands[0]) if operands else y


class _SwiGLU(Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, cast: InputCast | None, slot: GradSlot | None, operands: list[Operand],
        grad_enabled: bool,
    ) -> Tensor:  # fmt: skip
        x_rc, smoothing = _matrix(gate_up), None if cast is None else cast.smoothing
        if smoothing is not None:
            smoothing.note(SwiGLU(x_rc))
        scale_f = None if smoothing is None else smoothing.scale_f
        ctx.save_for_backward(gate_up, scale_f)
        ctx.slot = slot
        return _hand_over(SwiGLU(x_rc, scale_f), gate_up, cast, grad_enabled, operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, scale_f = ctx.saved_tensors
        source = SwiGLUGrad(_matrix(gate_up), _matrix(dy), scale_f)
        return _gradient(source, gate_up, ctx.slot), None, None, None, None


def swiglu(gate_up: Tensor, cast: InputCast | None, slot: GradSlot | None) -> Tensor | Quantized:
    """`silu(gate) · up` of `[..., 2f]`: values `[..., f]`, or codes where the layer that takes them has a `cast`.

    `slot`: where the layer that made `gate_up`, its only other user, looks for the gradient.
    """
    operands: list[Operand] = []
    return _quantized(_SwiGLU.apply(gate_up, cast, slot, operands, torch.is_grad_enabled()), operands)


class _GELU(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, cast: InputCast | None, slot: GradSlot | None,
        operands: list[Operand], grad_enabled: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, bias)
        ctx.slot = slot
        return _hand_over(GELU(_matrix(x), bias), x, cast, grad_enabled, operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        source = GELUGrad(_matrix(x), bias, dy_rc=_matrix(dy))
        dbias = casts(source).column_sums(source).to(bias.dtype) if ctx.needs_input_grad[1] else None
        return _gradient(source, x, ctx.slot), dbias, None, None, None, None


def gelu(x: Tensor, bias: Tensor | None, cast: InputCast | None, slot: GradSlot | None) -> Tensor | Quantized:
    """GELU's tanh form of x + bias, x `[..., f]`, bias `[f]`: values, or codes where the layer that takes them has a
    `cast`. `slot`: as for `swiglu`."""
    operands: list[Operand] = []
    return _quantized(_GELU.apply(x, bias, cast, slot, operands, torch.is_grad_enabled()), operands)


class _RotateAndSplit(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, slot: GradSlot | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.slot = slot
        d = 2 * cos.shape[-1]
        # The linear layer needs its output for nothing; were it kept by another, autograd would complain.
        increment_version(qkv_sbc)
        qkv_sbc = qkv_sbc.detach()
        if qkv_sbc.is_cuda and cos.dtype == torch.float32:
            from megafp8.fp8.kernels.rotary import rotate_qkv_  # needs Triton, which comes with torch's CUDA builds

            rotate_qkv_(qkv_sbc, heads, cos.squeeze(2), sin.squeeze(2))
        else:
            turned = qkv_sbc[..., : (heads + groups) * d].unflatten(-1, (-1, d))
            turned.copy_(rotate(turned, cos, sin))
        q, k, v = qkv_sbc.split([heads * d, groups * d, groups * d], dim=-1)
        return q.unflatten(-1, (-1, d)), k.unflatten(-1, (-1, d)), v.unflatten(-1, (-1, d))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        source = QKVGrad(dq.contiguous(), dk.contiguous(), dv.contiguous(), *ctx.saved_tensors)
        return _gradient(source, dq.flatten(2), ctx.slot), *[None] * 5


def rotate_and_split(
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, slot: GradSlot | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[s, b, a, d]` and k `[s, b, g, d]`, turned, and v `[s, b, g, d]`, from the packed heads [q | k | v].

    They are views of `qkv_sbc`, which is overwritten. cos and sin are `[s, 1 or b, 1, d/2]`. `slot`: as for `swiglu`.
    """
    return _RotateAndSplit.apply(qkv_sbc, heads, groups, cos, sin, slot)


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        cast: InputCast | None, operands: list[Operand], grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x_rc, branch_rc = _matrix(x), None if branch is None else _matrix(branch)
        total_rc, mean_r, rstd_r = _statistics(x_rc, branch_rc, eps, centered=bias is not None)
        source = Normalized(total_rc, rstd_r, weight, mean_r, bias)
        y = _hand_over(source, x, cast, grad_enabled, operands)
        ctx.save_for_backward(total_rc, rstd_r, mean_r, weight)
        ctx.set_materialize_grads(False)
        return total_rc.view(x.shape), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total_rc, rstd_r, mean_r, weight = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return dtotal, dtotal if ctx.needs_input_grad[1] else None, *[None] * 6
        dresidual = None if dtotal is None else _matrix(dtotal)
        dx_rc, dweight, dbias = _backward(_matrix(dy), total_rc, mean_r, rstd_r, weight, dresidual)
        dx = dx_rc.view(dy.shape)
        dweight = dweight.to(weight.dtype)
        dbias = None if dbias is None else dbias.to(weight.dtype)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None, None, None, None


def _statistics(
    x_rc: Tensor, branch_rc: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    if x_rc.is_cuda and x_rc.dtype != torch.float64:
        from megafp8.fp8.kernels import normalization as kernels

        return kernels.statistics(x_rc, branch_rc, eps, centered=centered)
    total_rc = x_rc if branch_rc is None else x_rc + branch_rc
    return total_rc, *normalization.statistics(total_rc, eps, centered=centered)


def _backward(
    dy_rc: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight: Tensor, dresidual_rc: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if x_rc.is_cuda and x_rc.dtype != torch.float64:
        from megafp8.fp8.kernels import normalization as kernels

        return kernels.backward(dy_rc, x_rc, mean_r, rstd_r, weight, dresidual_rc)
    return normalization.backward(dy_rc, x_rc, mean_r, rstd_r, weight, dresidual_rc)


def norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, cast: InputCast | None
) -> tuple[Tensor, Tensor | Quantized]:
    """`x + branch` (x where there is no branch), and its norm over the last dim: values, or codes as `cast` says.

    RMSNorm without a bias, LayerNorm with one; weight and bias `[c]`.
    """
    operands: list[Operand] = []
    total, y = _Norm.apply(x, branch, weight, bias, eps, cast, operands, torch.is_grad_enabled())
    return total, _quantized(y, operands)
