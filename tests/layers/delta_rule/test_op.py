"""The gated delta rule in chunks against the rule token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.delta_rule.op import _at_step, _of_last_steps, in_chunks, recurrence

B, HEADS, D, W = 2, 3, 8, 5


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("of_channels", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(
    ("s", "chunk", "documents", "steps"),
    [(37, 8, False, 1), (64, 16, True, 1), (5, 64, True, 1), (1, 64, False, 1), (33, 16, True, 3), (1, 64, False, 2)],
)
@pytest.mark.parametrize("erase", [False, True], ids=["", "erase"])
def test_chunks_are_the_recurrence(
    s: int, chunk: int, documents: bool, steps: int, of_channels: bool, erase: bool
) -> None:
    """Outputs, the state after, and gradients of everything, also of the state before."""
    torch.manual_seed(0)
    q, gate, k, v, beta = (
        _random(tokens, B, HEADS, *width)
        for tokens, width in ((s, (D,)), *((steps * s, width) for width in ((D,), (D,), (W,), ())))
    )
    decay, state = _random(s, B, HEADS, *((D,) if of_channels else ())), _random(B, HEADS, D, W)
    starts = torch.rand(s, B) < 0.2 if documents else None
    of_length_one = k / k.norm(dim=-1, keepdim=True)
    results = []
    for compute in (recurrence, lambda *inputs: in_chunks(*inputs, chunk=chunk)):
        lookup = gate.sigmoid() * of_length_one if erase else None
        y, after = compute(q, of_length_one, v, -F.softplus(decay), beta.sigmoid(), state, starts, lookup)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        loss = (y * weights).sum() + after.square().sum()
        inputs = (q, k, v, decay, beta, state, *((gate,) if erase else ()))
        results.append((y, after, *torch.autograd.grad(loss, inputs, retain_graph=True)))
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


def test_steps_are_tokens() -> None:
    """A later step is a token that does not decay, and the output of an earlier step is not read: so kernels see it."""
    torch.manual_seed(2)
    n, s = 3, 7
    q, decay, state = _random(s, B, HEADS, D), -_random(s, B, HEADS).exp(), _random(B, HEADS, D, W)
    k, v, beta = (_random(n * s, B, HEADS, *width) for width in ((D,), (W,), ()))
    y, last = recurrence(_at_step(n - 1, q, n), k, v, _at_step(0, decay, n), beta, state)
    for expected, found in zip(recurrence(q, k, v, decay, beta, state), (_of_last_steps(y, n), last), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
