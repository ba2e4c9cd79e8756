"""Description of the part of a global tensor that a local parameter holds.

Initialization, checkpoints, gradient norms and weight decay need to know which global tensor a rank's parameter is a
shard of. Every parameter therefore carries a `ParamSpec` with one or more `ParamShard`s: rectangles of tensors that
have a global name and a global shape. A plain weight is one shard. A fused weight (q, k, v; gate and up) has several
shards, stacked along dim 0, so that each keeps its name.

    initialization   fills each shard from the stream of (seed, shard.name) at shard.offset
    checkpoint       saves and loads each shard as a rectangle of shard.name
    gradient norm    counts a parameter that several ranks hold once (`replicated_over_tp`, `is_copy`)

ZeRO shards a local parameter again, over data parallelism and regardless of rows: a `FlatShard` is a flat range of its
elements. This module knows nothing about ranks or groups: layers record how they shard their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Init:
    """Distribution of a parameter's initial values.

    Attributes:
        kind: `normal` with mean 0 and `std`; `ones`; `zeros`; `log_range`, logarithms of 1, 2, 3, ... along the last
            dim; `log_uniform`, logarithms of numbers that are uniform from `low` to `high`; or `inverse_softplus`,
            numbers with a softplus between `low` and `high` that has a uniform logarithm.
    """

    kind: Literal["normal", "ones", "zeros", "log_range", "log_uniform", "inverse_softplus"]
    std: float = 0.0
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class ParamShard:
    """Rectangle of a global tensor, and the row of the local parameter where it starts.

    `heads` are the numbers of rows of the matrices of an attention head, which repeat along dim 0 of the global tensor.
    It is empty if the rows do not belong to heads.
    """

    name: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    row: int = 0
    heads: tuple[int, ...] = ()

    def view(self, local: Tensor) -> Tensor:
        """Return the rows of `local` (shaped like the parameter) that hold this shard."""
        return local.narrow(0, self.row, self.shape[0])

    def matrix_rows(self, *, per_head: bool) -> list[range]:
        """Return the rows of each matrix in the global tensor. With `per_head`, heads have separate matrices.

        A tensor with three dims is a stack of matrices.
        """
        rows = self.global_shape[0]
        pattern = (1,) if len(self.global_shape) > 2 else self.heads if per_head and self.heads else (rows,)
        assert rows % sum(pattern) == 0, f"{self.name}: heads of {pattern} rows do not divide {rows}"
        sizes = pattern * (rows // sum(pattern))
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes))]


@dataclass(frozen=True)
class ParamSpec:
    """Shards of a local parameter, and how the parameter is initialized, reduced and updated.

    Attributes:
        shards: Shards, one after the other along dim 0.
        init: Distribution of the initial values.
        replicated_over_tp: Whether all TP ranks hold the same values.
        reduce_over_tp: Whether each TP rank computes a partial gradient (a norm under sequence parallelism), which is
            summed over the TP group once per step.
        matrix: Whether each shard is the weight of a linear layer that maps whole activations: Muon orthogonalizes
            these weights in blocks, and muP scales them with the width. False for tables (embeddings, positions, biases
            by distance) and for weights with independent rows (routers, gates with one output, mappings of residual
            streams).
        scores: Whether each row computes a score of a token from the residual stream (routers, gates of shared
            experts): muP divides the initial values and the learning rate of these weights by the width.
        weight_decay: Whether weight decay applies by default.
        is_copy: Whether another pipeline stage holds the original (shared embedding).
        num_uses: Number of gradients that layers of this stage deliver in one backward pass; 0 if it is not known, and
            the gradient is complete at the end of the step.
        expert: Whether this is a weight of experts, divided over expert parallelism. Its gradients are summed over the
            ranks that hold the same experts, not over data parallelism.
    """

    shards: tuple[ParamShard, ...]
    init: Init
    replicated_over_tp: bool
    reduce_over_tp: bool = False
    matrix: bool = False
    scores: bool = False
    weight_decay: bool = True
    is_copy: bool = False
    num_uses: int = 1
    expert: bool = False


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements `[start, end)` of a local parameter in row-major order."""

    param: nn.Parameter
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def view(self, local: Tensor) -> Tensor:
        """Return these elements of `local` (contiguous, shaped like the parameter) as a flat view."""
        return local.view(-1)[self.start : self.end]


def unsharded(name: str, shape: Shape) -> tuple[ParamShard, ...]:
    """Return the only shard of a parameter that every rank holds completely."""
    return (ParamShard(name, shape, (0,) * len(shape), shape),)


