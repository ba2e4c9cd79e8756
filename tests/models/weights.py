"""Random weights that are the same under any layout, and gradients of shards against those of whole weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce
from megafp8.distributed.sharding import Init, ParamShard, shards_of, spec_of
from megafp8.tensor_parallel.random import fill_

Std = Callable[[ParamShard], float]


def _value(piece: ParamShard, std: Std) -> Tensor:
    """Norm weights are around one, all else around zero, so that none is trivially one or zero."""
    centre = 1.0 if "norm.weight" in piece.name else 0.0
    return centre + fill_(torch.empty(piece.shape, dtype=torch.float64), piece, Init("normal", std(piece)), seed=5)


def randomize(module: nn.Module, std: Std) -> dict[str, Tensor]:
    """Fill the module's parameters; the whole weights by name, float64."""
    with torch.no_grad():
        for param in module.parameters():
            for piece, local in shards_of(param, param):
                local.copy_(_value(piece, std))
    pieces = [piece for param in module.parameters() for piece in spec_of(param).shards]
    wholes = [ParamShard(p.name, p.global_shape, (0,) * len(p.global_shape), p.global_shape) for p in pieces]
    return {whole.name: _value(whole, std).requires_grad_() for whole in wholes}


def gradients(
    module: nn.Module, whole: dict[str, Tensor], tensor: ProcessGroup, context: ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, gradient and expected gradient of each weight's shard; partial gradients are summed first."""
    for param in module.parameters():
        assert param.grad is not None
        grad = param.grad.clone()
        if context is not None:
            all_reduce(grad, context)
        if spec_of(param).reduce_over_tp:
            all_reduce(grad, tensor)
        for piece, local in shards_of(param, grad):
            expected = whole[piece.name].grad
            assert expected is not None
            yield piece.name, local, expected[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]
