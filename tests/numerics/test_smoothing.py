"""Smooth SwiGLU: an outlier that breaks per-tensor scaling but not this, scales by hand, and what may not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.fp8 import (
    BlockwiseScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Manager,
    Fp8Recipe,
    RowwiseScaling,
    StaticScaling,
)
from megafp8.numerics.smoothing import MOST, smooth
from megafp8.ops.activation import activation
from megafp8.plan import Neighbor
from tests.fp8.linear_layer import LinearLayer, Sum

R, C, N = 64, 24, 40
OUTLIER = 3
ROUNDING = 0.08
"""Relative, of results that at most three casts to E4M3 come before: one is up to 6% off and 3% in the mean."""
RECIPES = {
    "delayed": DelayedScaling(fp8_format="e4m3", amax_history_len=1),
    "current": CurrentScaling(fp8_format="e4m3"),
    "static": StaticScaling(fp8_format="e4m3", calibration_steps=1, margin=1),
}


def managed(recipe: Fp8Recipe, *, smooth_swiglu: bool = True) -> tuple[Fp8Manager, LinearLayer]:
    """A layer "down" behind SwiGLU."""
    manager = Fp8Manager(recipe, amax_group=None, smooth_swiglu=smooth_swiglu)
    op = LinearLayer(manager, "down", before=Neighbor("swiglu", "any"), smoothable=C)
    manager.materialize(torch.device("cpu"))
    return manager, op


def tensors(
    outlier: float = 1.0, small_weights: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """`[gate | up]`, weight and dy: channel `OUTLIER` of the activation that much larger, its weights so much
    smaller."""
    generator = torch.Generator().manual_seed(0)
    gate_up, weight, dy = (
        torch.randn(shape, generator=generator, dtype=dtype) for shape in ((R, 2 * C), (N, C), (R, N))
    )
    gate_up[:, C + OUTLIER] *= outlier
    weight[:, OUTLIER] /= small_weights
    return gate_up, weight, dy


def forward(op: LinearLayer, gate_up: Tensor, weight: nn.Parameter) -> Tensor:
    return op(activation("swiglu", gate_up, None, op.state.input_format, None), weight)


def run(op: LinearLayer, gate_up: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the gradients of the activation's inputs and of the weight."""
    x, w = gate_up.clone().requires_grad_(), nn.Parameter(weight.clone())
    op.state.invalidate_weight()
    y = forward(op, x, w)
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def exact(gate_up: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the definition, without FP8."""
    x, w = (t.double().clone().requires_grad_() for t in (gate_up, weight))
    gate, up = x.chunk(2, dim=-1)
    y = F.silu(gate) * up @ w.T
    y.backward(dy.double())
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def distances(
    recipe: Fp8Recipe, smooth_swiglu: bool, outlier: float = 1.0, small_weights: float = 1.0
) -> dict[str, float]:
    """How far a step is from the exact one, after steps that made the scales."""
    manager, op = managed(recipe, smooth_swiglu=smooth_swiglu)
    given = tensors(outlier, small_weights)
    for _ in range(3):
        found = run(op, *given)
        manager.end_step()
    (y, dx, dw), (y_exact, dx_exact, dw_exact) = found, exact(*given)
    others = torch.arange(C) != OUTLIER
    both = others.repeat(2)  # of gate and up
    return {
        "y": distance(y, y_exact),
        "dx": distance(dx[:, both], dx_exact[:, both]),
        "dx of the outlier": distance(dx[:, ~both], dx_exact[:, ~both]),
        "dw": distance(dw[:, others], dw_exact[:, others]),
        "dw of the outlier": distance(dw[:, ~others], dw_exact[:, ~others]),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outlier_costs_the_others_their_gradients_unless_smoothed(recipe: str) -> None:
    plain, smoothed = (distances(RECIPES[recipe], flag, 2.0**18) for flag in (False, True))
    assert max(smoothed.values()) < ROUNDING
    assert plain["dw"] > 10 * smoothed["dw"]
    assert plain["dw"] > 0.8, "almost nothing is left of it"


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_an_outlier_with_small_weights_costs_the_product_unless_smoothed(recipe: str) -> None:
    """All channels count alike in it, and neither tensor alone has room for all."""
    plain, smoothed = (distances(RECIPES[recipe], flag, 2.0**18, 2.0**18) for flag in (False, True))
    assert max(smoothed.values()) < ROUNDING
    for name in ("y", "dw"):
        assert plain[name] > 10 * smoothed[name]
        assert plain[name] > 0.8, "almost nothing is left of it"


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_an_outlier_it_is_the_same_product(recipe: str) -> None:
    assert max(distances(RECIPES[recipe], True).values()) < ROUNDING


def test_scales_by_hand() -> None:
    amax = torch.tensor([[4.0, 1.0, 3.0, 0.9, 2.0, 1e-9, 0.0, math.inf, math.nan], [0.0] * 9, [math.inf] * 9])
    previous = torch.tensor([[2.0], [4.0], [8.0]]).expand(3, 9)
    expected = [[1.0, 4.0, 1.0, 4.0, 2.0, MOST, 2.0, 2.0, 2.0], [4.0] * 9, [8.0] * 9]
    assert smooth(amax, previous).tolist() == expected


def channel_amax(*inputs: Tensor) -> Tensor:
    """Of the activation, over all of `inputs`."""
    gate, up = torch.cat([x.double() for x in inputs]).chunk(2, dim=-1)
    return (F.silu(gate) * up).abs().amax(dim=0)


def channel_scales(manager: Fp8Manager) -> list[float]:
    return manager.state_dict()["fp8.down.input.channel_scale"].tolist()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_scales_come_from_all_microbatches_of_the_step_and_from_nothing_else(recipe: str) -> None:
    manager, op = managed(RECIPES[recipe])
    gate_up, weight, dy = tensors()
    spread = torch.logspace(-3, 3, C, base=2.0, dtype=torch.float64)
    first, second = gate_up * torch.cat([spread, spread]), gate_up.flip(0, 1)
    assert channel_scales(manager) == [1.0] * C
    for steps in range(2):
        for x in (first, second):
            run(op, x * (1 + steps), weight, dy)
            run(op, x * (1 + steps), weight, dy)  # recomputed
        with manager.recording(False):
            run(op, 100 * second, weight, dy)
        before = channel_scales(manager)
        manager.end_step()
        amax = channel_amax(first * (1 + steps), second * (1 + steps))
        expected = [2.0 ** math.floor(math.log2(amax.max() / one)) for one in amax.tolist()]
        assert channel_scales(manager) == expected != before
        assert max(expected) > 4
    manager.end_step()  # a step without tokens
    assert channel_scales(manager) == expected


def test_a_broken_step_costs_one_update() -> None:
    manager, op = managed(RECIPES["current"])
    gate_up, weight, dy = tensors(4.0)
    run(op, gate_up, weight, dy)
    manager.end_step()
    before = channel_scales(manager)
    assert len(set(before)) > 1
    run(op, torch.full_like(gate_up, math.nan), weight, dy)
    manager.end_step()
    assert channel_scales(manager) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sink_gets_what_autograd_would(dtype: torch.dtype) -> None:
    manager, op = managed(RECIPES["delayed"])
    gate_up, weight, dy = tensors(16.0, dtype=dtype)
    run(op, gate_up, weight, dy)
    manager.end_step()
    w = nn.Parameter(weight.clone())
    sink = Sum(w)
    for _ in range(2):
        forward(op, gate_up.clone().requires_grad_(), w).backward(dy)
    assert sink.count == 2
    assert w.grad is None
    dw = run(op, gate_up, weight, dy)[2]
    assert dw.dtype == dtype
    torch.testing.assert_close(sink.main_grad, 2 * dw.float(), rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=0)


def test_state_goes_to_another_manager() -> None:
    manager, op = managed(RECIPES["delayed"])
    other, other_op = managed(RECIPES["delayed"])
    given = tensors(64.0)
    run(op, *given)
    manager.end_step()
    assert not torch.equal(run(op, *given)[0], run(other_op, *given)[0])
    other.load_state_dict({name: tensor.clone() for name, tensor in manager.state_dict().items()})
    for ours, theirs in zip(run(op, *given), run(other_op, *given), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", [RowwiseScaling(), BlockwiseScaling()], ids=lambda recipe: recipe.name)
def test_finer_scales_are_not_smoothed(recipe: Fp8Recipe) -> None:
    manager, op = managed(recipe)
    assert op.state.smoothing is None
    assert manager.state_dict() == {}


def test_layers_in_high_precision_are_not_smoothed() -> None:
    manager = Fp8Manager(CurrentScaling(), amax_group=None, exclude=("down",), smooth_swiglu=True)
    op = LinearLayer(manager, "down", before=Neighbor("swiglu", "any"), smoothable=C)
    assert not op.state.plan.smoothed
    manager.materialize(torch.device("cpu"))
    assert manager.state_dict() == {}
