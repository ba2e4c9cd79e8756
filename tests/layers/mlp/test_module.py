"""The MLP in FP8 against the float64 twin of whole weights: values, every gradient, and what is fused with casts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.config.schema import ModelConfig
from megafp8.fp8 import CurrentScaling, Fp8Manager
from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext
from megafp8.layers.mlp.module import MLP
from megafp8.linear.state import Quantizers
from megafp8.numerics.quantizers import Quantizer
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import QuantizedTensor
from megafp8.parallel.collectives import all_gather
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.plan import Neighbor
from tests.models.twin import mlp as twin_mlp
from tests.models.weights import gradients, randomize
from tests.world import World

S, B, H, F = 32, 2, 32, 64
NORM = Neighbor("norm", "any")
ROUNDING = 0.08
"""Relative error of results behind casts to E4M3: one is up to 6% off and 3% in the mean; four lead to dx."""


class Spy:
    """A quantizer that records the kinds of its sources."""

    per_tensor, shard_alignment = True, 1

    def __init__(self, quantizer: Quantizer, kinds: list[str]) -> None:
        self.quantizer, self.kinds = quantizer, kinds

    def for_sharded_input(self, group: ProcessGroup) -> Spy | None:
        quantizer = self.quantizer.for_sharded_input(group)
        return None if quantizer is None else Spy(quantizer, self.kinds)

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        self.kinds.append(source.kind)
        return self.quantizer(source, rowwise=rowwise, columnwise=columnwise)


def spy(layer: torch.nn.Module) -> list[str]:
    """Kinds of the sources of the layer's operands, in order."""
    kinds: list[str] = []
    state = layer.state
    state._own_quantizers = state._quantizers = Quantizers(*(Spy(quantizer, kinds) for quantizer in state.quantizers))
    state.replan()
    return kinds


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def _compare(tp: int, activation: str, bias: bool, fused: bool, grad_fused: bool) -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, ffn_hidden_size=F, activation=activation, linear_bias=bias
    )
    group = initialize_model_parallel(tp).tensor.group
    manager = Fp8Manager(CurrentScaling(fp8_format="e4m3"), amax_group=group)
    context = BuildContext(group, manager, torch.float64, torch.device("cpu"), True)
    mlp = MLP(PartBuild("mlp", config.spec.layers[0].ffn, config.spec, context, NORM))
    manager.materialize(torch.device("cpu"))
    w = randomize(mlp, lambda piece: 0.5 if piece.name.endswith("bias") else 1 / math.sqrt(piece.global_shape[-1]))
    up, down = spy(mlp.up), spy(mlp.down)
    x, dy = torch.randn(2, S, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = slice(group.rank() * S // tp, (group.rank() + 1) * S // tp)
    x_own = x[mine].clone().requires_grad_()
    y = mlp(x_own)
    y.backward(dy[mine])
    assert up == ["plain", "plain", f"{activation}_grad" if grad_fused else "plain"]
    assert down == [activation if fused else "plain", "plain", "plain"]

    x.requires_grad_()
    expected = twin_mlp(x, w, "mlp", config)
    expected.backward(dy)
    assert _distance(all_gather(y.detach(), group), expected.detach()) < ROUNDING
    assert _distance(all_gather(x_own.grad, group), x.grad) < ROUNDING
    for name, actual, grad in gradients(mlp, w, group):
        if "alpha" in name:  # a sum of both signs, of which rounding may leave nothing; test_gpt compares it in float64
            continue
        assert _distance(actual, grad) < (1e-12 if "down.bias" in name else ROUNDING)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("activation", "bias", "fused", "grad_fused"),
    [
        ("gelu_tanh", True, True, True),
        ("geglu_tanh", False, True, True),
        ("squared_relu", True, True, True),
        ("clamped_swiglu", True, True, False),  # the up projection's bias needs the gradient's values
        ("geglu", False, False, False),
        ("xielu", True, False, False),
    ],
)
def test_values_and_gradients(
    world2: World, tp: int, activation: str, bias: bool, fused: bool, grad_fused: bool
) -> None:
    world2.run(_compare, tp, activation, bias=bias, fused=fused, grad_fused=grad_fused, ranks=tp)
