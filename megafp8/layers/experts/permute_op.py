"""Permutation of token rows into the order of their experts, and the weighted sum that restores the tokens.

Each token goes to k experts. `permute` copies the token's row k times, so that the rows of each expert are adjacent.
`combine` adds the k weighted results of each token. Forward and backward read rows by index and add the k rows of a
token one after the other, in the order of its choices, so both are deterministic.

A rank that holds only some of the experts has rows only for them, and `combine` adds only these rows. Only the device
knows their number. Buffers may have room for more rows; the content of the surplus rows is undefined.

FP8 experts take quantized rows and quantized gradients of their outputs. The cast then reads rows directly from the
tokens, and no bf16 copy of the rows is stored.

`sum_choices` and `combine_backward` here are plain PyTorch. For bf16 and fp32 on CUDA, kernels replace them.

Shapes: n tokens, k experts per token, h hidden size, m rows: n·k, or the number of rows that buffers have room for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import FusedOutput, LinearInput, fused_gradient
from megafp8.linear.state import InputFormat, QuantizedGradHandoff
from megafp8.numerics.implementations import has_kernel, triton_module
from megafp8.numerics.sources import Gathered

_kernels = triton_module("megafp8.layers.experts.permute_kernel")


class Permutation(NamedTuple):
    """Permutation between the n·k choices, listed token by token, and the m rows, sorted by expert."""

    order: Tensor
    """Choice of each row, int64 `[m]`."""
    inverse: Tensor
    """Row of each choice, int64 `[n·k]`. Rows that are not this rank's have undefined content."""
    top_k: int
    """Number of experts per token, k."""
    num_rows: Tensor | None = None
    """Number of rows that belong to this rank's experts, int32 `[1]` on the device, at most m; None means all."""

    @property
    def tokens(self) -> Tensor:
        """Token of each row, int64 `[m]`."""
        return self.order if self.top_k == 1 else self.order // self.top_k

    @property
    def inverse_nk(self) -> Tensor:
        """Rows of each token, int64 `[n, k]`."""
        return self.inverse.view(-1, self.top_k)

    @property
    def reverse(self) -> Permutation:
        """Inverse permutation. `top_k` must be 1."""
        assert self.top_k == 1
        return Permutation(self.inverse, self.order, 1)


def by_expert(experts_nk: Tensor, num_experts: int) -> tuple[Permutation, Tensor]:
    """Sort choices by expert, and by token within each expert.

    Args:
        experts_nk: Experts of each token, int64. `num_experts` marks a choice of no expert; these choices come last.
        num_experts: Number of experts.

    Returns:
        Permutation of the choices, and the end of each expert's rows, int32 `[num_experts]`.
    """
    # CUDA uses a radix sort, with one pass per byte: 8 passes for int64.
    narrow = torch.uint8 if num_experts < 2**8 else torch.int16 if num_experts < 2**15 else torch.int32
    experts, order = experts_nk.flatten().to(narrow).sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    ids = torch.arange(num_experts, device=order.device).to(narrow)
    ends_e = torch.searchsorted(experts, ids, right=True, out_int32=True)
    return Permutation(order, inverse, experts_nk.shape[1]), ends_e


