"""Local parts of global tensors, in global coordinates.

A checkpoint holds tensors with global names and global shapes, and does not depend on ranks or layouts. A rank saves
the rectangles it has. To load, it intersects the stored rectangles with the rectangles it needs. So the same code loads
into the same layout and into any other TP×PP×DP layout.

A sharded optimizer holds a flat range of a parameter's elements, regardless of rows. In a matrix, such a range is at
most three rectangles: the rest of a row, whole rows, and the beginning of a row. So sharded state is resharded like
everything else.

`Rectangles` is the value of one name in a checkpoint. To be saved, it implements torch's protocol for objects that
contain more than one tensor (`__create_write_items__`, `__get_tensor_shard__`; torch's `LocalShardsWrapper`, a tensor
subclass, does the same). The views may be strided slices of a fused parameter; data is copied from and to them
directly.

Several ranks may hold the same rectangle (data parallelism, norms under TP, the tied output layer). The rank with the
least to write writes it, once, and all ranks load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megafp8.parallel.sharding import FlatShard, ParamShard, Shape, boxes_of, shards_of


class TensorInfo(NamedTuple):
    """Global shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Rectangle(NamedTuple):
    """View of local memory, and the global index of its first element."""

    offset: Shape
    view: Tensor


class Rectangles:
    """Rectangles of one global tensor, of `global_shape` and `dtype`, that this rank holds.

    A rectangle may occur twice, if two local parameters have the same values. One of the two is saved, and both are
    loaded.
    """

    def __init__(self, global_shape: Shape, dtype: torch.dtype, parts: Iterable[Rectangle] = ()) -> None:
        self.global_shape = tuple(global_shape)
        self.dtype = dtype
        self.parts: list[Rectangle] = []
        for offset, view in parts:
            self.add(offset, view)

    @classmethod
    def whole(cls, tensor: Tensor) -> Rectangles:
        """Wrap a tensor that is not sharded."""
        return cls(tuple(tensor.shape), tensor.dtype, [Rectangle((0,) * tensor.dim(), tensor)])

    def add(self, offset: Shape, view: Tensor) -> None:
        """Add `view`, which starts at `offset` of the global tensor."""
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

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the first view that starts at `index.offset`."""
        return next(view for offset, view in self.parts if offset == tuple(index.offset or ()))


def as_rectangles(tensors: Mapping[str, Rectangles | Tensor]) -> dict[str, Rectangles]:
    """Return `tensors` with plain tensors wrapped as unsharded `Rectangles`."""
    return {name: Rectangles.whole(value) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def collect(
    params: Iterable[nn.Parameter], tensors: Callable[[nn.Parameter], Tensor], prefix: str
) -> dict[str, Rectangles]:
    """Return the rectangles of `params` by global name (`prefix` and the shard's name).

    `tensors` maps a parameter to a tensor of its shape: the parameter itself, or its optimizer state. The result holds
    views of these tensors, so it can be made once and saved many times.
    """
    state: dict[str, Rectangles] = {}
    for param in params:
        for shard, view in shards_of(param, tensors(param)):
            _add(state, prefix, shard, shard.offset, view)
    return state


def collect_shards(shards: Iterable[tuple[FlatShard, Tensor]], prefix: str) -> dict[str, Rectangles]:
    """Return the rectangles of flat parameter shards by global name.

    Each shard comes with a flat tensor that holds its elements.
    """
    state: dict[str, Rectangles] = {}
    for shard, flat in shards:
        assert flat.shape == (shard.end - shard.start,)
        for box in boxes_of(shard):
            _add(state, prefix, box.piece, box.offset, flat[box.start : box.end].view(box.shape))
    return state


def _add(state: dict[str, Rectangles], prefix: str, shard: ParamShard, offset: Shape, view: Tensor) -> None:
    """Add `view`, a part of `shard` that lies at `offset` of the shard's global tensor."""
    name = prefix + shard.name
    if name not in state:
        state[name] = Rectangles(shard.global_shape, view.dtype)
    assert state[name].global_shape == shard.global_shape, f"{name}: two global shapes on one rank"
    state[name].add(offset, view)
