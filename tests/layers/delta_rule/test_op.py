"""The gated delta rule in chunks against the rule token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.delta_rule.op import in_chunks, recurrence

B, HEADS, D, W = 2, 3, 8, 5


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("of_channels", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(("s", "chunk", "documents"), [(37, 8, False), (64, 16, True), (5, 64, True), (1, 64, False)])
def test_chunks_are_the_recurrence(s: int, chunk: int, documents: bool, of_channels: bool) -> None:
    """Outputs, the state after, and gradients of everything, also of the state before."""
    torch.manual_seed(0)
    q, k, v, beta = (_random(s, B, HEADS, *width) for width in ((D,), (D,), (W,), ()))
    decay, state = _random(s, B, HEADS, *((D,) if of_channels else ())), _random(B, HEADS, D, W)
    starts = torch.rand(s, B) < 0.2 if documents else None
    of_length_one = k / k.norm(dim=-1, keepdim=True)
    results = []
    for compute in (recurrence, lambda *inputs: in_chunks(*inputs, chunk=chunk)):
        y, after = compute(q, of_length_one, v, -F.softplus(decay), beta.sigmoid(), state, starts)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        loss = (y * weights).sum() + after.square().sum()
        results.append((y, after, *torch.autograd.grad(loss, (q, k, v, decay, beta, state), retain_graph=True)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_decays_of_channels_that_forget_at_once() -> None:
    """Sums of decays within a chunk are far below what an exponential can hold, whose inverse would be infinite."""
    torch.manual_seed(1)
    q, k, v, state = (
        torch.randn(*x) for x in ((32, B, HEADS, D), (32, B, HEADS, D), (32, B, HEADS, W), (B, HEADS, D, W))
    )
    decay, beta = -torch.rand(32, B, HEADS, D) * 200, torch.rand(32, B, HEADS)
    k = F.normalize(k, dim=-1)
    for expected, found in zip(*(f(q, k, v, decay, beta, state) for f in (recurrence, in_chunks)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
