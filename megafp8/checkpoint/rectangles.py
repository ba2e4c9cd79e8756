"""The local part of a global tensor, in global coordinates.

A checkpoint knows no ranks and no layouts. It holds tensors with global names and global shapes; a rank saves the
rectangles of them that it has, and loads the rectangles that it wants. Where the wanted rectangles are not the saved
ones, torch.distributed.checkpoint intersects the two, so loading into another TP×PP×DP layout is the same code as
loading into the same one.

A rank may have a part of its slice only: a flat run of elements, regardless of rows, where the optimizer is sharded.
Of a matrix that is at most three rectangles: the rest of a row, whole rows, the beginning of a row. So sharded state
loads into unsharded, or into other shards, like anything else.

`Rectangles` is what such a checkpoint takes as the value of one name. It speaks torch's protocol for objects that are
more than one tensor (`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`; compare torch's
`LocalShardsWrapper`, which is a tensor subclass, and this is not). The views may be strided slices of a fused
parameter: they are copied from and into in place.

Several ranks may hold the same rectangle (data parallelism, norms under TP, the tied output layer). It is written once,
by the rank with the least to write, and loaded by all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megafp8.distributed.sharding import FlatShard, ParamShard, Shape, shards_of, spec_of


class Rectangle(NamedTuple):
    """A view of local memory, and where in the global tensor its first element lies."""

    offset: Shape
    view: Tensor


class Rectangles:
    """The part of one global tensor that this rank holds: rectangles of `global_shape`, all of `dtype`.

    Rectangles may repeat (two local parameters that hold the same values): one is saved, all are loaded.
    """

    def __init__(self, global_shape: Shape, dtype: torch.dtype, parts: Iterable[Rectangle] = ()) -> None:
        self.global_shape = tuple(global_shape)
        self.dtype = dtype
        self.parts: list[Rectangle] = []
        for offset, view in parts:
            self.add(offset, view)

    @classmethod
    def whole(cls, tensor: Tensor) -> Rectangles:
        """A tensor that is not cut."""
        return cls(tuple(tensor.shape), tensor.dtype, [Rectangle((0,) * tensor.dim(), tensor)])

    def add(self, offset: Shape, view: Tensor) -> None:
        """Take `view`, which starts at `offset` of the global tensor, into the local part."""
        assert view.dtype == self.dtype, f"a rectangle of {view.dtype} in a tensor of {self.dtype}"
        assert len(offset) == view.dim() == len(self.global_shape), f"{offset}, {view.shape}, {self.global_shape}"
        inside = all(o >= 0 and o + n <= total for o, n, total in zip(offset, view.shape, self.global_shape))
        assert inside, f"{tuple(view.shape)} at {offset} leaves {self.global_shape}"
        self.parts.append(Rectangle(tuple(offset), view.detach()))

    # --- torch.distributed.checkpoint's protocol ---

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        once = dict(reversed(self.parts))
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=view.size()),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.global_shape),
                ),
            )
            for offset, view in once.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), view.size()) for offset, view in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view that starts at `index.offset`.

        `index.index` is our own count when loading (and tells repeated rectangles apart), but the count over all ranks
        when saving: the offset decides.
        """
        wanted = tuple(index.offset or ())
        if index.index is not None and index.index < len(self.parts) and self.parts[index.index].offset == wanted:
            return self.parts[index.index].view
        return next(view for offset, view in self.parts if offset == wanted)


def as_rectangles(tensors: Mapping[str, Rectangles | Tensor]) -> dict[str, Rectangles]:
    """`tensors` with those that are not cut wrapped."""
    return {name: Rectangles.whole(value) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def collect(
    params: Iterable[nn.Parameter], tensors: Callable[[nn.Parameter], Tensor], prefix: str
) -> dict[str, Rectangles]:
    """The pieces of `params`, grouped by global name: `{prefix + piece.name: Rectangles}`.

    `tensors` gives the tensor to look at, shaped like the parameter: the parameter itself, or its optimizer state. The
    result holds views, no copies, so it can be made once and saved many times.
    """
    state: dict[str, Rectangles] = {}
    for param in params:
        for piece, view in shards_of(param, tensors(param)):
            _add(state, prefix, piece, piece.offset, view)
    return state


def collect_fragments(fragments: Iterable[tuple[FlatShard, Tensor]], prefix: str) -> dict[str, Rectangles]:
    """The same of fragments of parameters, each with a flat tensor of its length to look at."""
    state: dict[str, Rectangles] = {}
    for fragment, flat in fragments:
        assert flat.shape == (fragment.end - fragment.start,)
        row = math.prod(fragment.param.shape[1:])
        for piece in spec_of(fragment.param).shards:
            first = piece.row * row
            start, end = max(fragment.start, first), min(fragment.end, first + math.prod(piece.shape))
            for low, shape in boxes(piece.shape, start - first, end - first):
                at = first + _flat_index(low, piece.shape) - fragment.start
                view = flat[at : at + math.prod(shape)].view(shape)
                _add(state, prefix, piece, tuple(o + n for o, n in zip(piece.offset, low)), view)
    return state


def boxes(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Elements `[start, end)` of a tensor of `shape`, counted row by row, as boxes: each its first index and its shape.

    Along d dims there are at most 2 d - 1, in the order of the elements; none where `start >= end`.
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


def _flat_index(index: Shape, shape: Shape) -> int:
    flat = 0
    for i, n in zip(index, shape):
        flat = flat * n + i
    return flat


def _add(state: dict[str, Rectangles], prefix: str, piece: ParamShard, offset: Shape, view: Tensor) -> None:
    """Note that `view`, a part of `piece`, lies at `offset` of the piece's global tensor."""
    name = prefix + piece.name
    if name not in state:
        state[name] = Rectangles(piece.global_shape, view.dtype)
    assert state[name].global_shape == piece.global_shape, f"{name}: two global shapes on one rank"
    state[name].add(offset, view)