def shard_dim(name: str, global_shape: Shape, dim: int, rank: int, ranks: int) -> ParamShard:
    """Return the shard of `rank` when `global_shape` is split evenly along `dim`."""
    assert global_shape[dim] % ranks == 0, f"{name}: dim {dim} of {global_shape} is not a multiple of {ranks} ranks"
    length = global_shape[dim] // ranks
    shape = tuple(length if d == dim else n for d, n in enumerate(global_shape))
    offset = tuple(rank * length if d == dim else 0 for d in range(len(global_shape)))
    return ParamShard(name, global_shape, offset, shape)


def stack_rows(shards: Sequence[ParamShard]) -> tuple[ParamShard, ...]:
    """Place shards one after another along dim 0 of one local parameter."""
    ends = accumulate(shard.shape[0] for shard in shards)
    return tuple(replace(shard, row=end - shard.shape[0]) for shard, end in zip(shards, ends))


def slice_rows(spec: ParamSpec, first: int, last: int) -> ParamSpec:
    """Return the spec of rows `[first, last)` of a parameter as a separate parameter.

    FSDP makes parameters without rows if there are more ranks than rows. Such a parameter has one rectangle without
    rows, so that its name and kind (embedding, matrix, vector) match the other ranks' rows.
    """
    shards: list[ParamShard] = []
    for shard in spec.shards:
        low, high = max(first, shard.row), min(last, shard.row + shard.shape[0])
        if low < high or (first == last and not shards):
            start = min(max(first - shard.row, 0), shard.shape[0])
            offset = (shard.offset[0] + start, *shard.offset[1:])
            shards.append(
                replace(shard, offset=offset, shape=(max(high - low, 0), *shard.shape[1:]), row=max(low - first, 0))
            )
    return replace(spec, shards=tuple(shards))


def set_spec(param: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
    """Attach `spec` to `param` (as `param.spec`) and return the parameter."""
    rows = sum(shard.shape[0] for shard in spec.shards)
    assert rows == param.shape[0], f"{spec.shards[0].name}: shards of {rows} rows, parameter {tuple(param.shape)}"
    param.spec = spec  # type: ignore[attr-defined]
    return param


def empty_parameter(
    shards: Sequence[ParamShard], init: Init, dtype: torch.dtype, device: torch.device, **spec: Any
) -> nn.Parameter:
    """Allocate a parameter for `shards`, one after the other along dim 0, without initializing it.

    `spec` are further fields of the parameter's `ParamSpec`.
    """
    stacked = stack_rows(shards)
    shape = (sum(shard.shape[0] for shard in stacked), *stacked[0].shape[1:])
    return set_spec(nn.Parameter(torch.empty(shape, dtype=dtype, device=device)), ParamSpec(stacked, init, **spec))


def spec_of(param: nn.Parameter) -> ParamSpec:
    """Return the `ParamSpec` of a parameter made by this framework."""
    spec = getattr(param, "spec", None)
    assert isinstance(spec, ParamSpec), "a parameter without a spec: make parameters through megafp8's layers"
    return spec


def shards_of(param: nn.Parameter, local: Tensor) -> Iterator[tuple[ParamShard, Tensor]]:
    """Yield each shard of `param` that has rows, with its view of `local`, a tensor shaped like the parameter."""
    for shard in spec_of(param).shards:
        if shard.shape[0]:
            yield shard, shard.view(local)


class Box(NamedTuple):
    """Part of a `ParamShard` that is a contiguous range of elements of a `FlatShard`.

    Attributes:
        piece: Shard that contains the box.
        offset: Index of the box's first element in the global tensor.
        shape: Shape of the box.
        start, end: Range of elements, counted from the start of the flat shard.
    """

    piece: ParamShard
    offset: Shape
    shape: Shape
    start: int
    end: int


def boxes_of(shard: FlatShard) -> Iterator[Box]:
    """Yield the boxes of global tensors that make up a flat shard, in the order of its elements."""
    row = math.prod(shard.param.shape[1:])
    for param_shard in spec_of(shard.param).shards:
        first = param_shard.row * row
        start, end = max(shard.start, first), min(shard.end, first + math.prod(param_shard.shape))
        at = start - shard.start
        for low, shape in boxes(param_shard.shape, start - first, end - first):
            size = math.prod(shape)
            yield Box(param_shard, tuple(o + n for o, n in zip(param_shard.offset, low)), shape, at, at + size)
            at += size


def boxes(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield elements `[start, end)` of a tensor of `shape`, in row-major order, as boxes of (first index, shape).

    A tensor with d dims gives at most 2 d - 1 boxes, in the order of the elements, and none if `start >= end`.
    """
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    (first, skipped), (last, left) = divmod(start, row), divmod(end, row)
    if skipped:
        stop = end - first * row if first == last else row
        yield from (((first, *low), (1, *box)) for low, box in boxes(shape[1:], skipped, stop))
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if left and first <= last:
        yield from (((last, *low), (1, *box)) for low, box in boxes(shape[1:], 0, left))
