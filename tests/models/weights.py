"""Random weights that are the same under any layout, and gradients of shards against those of whole weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.sharding import Init, ParamShard, shards_of, spec_of
from megafp8.parallel.tensor.random import fill_
from megafp8.spec import ModelSpec

_EXPERT = re.compile(r"\.experts\.\d+\.")
Std = Callable[[ParamShard], float]


def _value(piece: ParamShard, std: Std) -> Tensor:
    """Norm weights are around one, all else around zero, so that none is trivially one or zero."""
    centre = 1.0 if "norm.weight" in piece.name else 0.0
    return centre + fill_(torch.empty(piece.shape, dtype=torch.float64), piece, Init("normal", std(piece)), seed=5)


def randomize(module: nn.Module, std: Std, model: ModelSpec | None = None) -> dict[str, Tensor]:
    """Fill the module's parameters, and return whole weights by name, float64; with all experts of `model`'s layers."""
    with torch.no_grad():
        for param in module.parameters():
            for piece, local in shards_of(param, param):
                local.copy_(_value(piece, std))
    pieces = [piece for param in module.parameters() for piece in spec_of(param).shards]
    shapes = {p.name: p.global_shape for p in pieces}
    shapes |= {
        _EXPERT.sub(f".experts.{e}.", name): shape
        for name, shape in shapes.items()
        if _EXPERT.search(name)
        for e in range(_num_experts(model, name))
    }
    wholes = [ParamShard(name, shape, (0,) * len(shape), shape) for name, shape in shapes.items()]
    return {whole.name: _value(whole, std).requires_grad_() for whole in wholes}


def _num_experts(model: ModelSpec | None, name: str) -> int:
    """Return the number of experts of the layer that a tensor belongs to."""
    return 0 if model is None else int(model.layers[int(name.split(".")[1])].ffn.num_experts)


def gradients(
    module: nn.Module,
    whole: dict[str, Tensor],
    tensor: ProcessGroup,
    context: ProcessGroup | None = None,
    expert_data: ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, gradient and expected gradient of each weight's shard; partial gradients are summed first."""
    for param in module.parameters():
        assert param.grad is not None
        grad = param.grad.clone()
        all_reduce(grad, expert_data if spec_of(param).expert else context)
        if spec_of(param).reduce_over_tp:
            all_reduce(grad, tensor)
        for piece, local in shards_of(param, grad):
            expected = whole[piece.name].grad
            if expected is None and ".experts." in piece.name:  # one without tokens
                expected = torch.zeros_like(whole[piece.name])
            assert expected is not None
            yield piece.name, local, expected[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]
