"""RMSNorm and LayerNorm with the residual addition before them, fused with the cast of their output.

Kept for backward: the sum, and a statistic or two of each row.

Shapes: r rows (tokens; all leading dims), c columns (hidden).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.fp8.linear_state import InputFormat
from megafp8.fp8.sources import Normalized
from megafp8.ops import norm_reference
from megafp8.ops.fusion import FusedOutput, LinearInput, as_matrix


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, fused: FusedOutput
    ) -> tuple[Tensor, Tensor]:
        x_rc, branch_rc = as_matrix(x), None if branch is None else as_matrix(branch)
        total_rc, mean_r, rstd_r = _statistics(x_rc, branch_rc, eps, centered=bias is not None)
        source = Normalized(total_rc, rstd_r, weight, mean_r, bias)
        y = fused.compute(source, x)
        ctx.save_for_backward(total_rc, rstd_r, mean_r, weight)
        ctx.set_materialize_grads(False)
        return torch.ops.aten._unsafe_view(total_rc, x.shape), y  # what is a view, hooks of FSDP do not like

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total_rc, rstd_r, mean_r, weight = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return dtotal, dtotal if ctx.needs_input_grad[1] else None, *[None] * 4
        dresidual = None if dtotal is None else as_matrix(dtotal)
        dx_rc, dweight, dbias = _backward(as_matrix(dy), total_rc, mean_r, rstd_r, weight, dresidual)
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
    return total_rc, *norm_reference.statistics(total_rc, eps, centered=centered)


def _backward(
    dy_rc: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight: Tensor, dresidual_rc: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if x_rc.is_cuda and x_rc.dtype != torch.float64:
        from megafp8.kernels import norm as kernels

        return kernels.backward(dy_rc, x_rc, mean_r, rstd_r, weight, dresidual_rc)
    return norm_reference.backward(dy_rc, x_rc, mean_r, rstd_r, weight, dresidual_rc)


def norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, form: InputFormat | None
) -> tuple[Tensor, Tensor | LinearInput]:
    """`x + branch` (x without a branch), and its norm over the last dim: values, or what the layer after it takes.

    RMSNorm without a bias, LayerNorm with one; weight and bias `[c]`. `form`: how the layer takes its input.
    """
    fused = FusedOutput(form, torch.is_grad_enabled())
    total, y = _Norm.apply(x, branch, weight, bias, eps, fused)
    return total, fused.result(y)
