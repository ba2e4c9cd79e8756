"""Dropout of a branch that is added to the residual stream, or of the stream itself; its masks are never stored.

`layers.norm.op` adds a branch in the same way as it reads it. Masks: `layers.dropout.reference`.

Shapes: s sequence, b micro-batch, c channels.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.layers.dropout import reference as dropout_reference
from megafp8.layers.dropout.reference import Dropout
from megafp8.linear.autograd import once_differentiable


def add(residual: Tensor | None, x: Tensor, dropout: Dropout | None) -> Tensor:
    """`residual` (0 if None) + dropout of x, both `[s, b, c]`; differentiable. Without `dropout` the sum, or x."""
    if dropout is not None:
        return _Dropout.apply(residual, x, dropout)
    return x if residual is None else residual + x


def compute(residual: Tensor | None, x: Tensor, dropout: Dropout) -> Tensor:
    """`dropout_reference.add`, by a kernel where there is one; not differentiable."""
    if not x.is_cuda or x.dtype == torch.float64:
        return dropout_reference.add(residual, x, dropout)
    return _kernels().add(None if residual is None else residual.contiguous(), x.contiguous(), dropout)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor | None, x: Tensor, dropout: Dropout) -> Tensor:
        ctx.dropout = dropout
        return compute(residual, x, dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy if ctx.needs_input_grad[0] else None, compute(None, dy, ctx.dropout), None


@cache
def _kernels() -> ModuleType:
    from megafp8.layers.dropout import kernel as dropout  # needs Triton, which comes with torch's CUDA builds

    return dropout
