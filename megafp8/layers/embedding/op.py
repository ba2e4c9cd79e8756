"""Embedding look-up with a gradient that is added to the weight's gradient buffer in place.

torch's look-up has a dense gradient in the weight's dtype, as large as the table and nearly all zeros. For every
micro-batch, one or two gigabytes are allocated and added to the fp32 sum. Here backward adds the gradients of the rows
that were looked up directly to the sum (`megafp8.linear.grad_sink.summed_in_place`), and autograd sees no gradient, as
for linear layers. The gradient is dense only if there is no such sum: with FSDP, which reduces autograd's gradients,
and in float64.

*Numerics.* torch sums the gradients of a row in fp32 and rounds the sum to the weight's dtype before it is added to the
sum over micro-batches. Here nothing is rounded to bf16, unless the gradient dtype is bf16.

*Order.* Two runs give the same bits. Rows are added by the rule in `megafp8.layers.embedding.kernel`: CHUNK rows at a
time, in the order of the tokens (sequence first, then batch, as gradients are laid out in memory). This module contains
the PyTorch implementation, and the kernel is for CUDA.

Shapes: s sequence, b micro-batch, n = s·b tokens, h hidden, v rows of this rank's shard of the table; c chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megafp8.linear.grad_sink import deliver, summed_in_place, was_added, wgrad_dtype

CHUNK = 64
"""Number of gradients of one row that are summed before the sum is added, about the root of a usual micro-batch."""


class _LookUp(Function):
    @staticmethod
    def forward(ctx: Any, weight_vh: Tensor, rows_sb: Tensor, partial: bool) -> Tensor:
        ctx.weight = weight_vh  # a saved tensor may come back as another object without a gradient sink
        ctx.save_for_backward(rows_sb)
        if not partial:
            return F.embedding(rows_sb, weight_vh)
        foreign_sb = (rows_sb < 0) | (rows_sb >= len(weight_vh))
        return F.embedding(rows_sb.masked_fill(foreign_sb, 0), weight_vh).masked_fill_(foreign_sb.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbh: Tensor) -> tuple[Tensor | None, None, None]:
        (rows_sb,) = ctx.saved_tensors
        weight_vh, dy_nh, rows_n = ctx.weight, dy_sbh.contiguous().flatten(0, 1), rows_sb.flatten()
        main_grad_vh = summed_in_place(weight_vh)
        if main_grad_vh is not None:
            _add_rows(main_grad_vh, dy_nh, rows_n)
            was_added(weight_vh)
            return None, None, None
        dtype = wgrad_dtype(weight_vh)
        wide = torch.promote_types(dy_nh.dtype, torch.float32)
        dw_vh = torch.zeros(weight_vh.shape, dtype=wide, device=weight_vh.device)
        _add_rows(dw_vh, dy_nh, rows_n)
        return deliver(weight_vh, dw_vh.to(dtype)), None, None


def look_up(weight_vh: nn.Parameter, rows_sb: Tensor, *, partial: bool) -> Tensor:
    """Return `weight_vh[rows_sb]`, `[s, b, h]`.

    With `partial`, rows outside `[0, v)` belong to other ranks and are zeros in the result.
    """
    return _LookUp.apply(weight_vh, rows_sb, partial)


def _add_rows(sum_vh: Tensor, dy_nh: Tensor, rows_n: Tensor) -> None:
    if sum_vh.is_cuda:
        from megafp8.layers.embedding import kernel as embedding  # needs Triton, which comes with torch's CUDA builds

        embedding.add_rows_(sum_vh, dy_nh, rows_n, chunk=CHUNK)
    else:
        add_rows_(sum_vh, dy_nh, rows_n, chunk=CHUNK)


def add_rows_(sum_vh: Tensor, dy_nh: Tensor, rows_n: Tensor, *, chunk: int) -> None:
    """Add `dy_nh[i]` to `sum_vh[rows_n[i]]` for each i, `chunk` at a time, on the CPU; ignore rows outside `[0, v)`.

    Relies on the CPU's `index_add_`, which adds row after row.
    """
    (local_n,) = torch.where((rows_n >= 0) & (rows_n < len(sum_vh)))
    rows_n, order_n = rows_n[local_n].sort(stable=True)
    place_n = torch.arange(len(rows_n)) - torch.searchsorted(rows_n, rows_n)
    begins_n = place_n % chunk == 0
    chunks_ch = torch.zeros((int(begins_n.sum()), sum_vh.shape[1]), dtype=sum_vh.dtype)
    chunks_ch.index_add_(0, begins_n.cumsum(0) - 1, dy_nh[local_n[order_n]].to(sum_vh.dtype))
    sum_vh.index_add_(0, rows_n[begins_n], chunks_ch)
