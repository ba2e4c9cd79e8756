"""Region mappings of tensor and sequence parallelism: a collective forward and its adjoint backward.

They are the boundaries of a region in which ranks hold different slices of an activation (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198):

    function                              forward           backward          outside the region
    copy_to_tensor_parallel               identity          all-reduce        each rank has a partial sum of dx
    reduce_from_tensor_parallel           all-reduce        identity          each rank has a partial sum of y
    gather_from_sequence_parallel         all-gather s      reduce-scatter s  ranks have slices of s
    reduce_scatter_to_sequence_parallel   reduce-scatter s  all-gather s      ranks will have slices of s
    scatter_to_sequence_parallel          slice of s        all-gather s      every rank has the whole tensor
    gather_from_tensor_parallel           all-gather last   slice of last     ranks have slices of the last dim
    scatter_to_tensor_parallel            slice of last     all-gather last   every rank has the whole tensor

The layers of `megafp8.tensor_parallel.layers` overlap the first four with their GEMMs
(`megafp8.distributed.tp_overlap`); these functions are for everything else. Those named `start_...` return a function
that waits for the result. What runs in between overlaps with the collective, and its backward with that of the
collective, which autograd runs in the reverse order.

The sequence is dim 0 (`[s, b, h]`), so its collectives need no copy. `scatter_to_sequence_parallel` is right only where
every rank computed the same whole tensor and its gradient is the union of the slices.

Shapes: s sequence, b micro-batch, h hidden; `t` is the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.distributed import collectives
from megafp8.distributed.collectives import Work

_Collective = Callable[[Tensor, ProcessGroup], Tensor]
_Start = Callable[[Tensor, ProcessGroup], tuple[Tensor, Work]]


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_reduce(x.contiguous().clone(), group)


def _slice(x: Tensor, group: ProcessGroup, dim: int = 0) -> Tensor:
    """This rank's slice of `x` along `dim`."""
    assert x.shape[dim] % group.size() == 0, f"dim {dim} of {tuple(x.shape)} is not a multiple of {group.size()} ranks"
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _slice_last(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n]` -> `[..., n/t]`."""
    return _slice(x, group, -1)


def _gather_last(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n/t]` -> `[..., n]`."""
    return collectives.all_gather(x.contiguous().unsqueeze(0), group).movedim(0, -2).flatten(-2)


class _Mapping(Function):
    """`forward_collective(x)`, with the gradient `backward_collective(dy)`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, forward_collective: _Collective, backward_collective: _Collective
    ) -> Tensor:
        ctx.group, ctx.backward_collective = group, backward_collective
        return forward_collective(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_collective(dy, ctx.group), None, None, None


def _map(x: Tensor, group: ProcessGroup | None, forward: _Collective, backward: _Collective) -> Tensor:
    return _Mapping.apply(x, group, forward, backward) if collectives.size(group) > 1 else x


@dataclass
class _Pending:
    """A running collective between the two halves of a mapping, in forward or in backward."""

    result: Tensor
    work: Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


class _Split:
    """A mapping in two halves, `forward_start` and `backward_start` being what starts its collectives."""

    def __init__(self, group: ProcessGroup, forward_start: _Start, backward_start: _Start) -> None:
        self.group, self.forward_start, self.backward_start = group, forward_start, backward_start
        self.pending: _Pending | None = None

    def take(self) -> Tensor:
        """Wait for the collective that is running."""
        assert self.pending is not None
        result, self.pending = self.pending.wait(), None
        return result


class _Started(Function):
    """Starts the collective, and gives autograd a number in place of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: _Split) -> Tensor:
        ctx.split = split
        split.pending = _Pending(*split.forward_start(x, split.group))
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.split.take(), None


class _Finished(Function):
    """Waits for the collective; in backward, starts that of the gradient."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, split: _Split) -> Tensor:
        ctx.split = split
        ctx.save_for_backward(started)
        return split.take()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.split.pending = _Pending(*ctx.split.backward_start(dy.contiguous(), ctx.split.group))
        return ctx.saved_tensors[0], None


def _start(x: Tensor, group: ProcessGroup | None, forward: _Start, backward: _Start) -> Callable[[], Tensor]:
    if group is None or group.size() == 1:
        return lambda: x
    split = _Split(group, forward, backward)
    started = _Started.apply(x, split)
    return partial(_Finished.apply, started, split)


def _start_all_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Work]:
    (gathered,), work = collectives.all_gather_async([x], group)
    return gathered, work


def start_gather_from_sequence_parallel(x_sbh: Tensor, group: ProcessGroup | None) -> Callable[[], Tensor]:
    """Start `gather_from_sequence_parallel`."""
    return _start(x_sbh, group, _start_all_gather, collectives.reduce_scatter_async)


def start_reduce_scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup | None) -> Callable[[], Tensor]:
    """Start `reduce_scatter_to_sequence_parallel`."""
    return _start(x_sbh, group, collectives.reduce_scatter_async, _start_all_gather)


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a region with the whole `x` on every rank: identity forward, all-reduce of dx backward."""
    return _map(x, group, _identity, _all_reduce)


def reduce_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a region: sum the ranks' partial sums `x` forward, identity backward."""
    return _map(x, group, _all_reduce, _identity)


def gather_from_sequence_parallel(x_sbh: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[s/t, b, h]` -> `[s, b, h]`; backward sums and scatters."""
    return _map(x_sbh, group, collectives.all_gather, collectives.reduce_scatter)


def reduce_scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' partial sums `[s, b, h]` and keep `[s/t, b, h]`; backward gathers."""
    return _map(x_sbh, group, collectives.reduce_scatter, collectives.all_gather)


def scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """Keep this rank's `[s/t, b, h]` of a tensor that all ranks have whole; backward gathers."""
    return _map(x_sbh, group, _slice, collectives.all_gather)


def gather_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n/t]` -> `[..., n]`; backward keeps this rank's slice."""
    return _map(x, group, _gather_last, _slice_last)


def scatter_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n]` -> `[..., n/t]`, this rank's slice; backward gathers."""
    return _map(x, group, _slice_last, _gather_last)
