"""xIELU against `transformers`, its gradients against autograd of the specification, and its rounding in bf16."""

from __future__ import annotations

import torch
from transformers.activations import XIELUActivation

from megafp8.layers.activation import reference
from megafp8.layers.activation.op import xielu

_ALPHAS = [torch.tensor([0.3], dtype=torch.float64), torch.tensor([-0.7], dtype=torch.float64)]


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and a gradient in float64, with values at and around zero."""
    x, dy = torch.randn(2, 40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0] = torch.tensor([0.0, -5e-7, 5e-7, -40.0, 40.0])
    return x, dy


def test_values_and_gradients_in_float64() -> None:
    x, dy = _inputs()
    theirs = XIELUActivation(dtype=torch.float64)
    theirs.alpha_p.data, theirs.alpha_n.data = (a.clone() for a in _ALPHAS)
    leaves = [t.clone().requires_grad_() for t in (x, *_ALPHAS)]
    y = xielu(*leaves)
    found = torch.autograd.grad(y, leaves, dy)
    x.requires_grad_()
    expected = theirs(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, torch.autograd.grad(reference.xielu(*leaves), leaves, dy), rtol=1e-14, atol=1e-14)
    of_theirs = torch.autograd.grad(expected, [x, theirs.alpha_p, theirs.alpha_n], dy)
    torch.testing.assert_close(found, of_theirs, rtol=1e-14, atol=1e-14)


def test_bf16_rounds_once() -> None:
    x, dy = (t.bfloat16() for t in _inputs())
    alphas = [a.bfloat16() for a in _ALPHAS]
    narrow = [t.clone().requires_grad_() for t in (x, *alphas)]
    wide = [t.float().requires_grad_() for t in (x, *alphas)]
    y, expected = xielu(*narrow), xielu(*wide)
    assert torch.equal(y, expected.bfloat16())
    found = torch.autograd.grad(y, narrow, dy)
    for ours, exact in zip(found, torch.autograd.grad(expected, wide, dy.float()), strict=True):
        assert torch.equal(ours, exact.bfloat16())
