"""Rows of tokens in the order of their experts, and the weighted sum that brings them back.

Each token goes to k experts. `permute` copies its row k times, to where the rows of each expert are next to each other;
`combine` adds the k results of each token, weighted. Forward and backward read rows by index and add k of them in a
fixed order, so both are deterministic.

Shapes: n tokens, k experts of each, h hidden, m = n·k rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.ops.autograd import once_differentiable


class Permutation(NamedTuple):
    """`order[i]`: which of the n·k choices, token by token, is row i; `inverse`: its inverse; both int64 `[m]`."""

    order: Tensor
    inverse: Tensor
    top_k: int

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.order if self.top_k == 1 else self.order // self.top_k

    @property
    def reverse(self) -> Permutation:
        """What undoes it; of rows that each stand for one token."""
        assert self.top_k == 1
        return Permutation(self.inverse, self.order, 1)


def by_expert(experts_nk: Tensor, num_experts: int) -> Permutation:
    """Rows by expert, and by token within each, of the experts `0 <= e < num_experts` chosen for each token."""
    # CUDA sorts integers by their digits: 8 passes for int64, one for each byte.
    narrow = torch.uint8 if num_experts <= 2**8 else torch.int16 if num_experts <= 2**15 else torch.int32
    order = experts_nk.flatten().to(narrow).sort(stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return Permutation(order, inverse, experts_nk.shape[1])


def _sum_of_choices(rows_mh: Tensor, permutation: Permutation, weights_nk: Tensor | None = None) -> Tensor:
    """`[n, h]`: each token's k rows added up, in float32 or wider, and rounded once to the rows' dtype."""
    rows_nkh = rows_mh[permutation.inverse].view(-1, permutation.top_k, rows_mh.shape[1])
    if weights_nk is None:
        return rows_nkh.squeeze(1) if permutation.top_k == 1 else rows_nkh.sum(dim=1)
    return (rows_nkh * weights_nk.unsqueeze(-1)).sum(dim=1).to(rows_mh.dtype)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, permutation: Permutation) -> Tensor:
        ctx.save_for_backward(permutation.order, permutation.inverse)
        ctx.top_k = permutation.top_k
        return x_nh[permutation.tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_mh: Tensor) -> tuple[Tensor, None]:
        order, inverse = ctx.saved_tensors
        return _sum_of_choices(drows_mh, Permutation(order, inverse, ctx.top_k)), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation) -> Tensor:
        ctx.save_for_backward(rows_mh, weights_nk, permutation.order, permutation.inverse)
        return _sum_of_choices(rows_mh, permutation, weights_nk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nh: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_mh, weights_nk, order, inverse = ctx.saved_tensors
        permutation = Permutation(order, inverse, weights_nk.shape[1])
        dy_mh = dy_nh[permutation.tokens]
        weights_m = weights_nk.flatten()[permutation.order]
        drows_mh = (dy_mh * weights_m.unsqueeze(-1)).to(rows_mh.dtype)
        dweights_m = (rows_mh.to(weights_nk.dtype) * dy_mh).sum(dim=-1)
        return drows_mh, dweights_m[permutation.inverse].view_as(weights_nk), None


def permute(x_nh: Tensor, permutation: Permutation) -> Tensor:
    """The rows `[m, h]` of tokens `[n, h]`, by expert."""
    return _Permute.apply(x_nh, permutation)


def combine(rows_mh: Tensor, weights_nk: Tensor, permutation: Permutation) -> Tensor:
    """`[n, h]`: the sum of each token's k rows, times their weights (float32 or wider)."""
    return _Combine.apply(rows_mh, weights_nk, permutation)
