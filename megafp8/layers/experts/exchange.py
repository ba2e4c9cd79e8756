"""All-to-all dispatch of token rows to the ranks of their experts, and back.

A rank sorts its rows by expert, so the rows for each rank's experts are adjacent. Received rows are sorted by sender,
and by expert within each sender; they are then sorted by expert.

Only the device knows how many rows each rank sends. The host reads these numbers once in each forward pass, because
they are the sizes of the receive buffers. Therefore a CUDA graph cannot contain the dispatch.

Shapes: m rows of this rank's tokens, m' rows for this rank's experts, r ranks, e experts per rank, h hidden size.
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
    """Plan of one all-to-all dispatch.

    Args:
        group: Ranks over which the experts are divided.
        sent: Number of rows that this rank sends to each rank.
        received: Number of rows that this rank receives from each rank.
        received_by_expert: Permutation that sorts the received rows by expert.
        ends_e: End of each expert's rows in the sorted rows, int32 `[e]`.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    received_by_expert: Permutation
    ends_e: Tensor

    def to_experts(self, rows_mh: Tensor, form: InputFormat | None) -> Tensor | LinearInput:
        """Send rows `[m, h]` to their experts' ranks. Return this rank's rows `[m', h]` by expert, in format `form`."""
        arrived = _AllToAll.apply(rows_mh, self.group, self.sent, self.received)
        return expert_input(arrived, self.received_by_expert, form)

    def to_tokens(self, rows_mh: Tensor) -> Tensor:
        """Send the experts' results `[m', h]` back to the ranks of the tokens. Return `[m, h]` in the order sent."""
        as_received = permute(rows_mh, self.received_by_expert.reverse)
        return _AllToAll.apply(as_received, self.group, self.received, self.sent)


def plan_dispatch(counts: Tensor, group: ProcessGroup) -> TokenDispatch:
    """Plan the dispatch, given this rank's number of rows for each expert of the layer, int64 `[r·e]`. Collective."""
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
