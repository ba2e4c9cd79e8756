"""A linear layer whose output is fp32, of inputs and a weight that may have 16 bits: the router's.

The product of two bf16 numbers is exact in fp32, so tensor cores, which add products up in fp32, give what an fp32 GEMM
of the widened operands gives, ten times as fast. The output's gradient is fp32. For the same tensor cores it is split
into three bf16 tensors that add up to it, 8 bits of its 24 each, which are multiplied in one GEMM: nothing is rounded
but sums.

Elsewhere than in bf16 on CUDA, operands are widened.

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
    """Return `x wᵀ`, `[m, n]`, in fp32, or float64 if x is; `batch_invariant`: by `megafp8.gemm.invariant`."""
    return _Fp32Linear.apply(x_mk, weight, batch_invariant)


class _Fp32Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
        ctx.save_for_backward(x_mk, weight)
        ctx.weight = weight  # saved tensors may come back as other objects, without their sink
        w_nk, wide = weight.to(x_mk.dtype), torch.promote_types(x_mk.dtype, torch.float32)
        return invariant.product(x_mk, w_nk, wide) if batch_invariant else gemm(x_mk, w_nk.t(), wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_mk, weight = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        # [m, 3n] of 16 bits, or [m, n] as it is
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
    wide = torch.promote_types(x_mk.dtype, torch.float32)
    dw_tnk = gemm(dy.t(), x_mk.to(dy.dtype), wide).view(terms, -1, x_mk.shape[1])
    return deliver(weight, dw_tnk.sum(dim=0).to(wgrad_dtype(weight)))


def bf16_terms(x: Tensor) -> list[Tensor]:
    """Three bf16 tensors whose sum is `x`, fp32, but for numbers so small that a term of them is subnormal."""
    first = x.to(torch.bfloat16)
    rest = x - first
    second = rest.to(torch.bfloat16)
    return [first, second, (rest - second).to(torch.bfloat16)]
