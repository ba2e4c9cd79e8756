"""The three GEMMs of a linear layer, in FP8 or in high precision, as autograd Functions.

    fprop  y  = x8 · w8ᵀ
    dgrad  dx = dy8 · (w8ᵀ copy)ᵀ
    wgrad  dw = (dy8ᵀ copy) · (x8ᵀ copy)ᵀ

Tensor cores want FP8 operands row-major along the summed dim, so w, x and dy are each needed in both orientations. The
weight is quantized once an optimizer step and keeps both copies until `invalidate_weight`. The input is quantized
once; backward keeps its transposed FP8 copy, half the memory of bf16. Transposing FP8 rather than quantizing twice is
right because a tensor has one scale; on CUDA one kernel writes both copies in a single pass.

Each GEMM can be kept in high precision instead; then what it needs is kept unquantized.

A weight may have an attribute `grad_sink`, set by whoever gathers gradients: a callable that takes dw `[n, k]` in fp32
(or wider) and adds it to where it belongs. Autograd then sees no gradient for the weight, which spares a bf16 gradient
and its rounding. Without a sink, dw is returned in the weight's dtype.

Shapes: m tokens (all leading dims), k inputs, n outputs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.fp8.gemm import GemmBackend, fp8_gemm_tn, gemm
from megafp8.fp8.quantize import Fp8Matrix, Quantizer
from megafp8.fp8.recipe import PerGemm


class LinearOp(Protocol):
    """`x wᵀ + bias`: x `[..., k]`, weight `[n, k]`, bias `[n]` -> `[..., n]` in x's dtype."""

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor: ...


def high_precision_linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
    """The `LinearOp` that computes in x's dtype; a weight of another dtype is converted first."""
    y = _HighPrecisionLinear.apply(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


class Quantizers(NamedTuple):
    """How each operand of a layer is cast."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer


class Fp8Linear:
    """The `LinearOp` that computes in FP8 the GEMMs that `high_precision` does not claim.

    It belongs to one weight, whose FP8 copies it keeps from first use to `invalidate_weight`. Its quantizers come once
    all layers are known (`set_quantizers`).
    """

    def __init__(self, *, high_precision: PerGemm, fast_accum: PerGemm, backend: GemmBackend) -> None:
        self.high_precision, self.fast_accum, self.backend = high_precision, fast_accum, backend
        self._quantizers: Quantizers | None = None
        self._weight8: _Fp8Weight | None = None

    @property
    def quantizers(self) -> Quantizers:
        assert self._quantizers is not None, "call Fp8Manager.materialize(device) once the model is built"
        return self._quantizers

    def set_quantizers(self, quantizers: Quantizers) -> None:
        self._quantizers = quantizers

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
        y = _Fp8LinearFunction.apply(x, weight, self)
        return y if bias is None else y + bias.to(y.dtype)

    def weight8(self, weight: Tensor, transpose: bool) -> _Fp8Weight:
        """The FP8 copies of `weight`, made at the first call since the last `invalidate_weight`."""
        if self._weight8 is None:
            self._weight8 = _Fp8Weight(self.quantizers.weight(weight, transpose=transpose))
        return self._weight8

    def invalidate_weight(self) -> None:
        """Forget the FP8 copies: the weight has changed."""
        self._weight8 = None

    def gemm_tn(self, a: Fp8Matrix, b: Fp8Matrix, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
        return fp8_gemm_tn(
            a.data, a.scale_inv, b.data, b.scale_inv,
            out_dtype=out_dtype, use_fast_accum=use_fast_accum, backend=self.backend,
        )  # fmt: skip


class _Fp8Weight:
    """A weight `[n, k]` in FP8, and its transpose `[k, n]` once a backward has asked for it."""

    def __init__(self, rows_nk: Fp8Matrix) -> None:
        self.rows_nk = rows_nk

    @cached_property
    def rows_kn(self) -> Fp8Matrix:
        return self.rows_nk.t()


def _matrix(x: Tensor) -> Tensor:
    """`[..., c]` -> `[r, c]`, row-major."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _wgrad_dtype(weight: Tensor) -> torch.dtype:
    """What dtype `_deliver` wants dw in."""
    has_sink = getattr(weight, "grad_sink", None) is not None
    return torch.promote_types(weight.dtype, torch.float32) if has_sink else weight.dtype


def _deliver(weight: Tensor, dw_nk: Tensor) -> Tensor | None:
    """Give dw to the weight's sink and autograd nothing, or autograd dw."""
    sink = getattr(weight, "grad_sink", None)
    if sink is None:
        return dw_nk
    sink(dw_nk)
    return None


class _HighPrecisionLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        y_mn = gemm(_matrix(x), weight.to(x.dtype).t(), x.dtype)
        return y_mn.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy_mn = _matrix(dy)
        dx = dw = None
        if weight is not None:
            dx = gemm(dy_mn, weight.to(dy.dtype), dy.dtype).view(ctx.x_shape)
        if x is not None:
            dw = _deliver(ctx.weight, gemm(dy_mn.t(), _matrix(x), _wgrad_dtype(ctx.weight)))
        return dx, dw


class _Fp8LinearFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, op: Fp8Linear) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        high = op.high_precision
        x_mk = _matrix(x)
        x8: Fp8Matrix | None = None
        w8: _Fp8Weight | None = None
        if not high.fprop or (needs_dw and not high.wgrad):
            x8 = op.quantizers.input(x_mk, transpose=needs_dw and not high.wgrad)
        if not high.fprop or (needs_dx and not high.dgrad):
            w8 = op.weight8(weight, transpose=needs_dx and not high.dgrad)

        kept_x: Any = ()
        if needs_dw and high.wgrad:
            kept_x = (x_mk,)
        elif needs_dw:
            assert x8 is not None
            kept_x = (x8.t().data, x8.scale_inv)  # wgrad wants columns, nothing wants rows
        ctx.save_for_backward(weight if needs_dx and high.dgrad else None, *kept_x)
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        ctx.op, ctx.w8 = op, w8

        if high.fprop:
            y_mn = gemm(x_mk, weight.to(x.dtype).t(), x.dtype)
        else:
            assert x8 is not None
            assert w8 is not None
            y_mn = op.gemm_tn(x8, w8.rows_nk, x.dtype, op.fast_accum.fprop)
        return y_mn.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        op, high = ctx.op, ctx.op.high_precision
        weight, *kept_x = ctx.saved_tensors
        dy_mn = _matrix(dy)
        dx = dw = None
        if (needs_dx and not high.dgrad) or (needs_dw and not high.wgrad):
            dy8 = op.quantizers.grad_output(dy_mn, transpose=needs_dw and not high.wgrad)
        if needs_dx and high.dgrad:
            dx = gemm(dy_mn, weight.to(dy.dtype), dy.dtype)
        elif needs_dx:
            dx = op.gemm_tn(dy8, ctx.w8.rows_kn, dy.dtype, op.fast_accum.dgrad)
        if needs_dw:
            dtype = _wgrad_dtype(ctx.weight)
            if high.wgrad:
                dw = gemm(dy_mn.t(), kept_x[0], dtype)
            else:
                dw = op.gemm_tn(dy8.t(), Fp8Matrix(*kept_x), dtype, op.fast_accum.wgrad)
            dw = _deliver(ctx.weight, dw)
        return None if dx is None else dx.view(ctx.x_shape), dw, None
