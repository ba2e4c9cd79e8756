"""What lies between linear layers, fused with the cast that follows it: norm, SwiGLU, GELU and rotary embedding.

A linear layer that runs in FP8 wants its input as codes, rows and columns, and never looks at the bf16 values; so a
norm or an activation in front of it hands over the codes (`Quantized`) and the values are not stored at all. Backward
of an activation likewise leaves the gradient of the layer before it as codes in that layer's `QuantizedGradHandoff`.
In front of a
layer in high precision the same Functions compute the values, in x's dtype. Either can be handed over with what it is
made of, so that the layer need not keep it (`megafp8.ops.fusion`).

Kept for backward: the norm's input and a statistic of each row; the activation's input. What follows from those is
computed again in the kernel that needs it.

A bias in front of GELU is added within. Its gradient needs the values that the codes replace, so it is summed by a
kernel that computes them once more: reading twice still moves fewer bytes than writing the values would.

Shapes: r rows (tokens; all leading dims), c columns, f width of an activation; s sequence, b micro-batch, a query
heads, g key-value heads of width d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megafp8.fp8.quantizers import casts
from megafp8.fp8.sources import GELU, GELUGrad, Normalized, QKVGrad, Source, SwiGLU, SwiGLUGrad, rotate
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.ops import norm_reference as normalization
from megafp8.ops.fusion import Again, Computed, Input, InputCast, Quantized, QuantizedGradHandoff, again, carrier


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@dataclass
class _Handed:
    """How the next layer wants what a Function computes, and what the Function hands over beside a tensor.

    `remade`: that layer is to make its input again in backward.
    """

    cast: InputCast | None
    grad_enabled: bool  # torch itself says that gradients are needed within no_grad too
    remade: bool
    operand: QuantizedTensor | None = None
    again: Again | None = None

    def hand_over(self, source: Source, like: Tensor) -> Tensor:
        """The source's values shaped like `like` but for the last dim; or a carrier, its operand put here."""
        shape, cast = (*like.shape[:-1], source.shape[1]), self.cast
        by_values = cast is None or source.shape[0] % cast.shard_alignment != 0
        if self.remade and self.grad_enabled:
            self.again = again(source, None if cast is None or by_values else cast.quantizer)
        if cast is None or by_values:
            return casts(source).materialize(source).view(shape)
        columns = cast.columnwise and self.grad_enabled and not self.remade
        self.operand = cast.quantizer(source, rowwise=True, columnwise=columns)
        return carrier(like, shape)

    def result(self, y: Tensor) -> Input:
        if self.operand is not None:
            return Quantized(y, self.operand, self.again)
        return y if self.again is None else Computed(y, self.again)


