"""Rows of tokens travel to the ranks of their experts and back, by all-to-all, in parts that overlap with computation.

The experts of a rank are cut into parts of equally many. While a rank multiplies the rows of one part, those of the
next arrive and the results of the one before return; in backward likewise, in reverse. A rank's rows are in the order
of parts, of ranks within each, and of experts within these (`in_parts`), so the rows of a part for a rank are next to
each other. What arrives is in the order of senders, and of experts within each; it is put in the order of experts.

How many rows each rank sends is known on the device only. The host reads it, once in each forward pass, since it sizes
the buffers that receive. Therefore a CUDA graph cannot hold the exchange.

Autograd calls backward functions in the reverse order of their forward functions. So what a part begins in backward is
waited for by a function of its own, and the parts after it compute in between:

    forward    dispatch: all parts depart | arrive, compute, return, part by part | collect: wait for all results
    backward   collect: all parts depart | return (waits), compute, arrive, in reverse | dispatch: wait for all

Shapes: m rows of this rank's tokens, m' rows for a part of this rank's experts, r ranks, p parts, e experts of a part,
h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import Work, all_to_all, all_to_all_rows_async
from megafp8.ops.autograd import once_differentiable
from megafp8.ops.permute import Permutation, by_expert, permute

MOST_PARTS = 2


def parts_of(experts: int, ranks: int) -> int:
    """In how many parts the `experts` of each of `ranks` are cut."""
    return 1 if ranks == 1 else next(parts for parts in range(MOST_PARTS, 0, -1) if experts % parts == 0)


def in_parts(experts: int, ranks: int, parts: int, device: torch.device) -> Tensor:
    """The place of each of the layer's `experts` in the order of rows, int64."""
    places = torch.arange(experts, device=device).view(parts, ranks, -1)
    return places.transpose(0, 1).reshape(-1)


