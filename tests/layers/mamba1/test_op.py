"""The recurrence of Mamba-1 in segments against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.layers.mamba1 import op
from megafp8.layers.mamba1.reference import SelectiveTokens, SelectiveWeights, recurrence
from megafp8.layers.recurrent.scan import Scan

B, N, D = 2, 3, 5


@pytest.mark.parametrize(("s", "documents"), [(150, False), (128, True), (37, True), (3, False), (1, True)])
def test_segments_are_the_recurrence(s: int, documents: bool) -> None:
    """Outputs, the state after, and gradients of everything, also of the state before."""
    torch.manual_seed(0)
    shapes = *[(s, B, N)] * 3, *[(s, B, D)] * 2, (N,), (N, D), (N,), (B, N, D)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    starts, results = torch.rand(s, B) < 0.1 if documents else None, list[tuple[Tensor, ...]]()
    for compute in (recurrence, op.selective_scan):
        y, after = compute(SelectiveTokens(*inputs[:5]), SelectiveWeights(*inputs[5:8]), inputs[8], starts)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + after.square().sum()
        results.append((y, after, *torch.autograd.grad(loss, inputs)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_strong_decays_do_not_overflow() -> None:
    """Decays whose products underflow give finite states and gradients in fp32."""
    decay = torch.full((64, 1, 1, 1), 1e-30, requires_grad=True)
    states = Scan.apply(decay, torch.ones(64, 1, 1, 1), torch.ones(1, 1, 1))
    states.sum().backward()
    assert decay.grad is not None
    assert torch.equal(states, torch.ones_like(states))
    assert torch.equal(decay.grad, torch.ones_like(decay))
