"""Weights from a source into a model, of which each rank has its slices.

The rank asks for the rows that its slices lie in and copies the slices out of them: no more than that is read, and one
tensor at a time is in memory. There is no communication; ranks of a node that read the same rows share the page cache.
Dtypes may differ, copying rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megafp8.checkpoint import Rectangles
from megafp8.conversion.base import Source


@runtime_checkable
class ReadsRows(Protocol):
    """A source that need not read a whole tensor for some of its rows."""

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `[first, last)` of `read(name)`."""
        ...


@torch.no_grad()
def load_weights(source: Source, wanted: Mapping[str, Rectangles]) -> None:
    """Fill the views of `wanted`, by the names of `source.tensors`, with its values.

    Raises ValueError, before anything is read, where a tensor is missing or has another shape.
    """
    for name, rectangles in wanted.items():
        info = source.tensors.get(name)
        if info is None or tuple(info.shape) != rectangles.global_shape:
            found = "no such tensor" if info is None else f"it with shape {list(info.shape)}"
            shape = list(rectangles.global_shape)
            raise ValueError(f"{source.path} does not fit: the model has {name} {shape}, and there is {found}")
    for name, rectangles in wanted.items():
        first = min(offset[0] for offset, _ in rectangles.parts)
        last = max(offset[0] + view.shape[0] for offset, view in rectangles.parts)
        rows = source.read_rows(name, first, last) if isinstance(source, ReadsRows) else source.read(name)[first:last]
        for offset, view in rectangles.parts:
            places = (offset[0] - first, *offset[1:])
            view.copy_(rows[tuple(slice(o, o + n) for o, n in zip(places, view.shape))])