def _gradient(source: Source, like: Tensor, slot: QuantizedGradHandoff | None) -> Tensor:
    """The source's values shaped like `like` but for the last dim; or a carrier, its operand put into `slot`."""
    shape = (*like.shape[:-1], source.shape[1])
    if slot is None:
        return casts(source).materialize(source).view(shape)
    slot.operand = slot.quantizer(source, rowwise=True, columnwise=True)
    return carrier(like, shape)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, slot: QuantizedGradHandoff | None, handed: _Handed) -> Tensor:
        x_rc, smoothing = _matrix(gate_up), None if handed.cast is None else handed.cast.smoothing
        if smoothing is not None:
            smoothing.note(SwiGLU(x_rc))
        scale_f = None if smoothing is None else smoothing.scale_f
        ctx.save_for_backward(gate_up, scale_f)
        ctx.slot = slot
        return handed.hand_over(SwiGLU(x_rc, scale_f), gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, scale_f = ctx.saved_tensors
        source = SwiGLUGrad(_matrix(gate_up), _matrix(dy), scale_f)
        return _gradient(source, gate_up, ctx.slot), None, None


def swiglu(
    gate_up: Tensor, cast: InputCast | None, slot: QuantizedGradHandoff | None, *, remade: bool = False
) -> Input:
    """`silu(gate) · up` of `[..., 2f]`: values `[..., f]`, or codes where the layer that takes them has a `cast`.

    `slot`: where the layer that made `gate_up`, its only other user, looks for the gradient. `remade`: the layer that
    takes them makes them again in backward.
    """
    handed = _Handed(cast, torch.is_grad_enabled(), remade)
    return handed.result(_SwiGLU.apply(gate_up, slot, handed))


class _GELU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, slot: QuantizedGradHandoff | None, handed: _Handed) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.slot = slot
        return handed.hand_over(GELU(_matrix(x), bias), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        source = GELUGrad(_matrix(x), bias, dy_rc=_matrix(dy))
        dbias = casts(source).column_sums(source).to(bias.dtype) if ctx.needs_input_grad[1] else None
        return _gradient(source, x, ctx.slot), dbias, None, None


def gelu(
    x: Tensor, bias: Tensor | None, cast: InputCast | None, slot: QuantizedGradHandoff | None, *, remade: bool = False
) -> Input:
    """GELU's tanh form of x + bias, x `[..., f]`, bias `[f]`: values, or codes where the layer that takes them has a
    `cast`. `slot`, `remade`: as for `swiglu`."""
    handed = _Handed(cast, torch.is_grad_enabled(), remade)
    return handed.result(_GELU.apply(x, bias, slot, handed))


class _RotateAndSplit(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, slot: QuantizedGradHandoff | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.slot = slot
        d = 2 * cos.shape[-1]
        # The linear layer needs its output for nothing; were it kept by another, autograd would complain.
        increment_version(qkv_sbc)
        qkv_sbc = qkv_sbc.detach()
        if qkv_sbc.is_cuda and cos.dtype == torch.float32:
            from megafp8.kernels.rotary import rotate_qkv_  # needs Triton, which comes with torch's CUDA builds

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
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, slot: QuantizedGradHandoff | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q `[s, b, a, d]` and k `[s, b, g, d]`, turned, and v `[s, b, g, d]`, from the packed heads [q | k | v].

    They are views of `qkv_sbc`, which is overwritten. cos and sin are `[s, 1 or b, 1, d/2]`. `slot`: as for `swiglu`.
    """
    return _RotateAndSplit.apply(qkv_sbc, heads, groups, cos, sin, slot)


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, handed: _Handed
    ) -> tuple[Tensor, Tensor]:
        x_rc, branch_rc = _matrix(x), None if branch is None else _matrix(branch)
        total_rc, mean_r, rstd_r = _statistics(x_rc, branch_rc, eps, centered=bias is not None)
        source = Normalized(total_rc, rstd_r, weight, mean_r, bias)
        y = handed.hand_over(source, x)
        ctx.save_for_backward(total_rc, rstd_r, mean_r, weight)
        ctx.set_materialize_grads(False)
        return torch.ops.aten._unsafe_view(total_rc, x.shape), y  # what is a view, hooks of FSDP do not like

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total_rc, rstd_r, mean_r, weight = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return dtotal, dtotal if ctx.needs_input_grad[1] else None, *[None] * 4
        dresidual = None if dtotal is None else _matrix(dtotal)
        dx_rc, dweight, dbias = _backward(_matrix(dy), total_rc, mean_r, rstd_r, weight, dresidual)
        dx = dx_rc.view(dy.shape)
        dweight = dweight.to(weight.dtype)
        dbias = None if dbias is None else dbias.to(weight.dtype)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None, None


def _statistics(
    x_rc: Tensor, branch_rc: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    if x_rc.is_cuda and x_rc.dtype != torch.float64:
        from megafp8.kernels import norm as kernels

        return kernels.statistics(x_rc, branch_rc, eps, centered=centered)
    total_rc = x_rc if branch_rc is None else x_rc + branch_rc
    return total_rc, *normalization.statistics(total_rc, eps, centered=centered)


def _backward(
    dy_rc: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight: Tensor, dresidual_rc: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if x_rc.is_cuda and x_rc.dtype != torch.float64:
        from megafp8.kernels import norm as kernels

        return kernels.backward(dy_rc, x_rc, mean_r, rstd_r, weight, dresidual_rc)
    return normalization.backward(dy_rc, x_rc, mean_r, rstd_r, weight, dresidual_rc)


def norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, cast: InputCast | None, *,
    remade: bool = False,
) -> tuple[Tensor, Input]:  # fmt: skip
    """`x + branch` (x where there is no branch), and its norm over the last dim: values, or codes as `cast` says.

    RMSNorm without a bias, LayerNorm with one; weight and bias `[c]`. `remade`: as for `swiglu`.
    """
    handed = _Handed(cast, torch.is_grad_enabled(), remade)
    total, y = _Norm.apply(x, branch, weight, bias, eps, handed)
    return total, handed.result(y)
