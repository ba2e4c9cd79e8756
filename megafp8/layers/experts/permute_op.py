"""Rows of tokens in the order of their experts, and the weighted sum that brings them back.

Each token goes to k experts. `permute` copies its row k times, to where the rows of each expert are next to each other;
`combine` adds the k results of each token, weighted. Forward and backward read rows by index and add k of them one
after the other, in the order of the token's choices, so both are deterministic.

A rank that has some of the experts has rows for them alone, and `combine` adds those. How many these are is known on
the device only: there may be room for more, whose rows have no meaning.

Experts in FP8 take their rows quantized, and their outputs' gradients: then rows are read from tokens while they are
cast, and no copy of them in bf16 is stored.

`sum_choices` and `combine_backward` are in plain PyTorch here; for bf16 and fp32 on CUDA they are kernels.

Shapes: n tokens, k experts of each, h hidden, m rows: n·k, or as many as there is room for.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import FusedOutput, LinearInput, fused_gradient
from megafp8.linear.state import InputFormat, QuantizedGradHandoff
from megafp8.numerics.sources import Gathered


class Permutation(NamedTuple):
    """`order[i]`: which of the n·k choices, token by token, is row i, int64 `[m]`; `inverse`: its inverse, `[n·k]`.

    `num_rows`: how many rows are of this rank's experts, int32 `[1]` on the device, at most m; None: all. The others,
    and what `inverse` has from there on, have no meaning.
    """

    order: Tensor
    inverse: Tensor
    top_k: int
    num_rows: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.order if self.top_k == 1 else self.order // self.top_k

    @property
    def inverse_nk(self) -> Tensor:
        """The rows of each token."""
        return self.inverse.view(-1, self.top_k)

    @property
    def reverse(self) -> Permutation:
        """What undoes it; of rows that each stand for one token."""
        assert self.top_k == 1
        return Permutation(self.inverse, self.order, 1)


def by_expert(experts_nk: Tensor, num_experts: int) -> tuple[Permutation, Tensor]:
    """Rows by expert, and by token within each, of the experts `0 <= e < num_experts` chosen for each token.

    Also where the rows of each expert end, int32 `[num_experts]`. Choices of `num_experts` come last.
    """
    # CUDA sorts integers by their digits: 8 passes for int64, one for each byte.
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
    """`[n, h]`: each token's rows, times their weights if there are any, added up and rounded once to their dtype.

    Products and sums are in float32 or wider, in the order of choices. Rows from `num_rows` on are left out.
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
    """`rows_mh[index]`, with zeros instead of rows from `num_rows` on."""
    if num_rows is None:
        return rows_mh[index]
    padded = torch.cat([rows_mh, rows_mh.new_zeros(1, rows_mh.shape[1])])
    return padded[torch.where(index < num_rows, index, len(rows_mh))]


def combine_backward(
    dy_nh: Tensor, rows_mh: Tensor, weights_nk: Tensor, inverse_nk: Tensor, num_rows: Tensor | None = None, *,
    of_rows: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Gradients of the rows, in their dtype, None unless `of_rows`, and of the weights, of `sum_choices` of them."""
    dy_n1h = dy_nh.unsqueeze(1)
    dweights_nk = (_rows(rows_mh, inverse_nk, num_rows).to(weights_nk.dtype) * dy_n1h).sum(dim=-1)
    if not of_rows:
        return None, dweights_nk
    drows_nkh = (dy_n1h * weights_nk.unsqueeze(-1)).to(rows_mh.dtype)
    drows_mh = torch.empty_like(rows_mh)
    if num_rows is None:
        drows_mh[inverse_nk] = drows_nkh
    else:
        present_nk = inverse_nk < num_rows
        drows_mh[inverse_nk[present_nk]] = drows_nkh[present_nk]
    return drows_mh, dweights_nk


@cache
def _kernels() -> ModuleType:
    from megafp8.layers.experts import permute_kernel as permute  # needs Triton, which comes with torch's CUDA builds

    return permute


def _has_kernel(rows_mh: Tensor) -> bool:
    return rows_mh.is_cuda and rows_mh.dtype != torch.float64


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
        add = _kernels().sum_choices if _has_kernel(drows_mh) else sum_choices
        return add(drows_mh, inverse_nk, None, num_rows), None, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation, handoff: QuantizedGradHandoff | None
    ) -> Tensor:
        order_m = None if handoff is None else permutation.order
        ctx.save_for_backward(rows_mh, weights_nk, permutation.inverse_nk, permutation.num_rows, order_m)
        ctx.handoff = handoff
        add = _kernels().sum_choices if _has_kernel(rows_mh) else sum_choices
        return add(rows_mh, permutation.inverse_nk, weights_nk, permutation.num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nh: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        rows_mh, weights_nk, inverse_nk, num_rows, order_m = ctx.saved_tensors
        backward = _kernels().combine_backward if _has_kernel(rows_mh) else combine_backward
        quantized = ctx.handoff is not None
        drows_mh, dweights_nk = backward(dy_nh, rows_mh, weights_nk, inverse_nk, num_rows, of_rows=not quantized)
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
    """Rows times the weights `[n, k]` (float32 or wider) of their choices, in their dtype."""
    return _ScaleRows.apply(rows_mh, weights_nk, permutation)


def permute(x_nh: Tensor, permutation: Permutation) -> Tensor:
    """The rows `[m, h]` of tokens `[n, h]`, by expert."""
    return _Permute.apply(x_nh, permutation, FusedOutput(None, torch.is_grad_enabled()))


def expert_input(x_nh: Tensor, permutation: Permutation, form: InputFormat | None) -> Tensor | LinearInput:
    """The rows of tokens, by expert, as their layer takes them (`form`): values `[m, h]` if it is None."""
    fused = FusedOutput(form, torch.is_grad_enabled())
    return fused.result(_Permute.apply(x_nh, permutation, fused))


def combine(
    rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation, handoff: QuantizedGradHandoff | None = None
) -> Tensor:
    """`[n, h]`: the sum of each token's rows, times their weights `[n, k]` (float32 or wider).

    `handoff`: where the layer that computed the rows, which have no other user, takes their gradient.
    """
    return _Combine.apply(rows_mh, weights_nk, permutation, handoff)
