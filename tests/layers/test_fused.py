"""Norm, SwiGLU and GELU before the cast, against torch's own in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megafp8.fp8 import (
    BlockwiseScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Manager,
    Fp8Recipe,
    RowwiseScaling,
)
from megafp8.layers.activation.op import activation as activate
from megafp8.layers.norm.op import norm
from megafp8.layers.rotary.op import QKNorms, rotate_and_split, rotate_heads
from megafp8.linear.fusion import LinearInput
from megafp8.plan import Neighbor
from tests.fp8.linear_layer import LinearLayer


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_branch", [False, True])
def test_gradients_of_the_norm(with_bias: bool, with_branch: bool) -> None:
    x, branch, weight, bias = leaves((3, 2, 8), (3, 2, 8), (8,), (8,))
    inputs = [x, *([branch] if with_branch else []), weight, *([bias] if with_bias else [])]

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest = list(given)
        first, second = rest.pop(0), rest.pop(0) if with_branch else None
        total, y = norm(first, second, rest.pop(0), rest.pop(0) if with_bias else None, 1e-5, None)
        assert isinstance(y, torch.Tensor)
        return total, y

    assert torch.autograd.gradcheck(function, inputs)
    total, y = function(*inputs)
    whole = x + branch if with_branch else x
    torch.testing.assert_close(total, whole)
    expected = F.layer_norm(whole, (8,), weight, bias) if with_bias else F.rms_norm(whole, (8,), weight, 1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATED: dict[str, Any] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
    "limited_swiglu": lambda gate, up: F.silu(gate.clamp(max=10)) * up.clamp(-10, 10),
}
UNGATED: dict[str, Any] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("kind", GATED)
def test_gradients_of_gated_activations(kind: str) -> None:
    (leaf,) = leaves((3, 2, 10))
    gate_up = (9 * leaf).detach().requires_grad_()  # beyond the bounds, too

    def function(x: torch.Tensor) -> torch.Tensor:
        y = activate(kind, x, None, None, None)
        assert isinstance(y, torch.Tensor)
        return y

    assert torch.autograd.gradcheck(function, [gate_up])
    gate, up = gate_up.chunk(2, dim=-1)
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    torch.testing.assert_close(function(gate_up), GATED[kind](gate, up), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", UNGATED)
def test_gradients_of_ungated_activations(kind: str, with_bias: bool) -> None:
    x, bias = leaves((3, 2, 5), (5,))

    def function(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = activate(kind, x, bias, None, None)
        assert isinstance(y, torch.Tensor)
        return y

    inputs = [x, bias] if with_bias else [x]
    assert torch.autograd.gradcheck(function, inputs)
    expected = UNGATED[kind](x + bias if with_bias else x)
    torch.testing.assert_close(function(*inputs), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_rotated_heads() -> None:
    (qkv,) = leaves((5, 2, (3 + 2) * 4))
    angles = torch.randn(5, 1, 1, 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rotate_and_split(x * 1, 3, 1, cos, sin, None)

    assert torch.autograd.gradcheck(function, [qkv])
    q, k, v = function(qkv)
    heads = qkv.unflatten(-1, (-1, 4))
    for actual, part, turned in ((q, heads[:, :, :3], True), (k, heads[:, :, 3:4], True), (v, heads[:, :, 4:], False)):
        pairs = torch.complex(part[..., :2].contiguous(), part[..., 2:].contiguous())
        rotated = pairs * torch.complex(cos, sin) if turned else pairs
        torch.testing.assert_close(actual, torch.cat([rotated.real, rotated.imag], dim=-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["heads", "projection", "weightless"])
def test_gradients_of_normed_and_rotated_heads(kind: str) -> None:
    a, g, d = 3, 1, 4
    width = {"heads": (d, d), "projection": (a * d, g * d), "weightless": ()}[kind]
    qkv, *weights = leaves((5, 2, (a + 2 * g) * d), *((n,) for n in width))
    angles = torch.randn(5, 1, 1, d // 2, dtype=torch.float64)
    cos, sin, eps, zero_centered = angles.cos(), angles.sin(), 1e-2, kind == "heads"

    def function(x: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = (a * d, g * d) if kind == "projection" else None
        norms = QKNorms(*(given or (None, None)), eps, zero_centered, sizes)
        return rotate_and_split(x, a, g, cos, sin, None, norms)

    assert torch.autograd.gradcheck(function, [qkv, *weights])
    q, k, v = function(qkv, *weights)
    parts = qkv.split([a * d, g * d, g * d], dim=-1)
    torch.testing.assert_close(v, parts[2].unflatten(-1, (-1, d)))
    for actual, part, weight in zip((q, k), parts, weights or (None, None)):
        x = part if kind == "projection" else part.unflatten(-1, (-1, d))
        factor = None if weight is None else 1 + weight if zero_centered else weight
        normed = F.rms_norm(x, x.shape[-1:], factor, eps).view_as(actual)
        torch.testing.assert_close(actual, rotate_heads(normed, cos, sin), rtol=1e-12, atol=1e-12)


def test_values_that_another_needs_are_not_overwritten_unnoticed() -> None:
    (qkv,) = leaves((5, 2, 12))
    angles = torch.randn(5, 1, 1, 2, dtype=torch.float64)
    q, _, _ = rotate_and_split(qkv.exp(), 1, 1, angles.cos(), angles.sin(), None)  # exp keeps its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        q.sum().backward()


RECIPES = [CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockwiseScaling()]


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu of biased"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_quantized_and_high_precision_handoff_agree(recipe: Fp8Recipe, activation: str) -> None:
    """norm, linear, activation, linear in fp32: fusing the quantization, both ways, changes no bit."""
    generator = torch.Generator().manual_seed(0)
    width = 96 if activation == "swiglu" else 48
    x, norm_weight, w_up, w_down, dy, bias = (
        torch.randn(shape, generator=generator)
        for shape in ((9, 2, 32), (32,), (width, 32), (32, 48), (9, 2, 32), (48,))
    )
    results = []
    for fused in (False, True):
        manager = Fp8Manager(recipe, amax_group=None)
        place: dict[str, Any] = {"before": Neighbor("op", "any"), "after": Neighbor("op", "any")} if fused else {}
        up, down = (LinearLayer(manager, name, **place) for name in ("up", "down"))
        manager.materialize(torch.device("cpu"))
        biased = [bias] if activation == "gelu of biased" else []
        params = [nn.Parameter(p.clone()) for p in (x, norm_weight, w_up, w_down, *biased)]
        handoff, form = up.state.grad_handoff(), down.state.input_format
        assert (handoff is not None) == (form is not None) == fused
        total, normed = norm(params[0], None, params[1], None, 1e-5, up.state.input_format)
        z = up(normed, params[2], handoff=handoff)
        if activation == "swiglu":
            activated = activate("swiglu", z, None, form, handoff)
        else:
            activated = activate("gelu_tanh", z, params[4] if biased else None, form, handoff)
        assert isinstance(normed, LinearInput) == isinstance(activated, LinearInput) == fused
        y = total + down(activated, params[3])
        y.backward(dy)
        results.append([y.detach(), *(p.grad for p in params), *manager.state_dict().values()])
    for ours, expected in zip(results[1], results[0], strict=True):
        assert ours is not None
        assert expected is not None
        assert torch.equal(ours, expected)