def sum_choices(
    rows_mh: Tensor, inverse_nk: Tensor, weights_nk: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """Return the sum of each token's rows, times their weights if given, rounded once to their dtype, `[n, h]`.

    Products and sums are in float32 or wider, in the order of choices. Rows from `num_rows` on are skipped.
    """
    wide = torch.promote_types(rows_mh.dtype, torch.float32)
    total_nh: Tensor | None = None
    for choice, row_n in enumerate(inverse_nk.unbind(dim=1)):
        x_nh = _rows(rows_mh, row_n, num_rows).to(wide)
        if weights_nk is not None:
            x_nh = x_nh * weights_nk[:, choice : choice + 1]
        total_nh = x_nh if total_nh is None else total_nh + x_nh
    assert total_nh is not None
    return total_nh.to(rows_mh.dtype)


def _rows(rows_mh: Tensor, index: Tensor, num_rows: Tensor | None) -> Tensor:
    """Return `rows_mh[index]`, with zeros in place of rows from `num_rows` on."""
    if num_rows is None:
        return rows_mh[index]
    padded = torch.cat([rows_mh, rows_mh.new_zeros(1, rows_mh.shape[1])])
    return padded[torch.where(index < num_rows, index, len(rows_mh))]


def combine_backward(
    dy_nh: Tensor, rows_mh: Tensor, weights_nk: Tensor, inverse_nk: Tensor, num_rows: Tensor | None = None, *,
    needs_rows: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of the rows (in their dtype) and the weights of `sum_choices`.

    The gradient of the rows is None unless `needs_rows`.
    """
    dy_n1h = dy_nh.unsqueeze(1)
    dweights_nk = (_rows(rows_mh, inverse_nk, num_rows).to(weights_nk.dtype) * dy_n1h).sum(dim=-1)
    if not needs_rows:
        return None, dweights_nk
    drows_nkh = (dy_n1h * weights_nk.unsqueeze(-1)).to(rows_mh.dtype)
    drows_mh = torch.empty_like(rows_mh)
    if num_rows is None:
        drows_mh[inverse_nk] = drows_nkh
    else:
        present_nk = inverse_nk < num_rows
        drows_mh[inverse_nk[present_nk]] = drows_nkh[present_nk]
    return drows_mh, dweights_nk


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, permutation: Permutation, fused: FusedOutput) -> Tensor:
        ctx.save_for_backward(permutation.inverse_nk, permutation.num_rows)
        if fused.format is None:
            return x_nh[permutation.tokens]
        source = Gathered(x_nh.contiguous(), permutation.tokens)
        return fused.compute(source, source.shape[:1], x_nh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_mh: Tensor) -> tuple[Tensor, None, None]:
        inverse_nk, num_rows = ctx.saved_tensors
        add = _kernels().sum_choices if has_kernel(drows_mh) else sum_choices
        return add(drows_mh, inverse_nk, None, num_rows), None, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation, handoff: QuantizedGradHandoff | None
    ) -> Tensor:
        order_m = None if handoff is None else permutation.order
        ctx.save_for_backward(rows_mh, weights_nk, permutation.inverse_nk, permutation.num_rows, order_m)
        ctx.handoff = handoff
        add = _kernels().sum_choices if has_kernel(rows_mh) else sum_choices
        return add(rows_mh, permutation.inverse_nk, weights_nk, permutation.num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nh: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        rows_mh, weights_nk, inverse_nk, num_rows, order_m = ctx.saved_tensors
        backward = _kernels().combine_backward if has_kernel(rows_mh) else combine_backward
        quantized = ctx.handoff is not None
        drows_mh, dweights_nk = backward(dy_nh, rows_mh, weights_nk, inverse_nk, num_rows, needs_rows=not quantized)
        if quantized:
            factors_m = weights_nk.flatten()[order_m]
            source = Gathered(dy_nh.contiguous(), order_m // inverse_nk.shape[1], factors_m)
            drows_mh = fused_gradient(source, source.shape[:1], rows_mh, ctx.handoff)
        return drows_mh, dweights_nk, None, None


class _ScaleRows(Function):
    @staticmethod
    def forward(ctx: Any, rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation) -> Tensor:
        ctx.save_for_backward(rows_mh, weights_nk, permutation.order, permutation.inverse_nk, permutation.num_rows)
        return (rows_mh * weights_nk.flatten()[permutation.order].unsqueeze(1)).to(rows_mh.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mh: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_mh, weights_nk, order_m, inverse_nk, num_rows = ctx.saved_tensors
        drows_mh = (dy_mh * weights_nk.flatten()[order_m].unsqueeze(1)).to(rows_mh.dtype)
        products_m1 = (rows_mh.to(weights_nk.dtype) * dy_mh).sum(dim=1, keepdim=True)
        dweights_nk = torch.stack([_rows(products_m1, row_n, num_rows)[:, 0] for row_n in inverse_nk.unbind(1)], dim=1)
        return drows_mh, dweights_nk, None


def scale_rows(rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation) -> Tensor:
    """Multiply rows by the weights `[n, k]` (float32 or wider) of their choices; return the rows' dtype."""
    return _ScaleRows.apply(rows_mh, weights_nk, permutation)


def permute(x_nh: Tensor, permutation: Permutation) -> Tensor:
    """Copy tokens `[n, h]` to rows `[m, h]` sorted by expert."""
    return _Permute.apply(x_nh, permutation, FusedOutput(None, torch.is_grad_enabled()))


def expert_input(x_nh: Tensor, permutation: Permutation, form: InputFormat | None) -> Tensor | LinearInput:
    """Copy tokens `[n, h]` to rows sorted by expert, in the format `form`; None returns values `[m, h]`."""
    fused = FusedOutput(form, torch.is_grad_enabled())
    return fused.result(_Permute.apply(x_nh, permutation, fused))


def combine(
    rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation, handoff: QuantizedGradHandoff | None = None
) -> Tensor:
    """Return the weighted sum of each token's rows, `[n, h]`.

    Args:
        rows_mh: Rows sorted by expert.
        weights_nk: Weight of each row, float32 or wider.
        permutation: Permutation that produced the rows.
        handoff: Handoff that passes a quantized gradient to the layer that computed the rows; None to pass values. No
            other operation may use the rows.
    """
    return _Combine.apply(rows_mh, weights_nk, permutation, handoff)
