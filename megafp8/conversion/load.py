"""Load weights from a source into a model. Each rank loads its shards.

A rank reads only the rows that contain its shards, one tensor at a time, without communication. The ranks of a host
share the page cache. Dtypes may differ; values are then rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megafp8.checkpoint import Rectangles
from megafp8.conversion.base import CheckpointSource


@torch.no_grad()
def load_weights(source: CheckpointSource, wanted: Mapping[str, Rectangles]) -> None:
    """Fill the views of `wanted`, whose keys are names of `source.tensors`, with the values of `source`.

    Raises ValueError, before anything is read, if a tensor is missing or has another shape.
    """
    for name, rectangles in wanted.items():
        info = source.tensors.get(name)
        if info is None or tuple(info.shape) != rectangles.global_shape:
            actual = "does not have it" if info is None else f"has it with shape {list(info.shape)}"
            shape = list(rectangles.global_shape)
            raise ValueError(f"{source.path} does not fit: the model has {name} {shape}, but the source {actual}")
    for name, rectangles in wanted.items():
        first = min(offset[0] for offset, _ in rectangles.parts)
        last = max(offset[0] + view.shape[0] for offset, view in rectangles.parts)
        rows = source.read_rows(name, first, last)
        for offset, view in rectangles.parts:
            low = (offset[0] - first, *offset[1:])
            view.copy_(rows[tuple(slice(o, o + n) for o, n in zip(low, view.shape))])


def load_scales(source: CheckpointSource, state: Mapping[str, Tensor], advice: str) -> None:
    """Fill the FP8 scales and amaxes in `state`, by name, from a checkpoint.

    Raises ValueError, with `advice` at the end of the message, if one is missing or has another shape.
    """
    for name, tensor in state.items():
        info = source.tensors.get(name)
        if info is None or tuple(info.shape) != tuple(tensor.shape):
            raise ValueError(
                f"{source.path} was trained in FP8, but its scale {name} {list(tensor.shape)} is missing{advice}"
            )
        tensor.copy_(source.read(name))
