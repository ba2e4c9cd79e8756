"""Layers whose quantizers are observed: what is recorded is what was cast, and nothing that is computed changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.fp8 import (
    CurrentScaling,
    DelayedScaling,
    Fp8Manager,
    Fp8Recipe,
)
from megafp8.fp8.health import OPERANDS, Fp8Record, Recorder
from megafp8.layers.activation.op import activation
from megafp8.layers.norm.op import norm
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat, QuantizedGradHandoff
from megafp8.numerics.recipes import NVFP4Scaling
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.tensor import QuantizedTensor
from tests.fp8.linear_layer import LinearLayer
from tests.marks import slow_but

CPU = torch.device("cpu")


class Layer:
    """One FP8 layer of 24 inputs and 16 outputs under a manager."""

    def __init__(self, recipe: Fp8Recipe, recorder: Recorder | None) -> None:
        self.manager = Fp8Manager(recipe, amax_group=None, recorder=recorder)
        self.op = LinearLayer(self.manager, "a")
        self.manager.materialize(CPU)
        self.weight = nn.Parameter(normal(16, 24, seed=1))

    def step(self, seed: int) -> list[Tensor]:
        """Two micro-batches' outputs and gradients."""
        found = []
        for i in range(2):
            x = normal(8, 24, seed=seed + i).requires_grad_()
            y = self.op(x, self.weight)
            found += [y.detach(), *torch.autograd.grad(y, [x, self.weight], normal(8, 16, seed=seed + 10 + i))]
        self.manager.end_step()
        return found


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def check(record: Fp8Record, operand: str, values: Tensor, cast: QuantizedTensor) -> None:
    """The record is of `values`, and of these as they were cast."""
    assert cast.rowwise is not None
    error = values - cast.rowwise.dequantize(torch.float64)
    assert record.operand == operand
    assert record.amax == pytest.approx(values.abs().max().item(), rel=1e-5)
    assert record.snr_db == pytest.approx(10 * math.log10(values.square().sum() / error.square().sum()), abs=1e-3)
    assert 20 < record.snr_db < 35


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_and_an_activation_show_what_they_cast(dtype: torch.dtype) -> None:
    recorder = Recorder(1)
    quantizers = Layer(CurrentScaling(), recorder).op.state.quantizers
    x, weight, gate_up = (normal(*s, seed=2, dtype=dtype).requires_grad_() for s in ((32, 24), (24,), (32, 48)))

    recorder.begin_step(1)
    _, y = norm(x, None, weight, None, 1e-5, InputFormat(quantizers.input))
    assert isinstance(y, LinearInput)
    (record,) = recorder.end_step()
    check(record, "input", F.rms_norm(x.double(), (24,), weight.double(), 1e-5).detach(), y.quantized)

    recorder.begin_step(2)
    slot = QuantizedGradHandoff(quantizers.grad_output)
    y = activation("swiglu", gate_up, None, InputFormat(quantizers.input), slot)
    assert isinstance(y, LinearInput)
    dy = normal(32, 24, seed=3, dtype=dtype)
    y.tensor.backward(dy)
    forward, backward = recorder.end_step()
    gate, up = (part.detach().requires_grad_() for part in gate_up.double().chunk(2, dim=-1))
    expected = F.silu(gate) * up
    expected.backward(dy.double())
    check(forward, "input", expected.detach(), y.quantized)
    assert slot.grad is not None
    assert gate.grad is not None
    assert up.grad is not None
    check(backward, "grad_output", torch.cat([gate.grad, up.grad], dim=-1), slot.grad)


HIGH = [(False, False, False), (True, False, False), (False, True, False)]


@pytest.mark.parametrize(
    ("recipe", "high"),
    slow_but(
        [(recipe, high) for recipe in (DelayedScaling, CurrentScaling, NVFP4Scaling) for high in HIGH],
        *((DelayedScaling, high) for high in HIGH),
        (CurrentScaling, HIGH[0]),
        (NVFP4Scaling, HIGH[2]),  # which rounds stochastically
    ),
)
def test_every_operand_is_recorded_and_nothing_changes(recipe: type[Fp8Recipe], high: tuple[bool, bool, bool]) -> None:
    """Also where a GEMM in high precision needs an operand's columns only."""
    recorder = Recorder(2)
    observed = Layer(recipe(override_linear_precision=high), recorder)
    plain = Layer(recipe(override_linear_precision=high), None)
    for step in range(1, 5):
        assert observed.manager.begin_step(step) == (step % 2 == 0)
        assert not plain.manager.begin_step(step)
        for ours, theirs in zip(observed.step(step), plain.step(step), strict=True):
            assert torch.equal(ours, theirs)
        records = recorder.end_step()
        assert sorted(r.operand for r in records) == (sorted(OPERANDS) if step % 2 == 0 else [])
        amaxes = {r.operand: r.amax for r in records}
        expected = {"input": normal(8, 24, seed=step), "grad_output": normal(8, 16, seed=step + 10)}  # the first's
        assert not records or amaxes == {
            name: pytest.approx(x.abs().max().item(), rel=1e-5)
            for name, x in {**expected, "weight": observed.weight.detach()}.items()
        }


@pytest.mark.parametrize("high", [(False, False, False), (False, True, False)])
def test_an_evaluation_is_not_recorded_and_hides_no_weight(high: tuple[bool, bool, bool]) -> None:
    recorder = Recorder(1)
    layer = Layer(CurrentScaling(override_linear_precision=high), recorder)

    def evaluate() -> None:
        with torch.no_grad():
            layer.op(torch.full((8, 24), 100.0), layer.weight)

    evaluate()
    layer.manager.begin_step(1)
    layer.step(0)
    records = recorder.end_step()
    evaluate()
    assert {r.operand for r in records} == set(OPERANDS)
    assert all(r.amax is not None and r.amax < 10 for r in records)
    assert recorder.end_step() == []


def test_without_a_recorder_quantizers_are_bare() -> None:
    assert type(Layer(CurrentScaling(), None).op.state.quantizers.input) is RecipeQuantizer
