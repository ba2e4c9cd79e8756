"""Region mappings of tensor and sequence parallelism: a collective forward and its adjoint backward.

They are the boundaries of a region in which ranks hold different slices of an activation (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198):

    function                              forward           backward          outside the region
    copy_to_tensor_parallel               identity          all-reduce        each rank has a partial sum of dx
    reduce_from_tensor_parallel           all-reduce        identity          each rank has a partial sum of y
    gather_from_sequence_parallel         all-gather s      reduce-scatter s  ranks have slices of s
    reduce_scatter_to_sequence_parallel   reduce-scatter s  all-gather s      ranks will have slices of s
    scatter_to_sequence_parallel          slice of s        all-gather s      every rank has the whole tensor

The layers of `megafp8.parallel.tensor.layers` overlap the first four with their GEMMs (`megafp8.parallel.tp_overlap`);
these functions are for all other modules. Functions named `start_...` return a function that waits for the result.
Operations in between overlap with the collective. In backward, which autograd runs in reverse order, their backward
overlaps with the collective's backward. So does the function `during_backward`, which backward calls when its
collective is under way.

The sequence is dim 0 (`[s, b, h]`), so its collectives need no copy. `scatter_to_sequence_parallel` is correct only if
every rank computed the same whole tensor and its gradient is the union of the slices.

Shapes: s sequence, b micro-batch, h hidden; `t` is the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.parallel import collectives
from megafp8.parallel.collectives import DONE
from megafp8.parallel.tp_overlap import AllGatherHandle, Product, TPOverlap

_Collective = Callable[[Tensor, ProcessGroup], Tensor]
_Start = Callable[[Tensor], Callable[[], Tensor]]
"""Function that starts a collective, and returns a function that waits for its result."""


def nothing() -> None:
    """Do nothing while a collective is under way."""


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return `x` as a view, which autograd accepts as a new output."""
    return x.view_as(x)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the ranks' `x`."""
    return collectives.all_reduce(x.contiguous().clone(), group)


def _slice(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's slice `[s/t, ...]` of `[s, ...]`."""
    assert len(x) % group.size() == 0, f"dim 0 of {tuple(x.shape)} is not a multiple of {group.size()} ranks"
    return x.chunk(group.size())[group.rank()].contiguous()


class _Mapping(Function):
    """Autograd Function that applies `forward_collective` to x, and `backward_collective` to dy."""

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
    """Apply the mapping, or return `x` if the group has one rank."""
    return _Mapping.apply(x, group, forward, backward) if collectives.size(group) > 1 else x


class _Split:
    """Mapping that is split into a start and a wait. `forward` and `backward` start its collectives."""

    def __init__(self, forward: _Start, backward: _Start, during_backward: Callable[[], None]) -> None:
        self.forward, self.backward, self.during_backward = forward, backward, during_backward
        self._wait: Callable[[], Tensor] | None = None  # waits for the running collective

    def start(self, start: _Start, x: Tensor) -> None:
        """Start a collective of `x`."""
        self._wait = start(x.contiguous())

    def wait(self) -> Tensor:
        """Wait for the running collective and return its result."""
        assert self._wait is not None
        wait, self._wait = self._wait, None
        return wait()


class _Started(Function):
    """Autograd Function that starts the collective, and returns a scalar in place of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: _Split) -> Tensor:
        ctx.split = split
        split.start(split.forward, x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.split.wait(), None


class _Finished(Function):
    """Autograd Function that waits for the collective; its backward starts the gradient's collective."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, split: _Split) -> Tensor:
        ctx.split = split
        ctx.save_for_backward(started)
        return split.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (started,) = ctx.saved_tensors  # may recompute a block with its exchanges, so it comes before the exchange here
        ctx.split.start(ctx.split.backward, dy)
        ctx.split.during_backward()
        return started, None


def _start(x: Tensor, forward: _Start, backward: _Start, during_backward: Callable[[], None]) -> Callable[[], Tensor]:
    """Start the mapping of `x`, and return a function that finishes it."""
    split = _Split(forward, backward, during_backward)
    started = _Started.apply(x, split)
    return partial(_Finished.apply, started, split)


def _start_gather(overlap: TPOverlap, x: Tensor) -> Callable[[], Tensor]:
    """Start to gather `x` with `overlap`."""
    handle = overlap.gather([x])
    return lambda: handle.wait()[0]


def _start_sum(overlap: TPOverlap, x: Tensor) -> Callable[[], Tensor]:
    """Start to sum `x` over the ranks with `overlap`."""

    def rows(chunk: slice, out: Tensor | None) -> Tensor:
        return x[chunk] if out is None else out.copy_(x[chunk])

    whole = AllGatherHandle([x], [(slice(0, len(x)), DONE.wait)])
    return overlap.sum(Product(whole, x.shape[1], x.dtype, rows)).wait


def start_gather_from_sequence_parallel(
    x_mn: Tensor, overlap: TPOverlap, during_backward: Callable[[], None] = nothing
) -> Callable[[], Tensor]:
    """Start `gather_from_sequence_parallel` of a matrix with `overlap`; return a function that waits for it."""
    if overlap.group is None:
        return lambda: x_mn
    return _start(x_mn, partial(_start_gather, overlap), partial(_start_sum, overlap), during_backward)


def start_reduce_scatter_to_sequence_parallel(
    x_mn: Tensor, overlap: TPOverlap, during_backward: Callable[[], None] = nothing
) -> Callable[[], Tensor]:
    """Start `reduce_scatter_to_sequence_parallel` of a matrix with `overlap`; return a function that waits for it."""
    if overlap.group is None:
        return lambda: x_mn
    return _start(x_mn, partial(_start_sum, overlap), partial(_start_gather, overlap), during_backward)


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a region with the whole `x` on every rank: identity forward, all-reduce of dx backward."""
    return _map(x, group, _identity, _all_reduce)


def reduce_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a region: sum the ranks' partial sums `x` forward, identity backward."""
    return _map(x, group, _all_reduce, _identity)


def gather_from_sequence_parallel(x_sbh: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather `[s/t, b, h]` to `[s, b, h]`; backward reduce-scatters."""
    return _map(x_sbh, group, collectives.all_gather, collectives.reduce_scatter)


def reduce_scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' partial sums `[s, b, h]` and keep `[s/t, b, h]`; backward gathers."""
    return _map(x_sbh, group, collectives.reduce_scatter, collectives.all_gather)


def scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """Keep this rank's `[s/t, b, h]` of a tensor that every rank has whole; backward gathers."""
    return _map(x_sbh, group, _slice, collectives.all_gather)
