"""All-to-all dispatch of token rows to the ranks of their experts, and back.

A rank sorts its rows by expert, so the rows for each rank's experts are adjacent. Received rows are sorted by sender,
and by expert within each sender; they are then sorted by expert.

Only the device knows how many rows each rank sends to each rank. Outside CUDA graphs the host reads these numbers once
in each forward pass, because they are the sizes of the buffers. In a graph, the rows from one rank to another have a
fixed room (`layers.experts.own_rows.RowBound`), and unused places hold undefined rows. All ranks know the numbers of
all pairs of ranks, so that sender and receiver compute the same rooms.

Shapes: n tokens of this rank, k experts per token, m places for rows of this rank's tokens, m' places for rows of this
rank's experts, r ranks, e experts per rank, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.layers.experts.own_rows import RowBound
from megafp8.layers.experts.permute_op import Permutation, by_expert, expert_input, permute
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.parallel.collectives import all_gather, all_to_all_rows


@dataclass(frozen=True)
class TokenDispatch:
    """Plan of one all-to-all dispatch.

    Args:
        group: Ranks over which the experts are divided.
        by_rank: Permutation of this rank's choices to the places of rows `[m]`.
        sent: Number of places that this rank sends to each rank.
        received: Number of places that this rank receives from each rank.
        received_by_expert: Permutation that sorts the received rows by expert.
        ends_e: End of each expert's rows in the sorted rows, int32 `[e]`.
    """

    group: ProcessGroup
    by_rank: Permutation
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


def plan_dispatch(
    experts_nk: Tensor, num_experts: int, group: ProcessGroup, bound: RowBound, layer: str
) -> TokenDispatch:
    """Plan the dispatch of the choices of this rank's tokens. Collective.

    Args:
        experts_nk: Experts of each token, int64; `num_experts` marks a choice without a row.
        num_experts: Number of experts of the layer.
        group: Ranks over which the experts are divided.
        bound: Sizes of the buffers.
        layer: Name of the layer.
    """
    rank, ranks = group.rank(), group.size()
    (n, k), per_rank = experts_nk.shape, num_experts // ranks
    choices, choice_ends_e = by_expert(experts_nk, num_experts)
    counts_e = torch.diff(choice_ends_e, prepend=choice_ends_e.new_zeros(1))
    counts_rre = all_gather(counts_e, group).view(ranks, ranks, per_rank)  # by sender, receiver and expert
    pairs_rr = counts_rre.sum(dim=2)
    rooms = bound.rooms(layer, pairs_rr.flatten(), n * min(k, per_rank))
    sent = rooms.counts[rank * ranks : (rank + 1) * ranks]
    received = rooms.counts[rank::ranks]
    rooms_rr = rooms.on_device.view(ranks, ranks)
    by_rank = _in_places(choices, experts_nk.flatten() // per_rank, pairs_rr[rank], rooms_rr[rank], sum(sent))
    sender_m, place_m = _places(rooms_rr[:, rank], sum(received))
    ends_re = counts_rre[:, rank].cumsum(dim=1)
    experts_m = (place_m.unsqueeze(1) >= ends_re[sender_m]).sum(dim=1)
    received_by_expert, ends_e = by_expert(experts_m.unsqueeze(1), per_rank)
    received_by_expert = received_by_expert._replace(num_rows=ends_e[-1:])
    return TokenDispatch(group, by_rank, sent, received, received_by_expert, ends_e)


def _places(rooms_r: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each of m places that ranks have one after the other, and the place among the rank's own."""
    ends_r = rooms_r.cumsum(dim=0)
    places_m = torch.arange(m, device=rooms_r.device)
    rank_m = torch.searchsorted(ends_r, places_m, right=True)
    return rank_m, places_m - (ends_r - rooms_r)[rank_m]


def _in_places(choices: Permutation, rank_c: Tensor, rows_r: Tensor, rooms_r: Tensor, m: int) -> Permutation:
    """Return the permutation of choices to m places, in which each rank has room for `rooms_r` rows.

    Choices without a row or without room get the place m, which is not one of them. Places without a choice have the
    first choice.

    Args:
        choices: Permutation of the choices, sorted by expert.
        rank_c: Rank of each choice; the number of ranks marks a choice without a row.
        rows_r: Number of rows for each rank.
        rooms_r: Number of places of each rank.
        m: Number of all places.
    """
    shift_r = F.pad((rooms_r.cumsum(dim=0) - rooms_r) - (rows_r.cumsum(dim=0) - rows_r), (0, 1), value=m)
    ends_r = F.pad(rooms_r.cumsum(dim=0), (0, 1))
    inverse_c = choices.inverse + shift_r[rank_c]
    inverse_c = torch.where(inverse_c < ends_r[rank_c], inverse_c, m)
    order = inverse_c.new_zeros(m + 1)
    order[inverse_c] = torch.arange(len(inverse_c), device=order.device)
    return Permutation(order[:m], inverse_c, choices.top_k, rows_r.new_full((1,), m, dtype=torch.int32))


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x_mh: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return all_to_all_rows(x_mh, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mh: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_rows(dy_mh, ctx.received, ctx.sent, ctx.group), None, None, None
