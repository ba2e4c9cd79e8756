"""Replayed modules train what eager ones train, bit for bit.

On a CPU `TapeCapture` takes the place of CUDA graphs: it runs no Python again and stays at the same addresses.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megafp8 import fp8, nn
from megafp8.nn.graphs import Precision, graph
from tests.marks import slow_but
from tests.nn.compare import randomized
from tests.nn.tape import TapeCapture

S, B, H, F = 8, 2, 32, 64
RECIPES: dict[str, fp8.Fp8Recipe | None] = {
    "none": None,
    "delayed": fp8.DelayedScaling(amax_history_len=3),
    "delayed interval": fp8.DelayedScaling(amax_history_len=3, interval=2),
    "current": fp8.CurrentScaling(),
    "rowwise": fp8.RowwiseScaling(),
    "blockwise": fp8.BlockwiseScaling(),
    "mxfp8": fp8.MXFP8Scaling(),
    "static": fp8.StaticScaling(calibration_steps=2),
    "bf16 wgrad": fp8.CurrentScaling(override_linear_precision=(False, False, True)),
}


def batch(seed: int, *shape: int, device: str = "cpu") -> Tensor:
    x = torch.randn(*(shape or (S, B, H)), generator=torch.Generator().manual_seed(seed))
    return x.to(device)


class Loop(NamedTuple):
    """A training: `recipe` by name, `micro` micro-batches a step, an evaluation after each step."""

    recipe: str = "delayed"
    steps: int = 6
    micro: int = 2
    warmup: int = 1
    first_microbatch: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def mlp(**options: Any) -> torch.nn.Module:
    return randomized(nn.LayerNormMLP(H, F, device="cpu", **options))


def block(**options: Any) -> torch.nn.Module:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu", **options}
    return randomized(nn.TransformerLayer(H, F, 4, **options))


class Stock(torch.nn.Module):
    """A model of torch's own layers, where three of them take the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(H, H) for _ in range(3))
        self.out = torch.nn.Linear(H, H, bias=False)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = self.out(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return {"y": y if scale is None else y * scale}


def converted(recipe: str) -> torch.nn.Module:
    model = randomized(Stock())
    return fp8.convert(model, RECIPES[recipe] or fp8.CurrentScaling(), skip=())


def precision(recipe: str) -> Precision:
    return Precision.of(recipe != "none", False, RECIPES[recipe], None)


def graphed(modules: Sequence[torch.nn.Module], loop: Loop, *, kwargs: dict[str, Any] | None = None) -> None:
    sample = (batch(0, device=loop.device).to(loop.dtype).requires_grad_(),)
    several = len(modules)
    graph(
        modules, [sample] * several, [kwargs or {}] * several, [precision(loop.recipe)] * several, loop.warmup,
        new_capture=TapeCapture,
    )  # fmt: skip


def trained(
    modules: Sequence[torch.nn.Module], loop: Loop, *, kwargs: Callable[[int], dict[str, Any]] = lambda seed: {}
) -> dict[str, Any]:
    """Everything that a training leaves behind: outputs, gradients, parameters, scales and amaxes, random numbers."""
    torch.manual_seed(0)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    found: dict[str, Any] = {}

    def forward(x: Tensor, **given: Any) -> Tensor:
        with fp8.autocast(enabled=loop.recipe != "none", recipe=RECIPES[loop.recipe]):
            for module in modules:
                y = module(x, **given)
                x = y["y"] if isinstance(y, dict) else y[0] if isinstance(y, tuple) else y
        return x

    for step in range(loop.steps):
        for i in range(loop.micro):
            seed = 10 * step + i
            x = batch(seed, device=loop.device).to(loop.dtype).requires_grad_()
            given = kwargs(seed) | ({"is_first_microbatch": i == 0} if loop.first_microbatch else {})
            y = forward(x, **given)
            (0.1 * y.float() * batch(100 + seed, device=loop.device)).sum().backward()
            found |= {f"{step}.{i} output": y.detach(), f"{step}.{i} x": x.grad}
        found |= {f"{step} {n} {p.shape}": None if p.grad is None else p.grad.clone() for n, p in enumerate(parameters)}
        found |= {
            f"{step} {n} main": p.main_grad.clone() for n, p in enumerate(parameters) if hasattr(p, "main_grad")
        }
        optimizer.step()
        optimizer.zero_grad()
        for module in modules:
            module.eval()
        with torch.no_grad():
            found[f"{step} evaluation"] = forward(batch(1000, device=loop.device).to(loop.dtype), **kwargs(0))
        for module in modules:
            module.train()
    for n, module in enumerate(modules):
        for linear in {id(layers): layers for layers in nn.graphs.linears_of(module)}.values():
            found |= {f"state {n} {key}": value.clone() for key, value in linear.layers._state().items()}
    found["random"] = torch.get_rng_state() if loop.device == "cpu" else torch.cuda.get_rng_state()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        same = other is None if value is None else torch.equal(other, value)
        assert same, f"{name}: {other} instead of {value}"


CASES = [
    (model, recipe)
    for model in ("mlp", "block", "converted")
    for recipe in RECIPES
]  # fmt: skip


def made(model: str, recipe: str) -> list[torch.nn.Module]:
    """Two modules that run in a row."""
    return [{"mlp": mlp, "block": block, "converted": lambda: converted(recipe)}[model]() for _ in range(2)]


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_replayed_training_is_the_eager_one(model: str, recipe: str) -> None:
    loop = Loop(recipe)
    modules = made(model, recipe)
    eager = trained(copy.deepcopy(modules), loop)
    graphed(modules, loop)
    replayed = trained(modules, loop)
    assert TapeCapture.recorded
    assert_same(replayed, eager)
