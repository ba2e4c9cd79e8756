"""Mamba-2's recurrence in chunks against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.layers.mamba2.reference import in_chunks, recurrence

B, HEADS, GROUPS, D, W = 2, 4, 2, 8, 5


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("s", "chunk", "documents"), [(37, 8, False), (64, 16, True), (5, 64, True), (1, 64, False)])
def test_chunks_are_the_recurrence(s: int, chunk: int, documents: bool) -> None:
    """Outputs, the state after, and gradients of everything, also of the state before."""
    torch.manual_seed(0)
    x, step, b, c = _random(s, B, HEADS, W), _random(s, B, HEADS), _random(s, B, GROUPS, D), _random(s, B, GROUPS, D)
    rate, skip, state = _random(HEADS), _random(HEADS), _random(B, HEADS, D, W)
    starts = torch.rand(s, B) < 0.2 if documents else None
    results = []
    for compute in (recurrence, lambda *inputs: in_chunks(*inputs, chunk=chunk)):
        steps = torch.nn.functional.softplus(step)
        y, after = compute(x, steps, -rate.exp(), b, c, skip, state, starts)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + after.square().sum()
        grads = torch.autograd.grad(loss, (x, step, rate, b, c, skip, state))
        results.append((y, after, *grads))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
