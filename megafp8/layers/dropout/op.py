"""Dropout of a branch that is added to the residual stream, or of the stream itself. Masks are never stored.

`megafp8.layers.norm.op` fuses the same dropout and addition with a norm. `megafp8.layers.dropout.reference` defines the
masks.

Shapes: s sequence length, b micro-batch size, c channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.layers.dropout import reference as dropout_reference
from megafp8.layers.dropout.reference import Dropout
from megafp8.linear.autograd import once_differentiable
from megafp8.numerics.implementations import triton_module

_kernels = triton_module("megafp8.layers.dropout.kernel")


def add(residual: Tensor | None, x: Tensor, dropout: Dropout | None) -> Tensor:
    """Apply dropout to `x` `[s, b, c]` and add it to `residual`. Differentiable.

    Without `residual`, return only x after dropout. Without `dropout`, x is not changed before the addition.
    """
    if dropout is not None:
        return _Dropout.apply(residual, x, dropout)
    return x if residual is None else residual + x


def compute(residual: Tensor | None, x: Tensor, dropout: Dropout) -> Tensor:
    """Compute `dropout_reference.add`, with a kernel if there is one for `x`. Not differentiable."""
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
