"""The recurrence of RWKV-7 in chunks against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.rwkv7.op import in_chunks, recurrence


@pytest.mark.parametrize(("s", "documents"), [(37, False), (32, True), (1, False)])
def test_chunks_are_the_recurrence(s: int, documents: bool) -> None:
    """Outputs, the state after, and gradients of everything, also of the state before."""
    torch.manual_seed(0)
    r, decay, k, v, removal, rate = (torch.randn(s, 2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(6))
    state = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    starts = torch.rand(s, 2) < 0.2 if documents else None
    inputs, results = (r, decay, k, v, removal, rate, state), list[tuple[Tensor, ...]]()
    for compute in (recurrence, in_chunks):
        operands = r, -F.softplus(decay), k, v, F.normalize(removal, dim=-1), rate.sigmoid()
        y, after = compute(*operands, state, starts)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + after.square().sum()
        results.append((y, after, *torch.autograd.grad(loss, inputs)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
