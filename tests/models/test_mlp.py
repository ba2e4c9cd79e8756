"""The MLP in FP8 against its definition in float64, whole weights, no FP8: values and every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.config import ModelConfig
from megafp8.distributed.collectives import all_gather, all_reduce
from megafp8.distributed.sharding import Init, ParamShard, shards_of, spec_of
from megafp8.fp8 import CurrentScaling, Fp8Linear, Fp8Manager
from megafp8.fp8.quantizers import Quantizer
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.models.context import BuildContext
from megafp8.models.mlp import MLP
from megafp8.ops.linear import Quantizers
from megafp8.parallel_state import initialize_model_parallel
from megafp8.tensor_parallel.random import fill_
from tests.world import World

S, B, H, F = 32, 2, 32, 64
MODEL: dict[str, Any] = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 4, "ffn_hidden_size": F}
ROUNDING = 0.08
"""Relative, of results that casts to E4M3 come before: one is up to 6% off and 3% in the mean; four lead to dx."""


class Spy:
    """A quantizer that notes what kind of source it casts."""

    per_tensor, shard_alignment = True, 1

    def __init__(self, quantizer: Quantizer, kinds: list[str]) -> None:
        self.quantizer, self.kinds = quantizer, kinds

    def for_sharded_input(self, group: ProcessGroup) -> Spy | None:
        quantizer = self.quantizer.for_sharded_input(group)
        return None if quantizer is None else Spy(quantizer, self.kinds)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        self.kinds.append(source.kind)
        return self.quantizer(source, rowwise=rowwise, columnwise=columnwise)


def spy(layer: torch.nn.Module) -> list[str]:
    """What kinds of sources the layer's operands are cast from, in order."""
    kinds: list[str] = []
    op = layer.op
    assert isinstance(op, Fp8Linear)
    op._quantizers = Quantizers(*(Spy(quantizer, kinds) for quantizer in op.quantizers))
    return kinds


def _random(piece: ParamShard) -> Tensor:
    std = 0.5 if piece.name.endswith("bias") else 1 / math.sqrt(piece.global_shape[-1])
    return fill_(torch.empty(piece.shape, dtype=torch.float64), piece, Init("normal", std), 3)


def _whole(piece: ParamShard) -> ParamShard:
    return ParamShard(piece.name, piece.global_shape, (0,) * len(piece.global_shape), piece.global_shape)


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _biased_gelu(tp: int) -> None:
    config = ModelConfig(**MODEL, activation="gelu_tanh", linear_bias=True)
    group = initialize_model_parallel(tp).tensor.group
    manager = Fp8Manager(CurrentScaling(fp8_format="e4m3"), amax_group=group)
    mlp = MLP("mlp", config, BuildContext(group, manager, torch.float64, torch.device("cpu"), True))
    manager.materialize(torch.device("cpu"))
    with torch.no_grad():
        for param in mlp.parameters():
            for piece, local in shards_of(param, param):
                local.copy_(_random(piece))
    up, down = spy(mlp.up), spy(mlp.down)
    x, dy = torch.randn(2, S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = slice(group.rank() * S // tp, (group.rank() + 1) * S // tp)
    x_own = x[mine].clone().requires_grad_()
    y = mlp(x_own)
    y.backward(dy[mine])
    assert (up, down) == (["plain", "plain", "gelu_grad"], ["gelu", "plain", "plain"])

    w = {p.name: _random(_whole(p)).requires_grad_() for param in mlp.parameters() for p in spec_of(param).shards}
    x.requires_grad_()
    z = x @ w["mlp.up.weight"].T + w["mlp.up.bias"]
    activated = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    expected = activated @ w["mlp.down.weight"].T + w["mlp.down.bias"]
    expected.backward(dy)
    assert _distance(all_gather(y.detach(), group), expected.detach()) < ROUNDING
    assert _distance(all_gather(x_own.grad, group), x.grad) < ROUNDING
    for param in mlp.parameters():
        assert param.grad is not None
        grad = all_reduce(param.grad.clone(), group) if spec_of(param).reduce_over_tp else param.grad
        for piece, local in shards_of(param, grad):
            slices = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            assert _distance(local, w[piece.name].grad[slices]) < (1e-12 if "down.bias" in piece.name else ROUNDING)


@pytest.mark.parametrize("tp", [1, 2])
def test_gelu_with_biases_hands_codes_on_both_ways(world2: World, tp: int) -> None:
    world2.run(_biased_gelu, tp, ranks=tp)
