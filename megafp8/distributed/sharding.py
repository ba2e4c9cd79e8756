"""What a local parameter is, seen from the whole model.

A rank holds slices. Initialisation, checkpoints, gradient norms and weight decay all have to know what a slice is a
slice *of*, or a model under TP4 would be another model than under TP1. So every parameter carries a `ParamSpec`, and
the one concept in it is the `Piece`: a rectangle of a tensor that has a global name and a global shape. A plain weight
is one piece. A fused weight (q, k, v in one matrix; gate and up in one) is several pieces stacked along dim 0, so each
keeps its own name whatever is fused on this rank.

    initialisation   fills each piece from the stream of (seed, piece.name) at piece.offset
    checkpoint       saves and loads each piece as a rectangle of piece.name
    gradient norm    counts a parameter that several ranks hold only once (`replicated_over_tp`, `is_copy`)

The optimizer may cut once more, over data parallelism, and without regard for rows: a `Fragment` is what one rank
updates of a local parameter.

Nothing here knows ranks or groups: the layers that cut a tensor write down how they cut it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Init:
    """How a tensor starts: `normal` with mean 0 and `std`, `ones` or `zeros`."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True)
class Piece:
    """One rectangle of a global tensor, and the row of the local parameter where it starts."""

    name: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    row: int = 0

    def of(self, local: Tensor) -> Tensor:
        """The view of `local` (shaped like the parameter) that holds this piece."""
        return local.narrow(0, self.row, self.shape[0])


@dataclass(frozen=True)
class ParamSpec:
    """What a local parameter is.

    `reduce_over_tp`: each TP rank computes only its share of the gradient (a norm under sequence parallelism), which
    must be summed over the TP group once a step. `replicated_over_tp`: all TP ranks hold the same values. `is_copy`:
    another pipeline stage holds the original (tied output layer); `num_uses`: how many layers of this stage hand in a
    weight gradient for it in one backward pass.
    """

    pieces: tuple[Piece, ...]
    init: Init
    replicated_over_tp: bool
    reduce_over_tp: bool = False
    weight_decay: bool = True
    is_copy: bool = False
    num_uses: int = 1


@dataclass(frozen=True, eq=False)
class Fragment:
    """Elements `[start, end)` of a local parameter, counted row by row."""

    param: nn.Parameter
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def of(self, local: Tensor) -> Tensor:
        """The flat view of these elements of `local`, which is contiguous and shaped like the parameter."""
        return local.view(-1)[self.start : self.end]


def whole(name: str, shape: Shape) -> tuple[Piece, ...]:
    """The single piece of a parameter that is not cut."""
    return (Piece(name, shape, (0,) * len(shape), shape),)


def cut(name: str, global_shape: Shape, dim: int, rank: int, ranks: int, row: int = 0) -> Piece:
    """This rank's even slice of `global_shape` along `dim`."""
    assert global_shape[dim] % ranks == 0, f"{name}: dim {dim} of {global_shape} cannot be cut into {ranks}"
    length = global_shape[dim] // ranks
    shape = tuple(length if d == dim else n for d, n in enumerate(global_shape))
    offset = tuple(rank * length if d == dim else 0 for d in range(len(global_shape)))
    return Piece(name, global_shape, offset, shape, row)


def stack(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Lay pieces one below the other along dim 0 of one local parameter."""
    stacked, row = [], 0
    for piece in pieces:
        stacked.append(Piece(piece.name, piece.global_shape, piece.offset, piece.shape, row))
        row += piece.shape[0]
    return tuple(stacked)


def set_spec(param: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
    """Attach `spec` to `param` (as `param.spec`) and return the parameter."""
    rows = sum(piece.shape[0] for piece in spec.pieces)
    assert rows == param.shape[0], f"{spec.pieces[0].name}: pieces of {rows} rows, parameter {tuple(param.shape)}"
    param.spec = spec  # type: ignore[attr-defined]
    return param


def spec_of(param: nn.Parameter) -> ParamSpec:
    """The `ParamSpec` of a parameter made by this framework."""
    spec = getattr(param, "spec", None)
    assert isinstance(spec, ParamSpec), "a parameter without a spec: make parameters through megafp8's layers"
    return spec


def rows_of(spec: ParamSpec, first: int, last: int) -> ParamSpec:
    """The spec of rows `[first, last)` of a parameter as a parameter of their own."""
    pieces = []
    for piece in spec.pieces:
        low, high = max(first, piece.row), min(last, piece.row + piece.shape[0])
        if low < high:
            offset = (piece.offset[0] + low - piece.row, *piece.offset[1:])
            shape = (high - low, *piece.shape[1:])
            pieces.append(Piece(piece.name, piece.global_shape, offset, shape, low - first))
    return replace(spec, pieces=tuple(pieces))


def pieces_of(param: nn.Parameter, local: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece of `param` with its view of `local`, a tensor shaped like the parameter."""
    for piece in spec_of(param).pieces:
        yield piece, piece.of(local)
