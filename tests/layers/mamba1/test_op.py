"""The recurrence of Mamba-1 in segments against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.mamba1 import op
from megafp8.layers.mamba1.op import SelectiveTokens, SelectiveWeights
from megafp8.layers.recurrent.scan import Scan

B, N, D = 2, 3, 5


def recurrence(
    tokens: SelectiveTokens, weights: SelectiveWeights, state_bnd: Tensor, starts_sb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    Args:
        tokens: Tensors of the tokens.
        weights: Parameters.
        state_bnd: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.

    Returns:
        Outputs `[s, b, n]`, and the state after the last token.
    """
    rate_nd, outputs = -weights.log_rate_nd.exp(), []
    for i, (x, step, z, b, c) in enumerate(zip(*tokens, strict=True)):
        if starts_sb is not None:
            state_bnd = state_bnd * ~starts_sb[i][:, None, None]
        step = F.softplus(step + weights.step_bias_n)
        state_bnd = state_bnd * (rate_nd * step.unsqueeze(-1)).exp()
        state_bnd = state_bnd + torch.einsum("bn,bd->bnd", step * x, b)
        y = torch.einsum("bnd,bd->bn", state_bnd, c) + weights.skip_n * x
        outputs.append(y * F.silu(z))
    return torch.stack(outputs), state_bnd


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
