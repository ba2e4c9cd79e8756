"""Norm and SwiGLU before the cast, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megafp8.fp8.fused import norm, swiglu


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


def test_gradients_of_swiglu() -> None:
    (gate_up,) = leaves((3, 2, 10))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = swiglu(x, None, None)
        assert isinstance(y, torch.Tensor)
        return y

    assert torch.autograd.gradcheck(function, [gate_up])
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(function(gate_up), F.silu(gate) * up, rtol=1e-12, atol=1e-12)
