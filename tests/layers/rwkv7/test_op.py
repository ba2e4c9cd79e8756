"""The recurrence of RWKV-7 in chunks against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.rwkv7.op import in_chunks


def recurrence(
    r_sbad: Tensor, decay_sbad: Tensor, k_sbad: Tensor, v_sbad: Tensor, removal_sbad: Tensor, rate_sbad: Tensor,
    state_badd: Tensor, starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the recurrence token by token. This is the specification of `in_chunks`.

    Args:
        r_sbad: Receptances, which tokens use to read the state.
        decay_sbad: Logarithms g of decays.
        k_sbad: Keys.
        v_sbad: Values.
        removal_sbad: Removal keys κ of length 1.
        rate_sbad: In-context learning rates a.
        state_badd: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.

    Returns:
        Outputs `[s, b, a, d]`, and the state after the last token.
    """
    outputs = []
    tokens = zip(r_sbad, decay_sbad, k_sbad, v_sbad, removal_sbad, rate_sbad, strict=True)
    for i, (r, g, k, v, removal, rate) in enumerate(tokens):
        if starts_sb is not None:
            state_badd = state_badd * ~starts_sb[i][:, None, None, None]
        removed = torch.einsum("badw,bad->baw", state_badd, removal)
        state_badd = state_badd * g.exp().unsqueeze(-1) - torch.einsum("bad,baw->badw", rate * removal, removed)
        state_badd = state_badd + torch.einsum("bad,baw->badw", k, v)
        outputs.append(torch.einsum("badw,bad->baw", state_badd, r))
    return torch.stack(outputs), state_badd


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
