"""Initial values that do not depend on the layout.

The numbers of a stateful generator depend on previous draws, so a model would start differently under TP2 than under
TP1. Here, a value depends only on (seed, stream name, index of the element in the global tensor): the counter-based
generator of `megafp8.numerics.philox` is keyed by (seed, name) and counts elements. Any shard is generated, bit for
bit, without generating the rest.

Normals come from Box-Muller in float32. CPU and CUDA may differ in the last bit of log and cos; ranks with the same
kind of device never differ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafp8.numerics.philox import Key, key_of, philox
from megafp8.parallel.sharding import Init, ParamShard, shards_of, spec_of

_CHUNK = 1 << 24  # elements generated at a time; limits the int64 temporaries to a few hundred MiB


def normal_at(index: Tensor, key: Key) -> Tensor:
    """Return standard normals (float32) at the elements `index` (int64) of a stream.

    Box-Muller transforms two Philox words to each normal.
    """
    a, b, _, _ = philox(index, key)
    u = (a.double() + 0.5) / 2.0**32
    angle = (b.double() + 0.5) * (2 * math.pi / 2.0**32)
    return (torch.sqrt(-2 * torch.log(u)) * torch.cos(angle)).float()


def uniform_at(index: Tensor, key: Key) -> Tensor:
    """Return numbers between 0 and 1 (float64) at the elements `index` (int64) of a stream."""
    return (philox(index, key)[0].double() + 0.5) / 2.0**32


def _global_index(shard: ParamShard, first: int, last: int, device: torch.device) -> Tensor:
    """Return flat global indices, int64, of rows [first, last) of `shard`, shaped `[rows, *rest]`."""
    index = torch.zeros((last - first,) + (1,) * (len(shard.shape) - 1), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shard.shape))):
        low, high = (first, last) if dim == 0 else (0, shard.shape[dim])
        position = torch.arange(shard.offset[dim] + low, shard.offset[dim] + high, device=device) * stride
        index = index + position.view([-1 if d == dim else 1 for d in range(len(shard.shape))])
        stride *= shard.global_shape[dim]
    return index


def fill_(out: Tensor, shard: ParamShard, init: Init, seed: int) -> Tensor:
    """Write the initial values of `shard` into `out`, which has the same shape."""
    if init.kind in ("ones", "zeros"):
        return out.fill_(1.0 if init.kind == "ones" else 0.0)
    key = key_of(seed, shard.name)
    rows = max(1, _CHUNK // max(1, out[0].numel()))
    for first in range(0, shard.shape[0], rows):
        last = min(first + rows, shard.shape[0])
        index = _global_index(shard, first, last, out.device)
        if init.kind == "normal":
            out[first:last] = normal_at(index, key) * init.std
        elif init.kind == "log_range":
            out[first:last] = (1.0 + index % shard.global_shape[-1]).log()
        elif init.kind == "log_uniform":
            out[first:last] = (init.low + (init.high - init.low) * uniform_at(index, key)).log()
        else:
            values = (math.log(init.low) + math.log(init.high / init.low) * uniform_at(index, key)).exp()
            out[first:last] = values + (-torch.expm1(-values)).log()
    return out


@torch.no_grad()
def initialize(param: torch.nn.Parameter, values: Tensor, seed: int) -> None:
    """Write the initial values of `param` into `values`, which has the same shape."""
    for shard, local in shards_of(param, values):
        fill_(local, shard, spec_of(param).init, seed)


def initialize_parameters(module: torch.nn.Module, seed: int) -> None:
    """Initialize every parameter of `module`. Values depend only on (seed, global name, global index)."""
    for param in module.parameters():
        initialize(param, param, seed)
