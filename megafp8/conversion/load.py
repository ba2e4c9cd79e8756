"""Load weights from a source into a model, each rank its shards.

A rank reads the rows that its shards lie in, one tensor at a time, without communication; ranks of a host share the
page cache. Dtypes may differ; copying rounds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megafp8.checkpoint import Rectangles
from megafp8.conversion.base import CheckpointSource


@torch.no_grad()
def load_weights(source: CheckpointSource, wanted: Mapping[str, Rectangles]) -> None:
    """Fill the views of `wanted`, by the names of `source.tensors`, with its values.

    Raises ValueError, before anything is read, where a tensor is missing or has another shape.
    """
    for name, rectangles in wanted.items():
        info = source.tensors.get(name)
        if info is None or tuple(info.shape) != rectangles.global_shape:
            actual = "no such tensor" if info is None else f"it with shape {list(info.shape)}"
            shape = list(rectangles.global_shape)
            raise ValueError(f"{source.path} does not fit: the model has {name} {shape}, and there is {actual}")
    for name, rectangles in wanted.items():
        first = min(offset[0] for offset, _ in rectangles.parts)
        last = max(offset[0] + view.shape[0] for offset, view in rectangles.parts)
        rows = source.read_rows(name, first, last)
        for offset, view in rectangles.parts:
            low = (offset[0] - first, *offset[1:])
            view.copy_(rows[tuple(slice(o, o + n) for o, n in zip(low, view.shape))])


def load_scales(source: CheckpointSource, state: Mapping[str, Tensor], advice: str) -> None:
    """Fill the scales and amaxes of FP8 in `state`, by name, from a checkpoint.

    Raises ValueError, whose message ends with `advice`, where the checkpoint lacks one or has it in another shape.
    """
    for name, tensor in state.items():
        info = source.tensors.get(name)
        if info is None or tuple(info.shape) != tuple(tensor.shape):
            raise ValueError(
                f"{source.path} was trained in FP8 and lacks {name} {list(tensor.shape)} of the scales{advice}"
            )
        tensor.copy_(source.read(name))
