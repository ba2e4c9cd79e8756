"""RMSNorm and LayerNorm, fused with the residual addition before them, its dropout, and the cast of their output.

Backward needs the sum and one or two statistics per row, which forward saves. The gradients of weight and bias go to
gradient sinks where the parameters have them, like the gradients of linear layers (`megafp8.linear.grad_sink`).

Shapes: r rows (tokens; all leading dims), c columns (hidden).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from megafp8.layers.dropout import op as dropouts
from megafp8.layers.dropout import reference as dropout_reference
from megafp8.layers.dropout.reference import Dropout
from megafp8.layers.norm import reference as norm_reference
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import FusedOutput, LinearInput, as_matrix, runs_unfused
from megafp8.linear.grad_sink import deliver, summed_in_place, was_added
from megafp8.linear.state import InputFormat
from megafp8.numerics.implementations import has_kernel, triton_module
from megafp8.numerics.sources import Normalized, ZeroCenteredNormalized, norm_factor

_kernels = triton_module("megafp8.layers.norm.kernel")


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        zero_centered: bool, fused: FusedOutput, dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if fused.format is None and has_kernel(x):
            total, mean_r, rstd_r, y = _kernels().normalize(
                x.contiguous(), _contiguous(branch), weight, bias, eps, dropout, zero_centered=zero_centered
            )
        else:
            total, mean_r, rstd_r = _statistics(x, branch, eps, dropout, centered=bias is not None)
            source = ZeroCenteredNormalized if zero_centered else Normalized
            y = fused.compute(source(as_matrix(total), rstd_r, weight, mean_r, bias), x.shape[:-1], x)
        # Save `total` itself. A view of an output keeps the graph alive, and the graph keeps the view until backward.
        ctx.save_for_backward(total, rstd_r, mean_r, weight)
        ctx.zero_centered = zero_centered
        ctx.weight, ctx.bias = weight, bias  # saved tensors may come back as other objects without the sink
        ctx.dropout = dropout
        ctx.set_materialize_grads(False)
        if total is x:  # autograd would return x as a view, which FSDP's hooks do not support
            total = torch.ops.aten._unsafe_view.default(x, x.shape)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, rstd_r, mean_r, weight = ctx.saved_tensors
        if dy is None:  # the loss depends on the sum alone
            dbranch = dtotal
            if ctx.dropout is not None and dtotal is not None:
                dbranch = dropouts.compute(None, dtotal, ctx.dropout)
            return dtotal, dbranch if ctx.needs_input_grad[1] else None, *[None] * 6
        dx, dbranch, dweight, dbias = _backward(
            dy, as_matrix(total), mean_r, rstd_r, weight, dtotal, ctx.dropout, zero_centered=ctx.zero_centered
        )
        dw = deliver_sums(ctx.weight, dweight)
        db = None if dbias is None else deliver_sums(ctx.bias, dbias)
        return dx, dbranch if ctx.needs_input_grad[1] else None, dw, db, *[None] * 4


def _statistics(
    x: Tensor, branch: Tensor | None, eps: float, dropout: Dropout | None, *, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `x + branch` (x itself without a branch), and the mean and reciprocal deviation of each row."""
    if has_kernel(x):
        return _kernels().statistics(x.contiguous(), _contiguous(branch), eps, centered=centered, dropout=dropout)
    total = x
    if branch is not None:
        total = x + branch if dropout is None else dropout_reference.add(x, branch, dropout)
    return total, *norm_reference.statistics(as_matrix(total), eps, centered=centered)


def _backward(
    dy: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight: Tensor, dresidual: Tensor | None,
    dropout: Dropout | None, *, zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of x and branch in the shape of dy, and of weight and bias.

    The gradients of weight and bias are `[c]`, or partial sums `[p, c]` in float64 where a kernel runs.
    """
    if has_kernel(x_rc):
        return _kernels().backward(
            dy.contiguous(), x_rc, mean_r, rstd_r, weight, _contiguous(dresidual), dropout, zero_centered=zero_centered
        )
    dresidual_rc = None if dresidual is None else as_matrix(dresidual)
    dx_rc, dweight, dbias = norm_reference.backward(
        as_matrix(dy), x_rc, mean_r, rstd_r, weight, dresidual_rc, zero_centered=zero_centered
    )
    dx = dx_rc.view(dy.shape)
    return dx, dx if dropout is None else dropout_reference.add(None, dx, dropout), dweight, dbias


def deliver_sums(weight: Tensor, dweight: Tensor) -> Tensor | None:
    """Add a norm's weight gradient to the weight's sink, or return it for autograd, in the weight's dtype.

    `dweight` is the gradient `[c]` or its partial sums `[p, c]`. The result is None if a sink took the gradient.
    """
    if dweight.dim() == 2:
        main_grad = summed_in_place(weight)
        if main_grad is not None:
            _kernels().add_sums_(main_grad, dweight, weight)
            was_added(weight)
            return None
        dweight = dweight.sum(dim=0).float()
    return deliver(weight, dweight.to(weight.dtype))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _unfused(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    factor = norm_factor(weight, zero_centered).to(x.dtype) if zero_centered else weight
    if bias is not None:
        return total, F.layer_norm(total, weight.shape, factor, bias.to(factor.dtype), eps)  # PyTorch: one dtype
    return total, F.rms_norm(total, weight.shape, factor, eps)


def norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, form: InputFormat | None, *,
    dropout: Dropout | None = None, zero_centered: bool = False,
) -> tuple[Tensor, Tensor | LinearInput]:  # fmt: skip
    """Add `branch` to `x` and normalize the sum over the last dim: LayerNorm with a bias, RMSNorm without.

    Args:
        x: Residual stream, `[..., c]`.
        branch: Output of the previous sublayer, in the shape of `x`; None to normalize `x` alone.
        weight: `[c]`.
        bias: `[c]`, or None.
        eps: Number added to the variance.
        form: Input format of the next layer; None for values.
        dropout: Dropout applied to `branch` before the addition.
        zero_centered: Multiply by `1 + weight` instead of `weight`.

    Returns:
        The sum, and its norm in the format `form`.
    """
    if form is None and dropout is None and runs_unfused(x):
        return _unfused(x, branch, weight, bias, eps, zero_centered=zero_centered)
    fused = FusedOutput(form, torch.is_grad_enabled())
    branch_dropout = None if branch is None else dropout
    total, y = _Norm.apply(x, branch, weight, bias, eps, zero_centered, fused, branch_dropout)
    return total, fused.result(y)
