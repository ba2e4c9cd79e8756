"""Addition of each row's expert bias to the results of a linear layer of experts.

Rows are sorted by expert. Rows after the last expert's end belong to none, and their content is undefined.

`add_biases` and `sum_by_expert` here are plain PyTorch. For bf16, fp16 and fp32 on CUDA, kernels replace them.

Shapes: m rows, n columns, e experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.linear.autograd import once_differentiable
from megafp8.numerics.implementations import has_kernel, triton_module

_kernels = triton_module("megafp8.layers.experts.bias_kernel")


def add_biases(y_mn: Tensor, bias_en: Tensor, ends_e: Tensor) -> None:
    """Add the bias of its expert to each row, in place."""
    y_mn += torch.cat([bias_en, torch.zeros_like(bias_en[:1])])[_experts(ends_e, len(y_mn))]


def sum_by_expert(dy_mn: Tensor, ends_e: Tensor) -> Tensor:
    """Return the sums over each expert's rows, fp32 or wider, `[e, n]`."""
    wide = dy_mn.to(torch.promote_types(dy_mn.dtype, torch.float32))
    sums = wide.new_zeros(len(ends_e) + 1, dy_mn.shape[1])
    return sums.index_add_(0, _experts(ends_e, len(dy_mn)), wide)[:-1]


def _experts(ends_e: Tensor, m: int) -> Tensor:
    """Return the expert of each row, and e for a row that belongs to none, int64 `[m]`."""
    return torch.searchsorted(ends_e, torch.arange(m, dtype=ends_e.dtype, device=ends_e.device), right=True)


class _AddBiases(Function):
    @staticmethod
    def forward(ctx: Any, y_mn: Tensor, bias: Tensor, ends_e: Tensor) -> Tensor:
        ctx.save_for_backward(ends_e)
        ctx.dtype = bias.dtype
        ctx.mark_dirty(y_mn)
        add = _kernels().add_biases if has_kernel(y_mn) else add_biases
        add(y_mn, bias.view(len(ends_e), -1), ends_e)
        return y_mn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends_e,) = ctx.saved_tensors
        sums = _kernels().sum_by_expert if has_kernel(dy_mn) else sum_by_expert
        return dy_mn, sums(dy_mn, ends_e).flatten().to(ctx.dtype), None


def with_biases(y_mn: Tensor, bias: Tensor | None, ends_e: Tensor) -> Tensor:
    """Add the bias of its expert to each row of `y_mn`, in place, and return `y_mn`.

    Args:
        y_mn: Results of the experts' linear layer.
        bias: Biases of all experts, one after the other, `[e·n]`; None adds nothing.
        ends_e: End of each expert's rows, int32.
    """
    biased: Tensor = y_mn if bias is None else _AddBiases.apply(y_mn, bias, ends_e)
    return biased
