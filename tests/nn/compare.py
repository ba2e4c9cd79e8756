"""What tests of `megafp8.nn` share: random parameters, and outputs and all gradients of a module and of its twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
CPU64: dict[str, Any] = {"params_dtype": torch.float64, "device": "cpu"}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomized(module: Any) -> Any:
    """The module with random parameters of which none is special, biases and norms included."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            std = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(std * random(*parameter.shape, seed=i))
    return module


def assert_same(module: nn.Module, run: Callable[..., Any], twin: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """`run(*inputs)` and `twin(params, *inputs)`: equal outputs, and gradients of inputs and parameters."""
    params = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    own, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    actual, expected = (x if isinstance(x, tuple) else (x,) for x in (run(*own), twin(params, *theirs)))
    for result in (actual, expected):
        sum((y * random(*y.shape, seed=100)).sum() for y in result).backward()
    for ours, other in zip((*actual, *(x.grad for x in own)), (*expected, *(x.grad for x in theirs)), strict=True):
        torch.testing.assert_close(ours, other, **TIGHT)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.grad, params[name].grad, msg=lambda text, name=name: f"{name}: {text}", **TIGHT
        )
