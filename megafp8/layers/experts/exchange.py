"""Rows of tokens travel to the ranks of their experts and back, by all-to-all.

A rank's rows are in the order of all experts of the layer, so those of each rank's experts are next to each other.
What arrives is in the order of senders, and of experts within each; it is put in the order of experts.

How many rows each rank sends is known on the device only. The host reads it, once in each forward pass, since it sizes
the buffers that receive. Therefore a CUDA graph cannot hold the exchange.

Shapes: m rows of this rank's tokens, m' rows for this rank's experts, r ranks, e experts of a rank, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megafp8.layers.experts.permute_op import Permutation, by_expert, expert_input, permute
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.parallel.collectives import all_to_all, all_to_all_rows


@dataclass(frozen=True)
class TokenDispatch:
    """How many rows this rank sends to each rank of `group` and receives from it, and where these belong.

    `received_by_expert`: received rows to the order of experts. `ends_e`: int32 `[e]`, where those of each expert end.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    received_by_expert: Permutation
    ends_e: Tensor

    def to_experts(self, rows_mh: Tensor, form: InputFormat | None) -> Tensor | LinearInput:
        """`[m', h]`, by expert of this rank, as their layer takes them (`form`)."""
        arrived = _AllToAll.apply(rows_mh, self.group, self.sent, self.received)
        return expert_input(arrived, self.received_by_expert, form)

    def to_tokens(self, rows_mh: Tensor) -> Tensor:
        """`[m, h]`: back to where they came from."""
        as_received = permute(rows_mh, self.received_by_expert.reverse)
        return _AllToAll.apply(as_received, self.group, self.received, self.sent)


def plan_dispatch(counts: Tensor, group: ProcessGroup) -> TokenDispatch:
    """Plan the dispatch of rows, given this rank's `counts` for each expert of the layer, int64 `[r·e]`. Collective."""
    counts_re = counts.view(group.size(), -1)
    arriving_re = all_to_all(counts_re, group)
    sent, received = torch.stack([counts_re.sum(dim=1), arriving_re.sum(dim=1)]).tolist()
    experts = torch.arange(arriving_re.shape[1], device=counts.device).repeat(group.size())
    experts_m = experts.repeat_interleave(arriving_re.flatten(), output_size=sum(received))
    received_by_expert, ends_e = by_expert(experts_m.unsqueeze(1), arriving_re.shape[1])
    return TokenDispatch(group, sent, received, received_by_expert, ends_e)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x_mh: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return all_to_all_rows(x_mh, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mh: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_rows(dy_mh, ctx.received, ctx.sent, ctx.group), None, None, None
