"""The region mappings of tensor parallelism, and their sequence-parallel pairs.

A tensor-parallel block is a region in which ranks hold different slices of an activation. What enters and leaves it is
a collective forward and its adjoint backward, and these are all there are (Shoeybi et al. 2019,
arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198):

    function                              forward           backward          enters a region where
    copy_to_tensor_parallel               identity          all-reduce        each rank adds its share of dx
    reduce_from_tensor_parallel           all-reduce        identity          y is the sum of the ranks' shares
    gather_from_sequence_parallel         all-gather s      reduce-scatter s  ranks held slices of s
    reduce_scatter_to_sequence_parallel   reduce-scatter s  all-gather s      ranks will hold slices of s
    scatter_to_sequence_parallel          slice of s        all-gather s      every rank had the whole tensor
    gather_from_tensor_parallel           all-gather last   slice of last     ranks held slices of the last dim

The layers of `megafp8.tensor_parallel.layers` have the first four inside their matrix products, where they overlap
(`megafp8.distributed.tp_overlap`); these are for what stands beside a product.

The sequence is dim 0 (`[s, b, h]`), so its collectives need no copy. `scatter_to_sequence_parallel` is right only where
every rank computed the same whole tensor and its gradient is the union of the slices.

Shapes: s sequence, b micro-batch, h hidden; `t` is the tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_gather, all_reduce, reduce_scatter


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's slice of `x` along `dim`."""
    assert x.shape[dim] % group.size() == 0, f"dim {dim} of {tuple(x.shape)} cannot be cut into {group.size()}"
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _gather_last(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n/t]` -> `[..., n]`."""
    gathered = all_gather(x.contiguous().unsqueeze(0), group)
    return gathered.movedim(0, -2).flatten(-2)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy.contiguous().clone(), ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.group), None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.group), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _slice(x, group, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.group), None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_last(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _slice(dy, ctx.group, -1), None


class _ScatterLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _slice(x, group, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _gather_last(dy, ctx.group), None


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a region with the whole `x` on every rank: identity forward, all-reduce of dx backward."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def reduce_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a region: sum the ranks' shares of `x` forward, identity backward."""
    return _Reduce.apply(x, group) if group.size() > 1 else x


def gather_from_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """`[s/t, b, h]` -> `[s, b, h]`; backward sums and scatters."""
    return _GatherSequence.apply(x_sbh, group) if group.size() > 1 else x_sbh


def reduce_scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' shares `[s, b, h]` and keep `[s/t, b, h]`; backward gathers."""
    return _ReduceScatterSequence.apply(x_sbh, group) if group.size() > 1 else x_sbh


def scatter_to_sequence_parallel(x_sbh: Tensor, group: ProcessGroup) -> Tensor:
    """Keep this rank's `[s/t, b, h]` of a tensor that all ranks have whole; backward gathers."""
    return _ScatterSequence.apply(x_sbh, group) if group.size() > 1 else x_sbh


def gather_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n/t]` -> `[..., n]`; backward keeps this rank's slice."""
    return _GatherLast.apply(x, group) if group.size() > 1 else x


def scatter_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[..., n]` -> `[..., n/t]`, this rank's slice; backward gathers."""
    return _ScatterLast.apply(x, group) if group.size() > 1 else x
