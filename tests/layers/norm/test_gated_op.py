"""The norm and gate of a recurrence's outputs: the kernels against PyTorch's operations in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.layers.norm.gated_op import _GatedNorm, gated
from tests.kernels import DEVICE
from tests.marks import slow_but

SHAPES = [(37, 2, 3, 8, True, False), (5, 1, 2, 48, False, True), (70, 1, 1, 6, True, True)]


@pytest.mark.parametrize(
    ("s", "b", "a", "c", "silu", "of_heads", "gate_first"),
    slow_but(
        [(*shape, gate_first) for shape in SHAPES for gate_first in (False, True)],
        (*SHAPES[0], False),
        (*SHAPES[1], True),
        (*SHAPES[2], True),
    ),
)
def test_kernels(s: int, b: int, a: int, c: int, silu: bool, of_heads: bool, gate_first: bool) -> None:
    """Values and all gradients; the gate's input is a slice of a wider tensor."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, requires_grad=True)

    x, wide, weight = random(s, b, a, c), random(s, b, a * c + 7), random(*((a, c) if of_heads else (c,)))
    dy = torch.randn(s, b, a * c, device=DEVICE)
    results = []
    for compute, dtype in ((gated, torch.float64), (_GatedNorm.apply, torch.float32)):
        of_x, z, w = x.to(dtype), wide[..., 3 : 3 + a * c].to(dtype), weight.to(dtype)
        y = compute(of_x, z, w, 1e-5, silu, gate_first)
        results.append([y, *torch.autograd.grad(y, [x, wide, weight], dy.to(dtype))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)
