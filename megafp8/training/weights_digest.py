"""Digest of a model's weights that does not depend on the layout.

Each element's bits, read as an integer, are multiplied by an odd number that depends on the element's place in the
global tensor: 2 · place + 1. The sum of a tensor is the sum of these products modulo 2⁶⁴. The sum of a tensor is
therefore the sum over its rectangles, whichever ranks hold them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.checkpoint import Rectangles
from megafp8.conversion.base import CheckpointSource
from megafp8.numerics.dtypes import DTYPES
from megafp8.parallel.collectives import all_gather_objects, rank, size
from megafp8.parallel.sharding import Shape
from megafp8.training.state import weights
from megafp8.training.trainer import RankTrainer

Sums = dict[tuple[str, Shape, Shape], int]
"""Sums of rectangles by name, offset and shape."""


def weights_digest(trainer: RankTrainer) -> str:
    """Return the SHA-256 digest of the names and sums of all weights in training.precision. Collective."""
    dtype, group = DTYPES[trainer.config.training.precision], trainer.parallel.world.group
    return _digest(sums_of_bits(weights(trainer), dtype), group)


@torch.no_grad()
def source_digest(
    source: CheckpointSource, dtype: torch.dtype, device: torch.device, group: ProcessGroup | None
) -> str:
    """Return the digest that `weights_digest` would give for the weights of `source` in `dtype`. Collective.

    The ranks share the work. Each rank reads its tensors one after the other.
    """
    sums: Sums = {}
    names = sorted(name for name in source.tensors if name.startswith("model."))
    for name in names[rank(group) :: size(group)]:
        sums |= sums_of_bits({name: Rectangles.whole(source.read(name).to(device))}, dtype)
    return _digest(sums, group)


def _digest(sums: Sums, group: ProcessGroup | None) -> str:
    totals: dict[str, int] = {}
    everything: Sums = {}
    for rank_sums in all_gather_objects(sums, group):
        everything |= rank_sums
    for (name, _, _), value in everything.items():
        totals[name] = (totals.get(name, 0) + value) % 2**64
    return hashlib.sha256(json.dumps(sorted(totals.items())).encode()).hexdigest()


def sums_of_bits(tensors: Mapping[str, Rectangles], dtype: torch.dtype) -> Sums:
    """Return the sum of each rectangle by name, offset and shape. Floating-point values are converted to `dtype`."""
    return {
        (name, offset, tuple(view.shape)): _sum_of_bits(
            view.to(dtype) if view.is_floating_point() else view, offset, tensor.global_shape
        )
        for name, tensor in tensors.items()
        for offset, view in tensor.parts
    }


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS = 2**24
"""Number of elements processed at a time, which limits the memory for their places."""


def _sum_of_bits(x: Tensor, offset: Shape, global_shape: Shape) -> int:
    """Return the weighted sum of the bits of a rectangle at `offset` in a tensor (see the module's docstring)."""
    if x.dim() == 0:
        x, offset, global_shape = x.view(1), (0,), (1,)
    strides = [math.prod(global_shape[i + 1 :]) for i in range(x.dim())]
    inner = torch.zeros((), dtype=torch.int64, device=x.device)
    for d in range(1, x.dim()):
        places = (offset[d] + torch.arange(x.shape[d], device=x.device)) * strides[d]
        inner = inner.unsqueeze(-1) + places
    total, rows = 0, max(1, _ELEMENTS // max(1, math.prod(x.shape[1:])))
    for first in range(0, x.shape[0], rows):
        part = x[first : first + rows].contiguous()
        outer = (offset[0] + first + torch.arange(len(part), device=x.device)) * strides[0]
        places = outer.view(-1, *[1] * (x.dim() - 1)) + inner
        bits = part.view(_INTEGERS[part.element_size()]).long()
        total += int(((2 * places + 1) * bits).sum())
    return total % 2**64