class _Transfer:
    """Rows on their way between one matrix `[m, h]`, in the order of parts, and a matrix for each part `[m', h]`."""

    def __init__(self, group: ProcessGroup, sent: list[list[int]], received: list[list[int]]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.whole: Tensor | None = None
        self.parts: list[Tensor | None] = [None] * len(sent)
        self._works: list[tuple[Work, Tensor] | None] = [None] * len(sent)  # with what is sent, which must stay alive

    def _rows(self, part: int) -> slice:
        start = sum(map(sum, self.sent[:part]))
        return slice(start, start + sum(self.sent[part]))

    def start(self, whole_mh: Tensor, part: int) -> Tensor:
        """Send a part's rows of `whole_mh` to their ranks; the matrix that fills until `wait`."""
        rows = whole_mh[self._rows(part)]
        arriving = rows.new_empty(sum(self.received[part]), *rows.shape[1:])
        work = all_to_all_rows_async(arriving, rows, self.sent[part], self.received[part], self.group)
        self._works[part], self.parts[part] = (work, rows), arriving
        return arriving

    def start_back(self, part_mh: Tensor, part: int) -> None:
        """Send a part's rows back to where they came from, into `whole`, which fills until `wait`."""
        if self.whole is None:
            self.whole = part_mh.new_empty(sum(map(sum, self.sent)), *part_mh.shape[1:])
        rows = self.whole[self._rows(part)]
        work = all_to_all_rows_async(rows, part_mh, self.received[part], self.sent[part], self.group)
        self._works[part], self.parts[part] = (work, part_mh), part_mh

    def wait(self, part: int) -> Tensor:
        """The rows of a part, which have arrived or departed."""
        started, rows = self._works[part], self.parts[part]
        assert started is not None
        assert rows is not None
        started[0].wait()
        self._works[part] = self.parts[part] = None
        return rows

    def wait_for_whole(self) -> Tensor:
        """`whole`, to which the rows of all parts have come."""
        for part in range(len(self.sent)):
            self.wait(part)
        whole, self.whole = self.whole, None
        assert whole is not None
        return whole


@dataclass(frozen=True)
class Exchange:
    """Where the rows of this rank's tokens go, part by part.

    `arriving`: int64 `[p, r, e]`, how many rows each rank sends for each expert. `ends_pe`: int32, where the rows of
    each expert of a part end.
    """

    there: _Transfer
    back: _Transfer
    arriving: Tensor
    ends_pe: Tensor

    @cached_property
    def received_by_expert(self) -> list[Permutation]:
        """Of each part, from the order of senders to that of experts. Computed when the first rows are on their way."""
        parts, _, experts = self.arriving.shape
        rows = [sum(of_ranks) for of_ranks in self.there.received]
        numbers = torch.arange(parts * experts, device=self.arriving.device).view(parts, 1, experts)
        of_rows = numbers.expand_as(self.arriving).reshape(-1)
        of_rows = of_rows.repeat_interleave(self.arriving.reshape(-1), output_size=sum(rows))
        whole = by_expert(of_rows.unsqueeze(1), parts * experts)  # one sort for all parts
        return [
            Permutation(whole.order[first:end] - first, whole.inverse[first:end] - first, 1)
            for first, end in pairwise(accumulate(rows, initial=0))
        ]

    def dispatch(self, rows_mh: Tensor) -> tuple[Tensor, ...]:
        """Send `rows_mh`; for each part what `arrived` makes its rows of."""
        return _Dispatch.apply(rows_mh, self.there)

    def arrived(self, arriving_mh: Tensor, part: int) -> Tensor:
        """`[m', h]`: a part's rows, by expert of this rank, once they have arrived."""
        return permute(_Arrive.apply(arriving_mh, self.there, part), self.received_by_expert[part])

    def return_part(self, rows_mh: Tensor, part: int) -> Tensor:
        """Send a part's rows back to where they came from; a number for `collect`."""
        return _Return.apply(permute(rows_mh, self.received_by_expert[part].reverse), self.back, part)

    def collect(self, returned: list[Tensor]) -> Tensor:
        """`[m, h]`: the rows of all parts, once they have come back; `returned` by `return_part` for each."""
        return _Collect.apply(self.back, *returned)


def exchange(counts: Tensor, group: ProcessGroup) -> Exchange:
    """The exchange of rows, of which this rank has `counts` for each expert, int64 `[p, r, e]`. Collective."""
    arriving = all_to_all(counts.transpose(0, 1).contiguous(), group).transpose(0, 1)
    ends_pe = arriving.sum(dim=1).cumsum(dim=1, dtype=torch.int32)
    sent, received = torch.stack([counts.sum(dim=2), arriving.sum(dim=2)]).tolist()
    return Exchange(_Transfer(group, sent, received), _Transfer(group, sent, received), arriving, ends_pe)


def _placeholder(x: Tensor) -> Tensor:
    """A gradient for autograd of x's shape, without memory: the real one is on its way."""
    return x.new_zeros(()).expand(x.shape)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, rows_mh: Tensor, transfer: _Transfer) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return tuple(transfer.start(rows_mh, part) for part in range(len(transfer.sent)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *placeholders: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait_for_whole(), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, arriving_mh: Tensor, transfer: _Transfer, part: int) -> Tensor:
        ctx.transfer, ctx.part = transfer, part
        transfer.wait(part)
        return arriving_mh.view_as(arriving_mh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mh: Tensor) -> tuple[Tensor, None, None]:
        ctx.transfer.start_back(dy_mh.contiguous(), ctx.part)
        return _placeholder(dy_mh), None, None


class _Return(Function):
    @staticmethod
    def forward(ctx: Any, rows_mh: Tensor, transfer: _Transfer, part: int) -> Tensor:
        ctx.transfer, ctx.part = transfer, part
        transfer.start_back(rows_mh, part)
        return rows_mh.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, placeholder: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transfer.wait(ctx.part), None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *returned: Tensor) -> Tensor:
        ctx.transfer, ctx.returned = transfer, returned
        return transfer.wait_for_whole()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mh: Tensor) -> tuple[Tensor | None, ...]:
        dy_mh = dy_mh.contiguous()
        for part in reversed(range(len(ctx.returned))):  # the last is needed first
            ctx.transfer.start(dy_mh, part)
        return None, *(_placeholder(number) for number in ctx.returned)
