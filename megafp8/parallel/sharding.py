"""Which part of which global tensor a local parameter holds.

Initialization, checkpoints, gradient norms and weight decay need to know what a rank's parameter is a shard *of*. So
every parameter carries a `ParamSpec` with one or more `ParamShard`s: rectangles of tensors that have a global name and
a global shape. A plain weight is one shard. A fused weight (q, k, v; gate and up) is several, stacked along dim 0, so
that each keeps its own name.

    initialization   fills each shard from the stream of (seed, shard.name) at shard.offset
    checkpoint       saves and loads each shard as a rectangle of shard.name
    gradient norm    counts a parameter that several ranks hold once (`replicated_over_tp`, `is_copy`)

ZeRO shards a local parameter again, over data parallelism and regardless of rows: a `FlatShard` is a flat range of its
elements. Nothing here knows ranks or groups: the layers record how they shard.
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
    """Initial values: `normal` with mean 0 and `std`, `ones`, `zeros`, `log_uniform`: the logarithms of numbers that
    are uniform from `low` to `high`, or `inverse_softplus`: numbers whose softplus lies from `low` to `high`, where its
    logarithm is uniform."""

    kind: Literal["normal", "ones", "zeros", "log_uniform", "inverse_softplus"]
    std: float = 0.0
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class ParamShard:
    """A rectangle of a global tensor, and the row of the local parameter where it starts."""

    name: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    row: int = 0

    def view(self, local: Tensor) -> Tensor:
        """The rows of `local` (shaped like the parameter) that hold this shard."""
        return local.narrow(0, self.row, self.shape[0])


@dataclass(frozen=True)
class ParamSpec:
    """Shards of a local parameter, and how the parameter is initialized, reduced and updated.

    Attributes:
        reduce_over_tp: Each TP rank computes a partial gradient (a norm under sequence parallelism), which is summed
            over the TP group once a step.
        replicated_over_tp: All TP ranks hold the same values.
        matrix: Each shard is the weight of a linear layer, which maps activations as a whole: what Muon orthogonalizes
            in blocks and muP scales with the width. Not tables (embeddings, positions, biases by distance), and not
            weights with independent rows (routers, gates with one output, mappings of residual streams).
        weight_decay: Weight decay applies by default.
        is_copy: Another pipeline stage holds the original (shared embedding).
        num_uses: Number of layers of this stage that contribute a gradient in one backward pass.
        expert: Weights of experts, divided over expert parallelism; their gradients are summed over the ranks that hold
            the same experts, not over data parallelism.
    """

    shards: tuple[ParamShard, ...]
    init: Init
    replicated_over_tp: bool
    reduce_over_tp: bool = False
    matrix: bool = False
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
        """These elements of `local` (contiguous, shaped like the parameter) as a flat view."""
        return local.view(-1)[self.start : self.end]


def unsharded(name: str, shape: Shape) -> tuple[ParamShard, ...]:
    """The only shard of a parameter that every rank holds completely."""
    return (ParamShard(name, shape, (0,) * len(shape), shape),)


def shard_dim(name: str, global_shape: Shape, dim: int, rank: int, ranks: int) -> ParamShard:
    """The shard of `rank` when `global_shape` is split evenly along `dim`."""
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
    """The spec of rows `[first, last)` of a parameter as a parameter of their own.

    A parameter of no rows, as FSDP makes where there are more ranks than rows, has one rectangle of no rows, so that
    it has the name and the kind (embedding, matrix, vector) that the other ranks' rows have.
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
    """A parameter of `shards` one after the other along dim 0, not initialized; `spec`: fields of its `ParamSpec`."""
    pieces = stack_rows(shards)
    shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    return set_spec(nn.Parameter(torch.empty(shape, dtype=dtype, device=device)), ParamSpec(pieces, init, **spec))


def spec_of(param: nn.Parameter) -> ParamSpec:
    """The `ParamSpec` of a parameter made by this framework."""
    spec = getattr(param, "spec", None)
    assert isinstance(spec, ParamSpec), "a parameter without a spec: make parameters through megafp8's layers"
    return spec


def shards_of(param: nn.Parameter, local: Tensor) -> Iterator[tuple[ParamShard, Tensor]]:
    """Each shard of `param` that has rows, with its view of `local`, a tensor shaped like the parameter."""
    for shard in spec_of(param).shards:
        if shard.shape[0]:
            yield shard, shard.view(local)


class Box(NamedTuple):
    """A part of a `ParamShard`, of `shape`, that is elements `[start, end)` of a `FlatShard`, counted from its start.

    `offset`: of its first element in the global tensor.
    """

    piece: ParamShard
    offset: Shape
    shape: Shape
    start: int
    end: int


def boxes_of(shard: FlatShard) -> Iterator[Box]:
    """What a flat shard has of each global tensor, in the order of its elements."""
    row = math.prod(shard.param.shape[1:])
    for piece in spec_of(shard.param).shards:
        first = piece.row * row
        start, end = max(shard.start, first), min(shard.end, first + math.prod(piece.shape))
        at = start - shard.start
        for low, shape in boxes(piece.shape, start - first, end - first):
            size = math.prod(shape)
            yield Box(piece, tuple(o + n for o, n in zip(piece.offset, low)), shape, at, at + size)
            at += size


def boxes(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Elements `[start, end)` of a tensor of `shape`, in row-major order, as boxes of (first index, shape).

    For d dims there are at most 2 d - 1, in the order of the elements; none where `start >= end`.
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
