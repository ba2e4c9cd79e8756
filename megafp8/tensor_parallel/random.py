"""Random numbers that do not depend on the layout.

A stateful generator gives a rank numbers that depend on what it drew before, so the same model starts differently under
TP2 than under TP1. Here a value depends only on (seed, stream name, index of the element in the global tensor): the
counter-based generator of `megafp8.philox` is keyed by (seed, name) and counts elements. A slice of a tensor is then
generated as a slice, bit for bit, without making the rest, on whichever rank holds it.

Normals come from Box-Muller in float32; CPU and CUDA may differ in the last bit of log and cos, ranks of one kind never
do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafp8.distributed.sharding import Init, ParamShard, shards_of, spec_of
from megafp8.philox import Key, key_of, philox

_CHUNK = 1 << 24  # elements generated at a time: bounds the int64 temporaries to some hundred MiB


def normal_at(index: Tensor, key: Key) -> Tensor:
    """Standard normals (float32) of the elements `index` (int64) of a stream. Box-Muller on two Philox words."""
    a, b, _, _ = philox(index, key)
    u = (a.double() + 0.5) / 2.0**32
    angle = (b.double() + 0.5) * (2 * math.pi / 2.0**32)
    return (torch.sqrt(-2 * torch.log(u)) * torch.cos(angle)).float()


def _row_indices(piece: ParamShard, first: int, last: int, device: torch.device) -> Tensor:
    """Flat global indices, int64, of rows [first, last) of `piece`, shaped `[rows, *rest]`."""
    index = torch.zeros((last - first,) + (1,) * (len(piece.shape) - 1), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(piece.shape))):
        low, high = (first, last) if dim == 0 else (0, piece.shape[dim])
        place = torch.arange(piece.offset[dim] + low, piece.offset[dim] + high, device=device) * stride
        index = index + place.view([-1 if d == dim else 1 for d in range(len(piece.shape))])
        stride *= piece.global_shape[dim]
    return index


def fill_(out: Tensor, piece: ParamShard, init: Init, seed: int) -> Tensor:
    """Write the initial values of `piece` into `out` (shaped like the piece), whatever the layout."""
    if init.kind != "normal":
        return out.fill_(1.0 if init.kind == "ones" else 0.0)
    key = key_of(seed, piece.name)
    rows = max(1, _CHUNK // max(1, out[0].numel()))
    for first in range(0, piece.shape[0], rows):
        last = min(first + rows, piece.shape[0])
        out[first:last] = normal_at(_row_indices(piece, first, last, out.device), key) * init.std
    return out


@torch.no_grad()
def initialize_parameters(module: torch.nn.Module, seed: int) -> None:
    """Give every parameter of `module` its initial value, a function of (seed, global name, global index) alone."""
    for param in module.parameters():
        initialize(param, param, seed)


@torch.no_grad()
def initialize(param: torch.nn.Parameter, values: Tensor, seed: int) -> None:
    """Write the initial values of `param` into `values`, shaped like it."""
    for piece, local in shards_of(param, values):
        fill_(local, piece, spec_of(param).init, seed)
