"""Linear layer with fp32 output and an input and weight that may have 16 bits; used by the router.

The product of two bf16 numbers is exact in fp32, and tensor cores accumulate in fp32. The result therefore equals an
fp32 GEMM of the widened operands, at ten times the speed. The output gradient is fp32. To use the same tensor cores, it
is split into three bf16 tensors that add up to it, each with 8 of its 24 bits. One GEMM multiplies all three, so only
the sums are rounded.

Outside CUDA and bf16, operands are widened.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megafp8.gemm import invariant
from megafp8.gemm.dispatch import gemm
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.grad_sink import deliver, now_or_later, wgrad_dtype


def fp32_linear(x_mk: Tensor, weight: nn.Parameter, *, batch_invariant: bool = False) -> Tensor:
    """Return `x wᵀ`, `[m, n]`, in fp32, or in float64 if x is float64.

    If `batch_invariant` is True, `megafp8.gemm.invariant` computes the product.
    """
    return _Fp32Linear.apply(x_mk, weight, batch_invariant)


class _Fp32Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
        ctx.save_for_backward(x_mk, weight)
        ctx.weight = weight  # saved tensors may be unpacked as new objects, which have no gradient sink
        w_nk, wide = weight.to(x_mk.dtype), torch.promote_types(x_mk.dtype, torch.float32)
        return invariant.product(x_mk, w_nk, wide) if batch_invariant else gemm(x_mk, w_nk.t(), wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_mk, weight = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        # [m, 3n] in bf16, or [m, n] unchanged
        terms = bf16_terms(dy_mn) if x_mk.is_cuda and x_mk.dtype == torch.bfloat16 else [dy_mn]
        dy = torch.cat(terms, dim=1) if len(terms) > 1 else dy_mn
        dx = dw = None
        if needs_dx:
            w_nk = weight.to(torch.promote_types(x_mk.dtype, dy.dtype))
            dx = gemm(dy, w_nk.repeat(len(terms), 1), w_nk.dtype).to(x_mk.dtype)
        if needs_dw:
            dw = now_or_later(ctx.weight, partial(_wgrad, ctx.weight, dy, x_mk, len(terms)))
        return dx, dw, None


def _wgrad(weight: Tensor, dy: Tensor, x_mk: Tensor, terms: int) -> Tensor | None:
    """Compute dw from the `terms` bf16 terms of dy, and deliver it to the weight's gradient sink."""
    wide = torch.promote_types(x_mk.dtype, torch.float32)
    dw_tnk = gemm(dy.t(), x_mk.to(dy.dtype), wide).view(terms, -1, x_mk.shape[1])
    return deliver(weight, dw_tnk.sum(dim=0).to(wgrad_dtype(weight)))


def bf16_terms(x: Tensor) -> list[Tensor]:
    """Return three bf16 tensors that add up to the fp32 tensor `x`, except for numbers with subnormal terms."""
    first = x.to(torch.bfloat16)
    rest = x - first
    second = rest.to(torch.bfloat16)
    return [first, second, (rest - second).to(torch.bfloat16)]
