"""Logits of 16-bit inputs in fp32, and their gradients, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafp8.linear.fp32_linear import bf16_terms, fp32_linear
from tests.kernels import DEVICE, noise


def test_three_terms_of_8_bits_add_up_to_24() -> None:
    x = noise(64, 64) * torch.logspace(-20, 20, 64, device=DEVICE)
    terms = bf16_terms(x)
    assert torch.equal(sum(term.double() for term in terms), x.double())
    assert all(term.dtype == torch.bfloat16 for term in terms)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_as_exact_as_in_fp32(dtype: torch.dtype, device: str) -> None:
    """Errors are of the sums: below 2^-18 of the sum of magnitudes; dx is then rounded to x's dtype."""
    (m, n, k), generator = (512, 24, 256), torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=generator).to(device, dtype) for rows in (m, n))
    dy = torch.randn(m, n, generator=generator).to(device)
    x, weight = x.requires_grad_(), nn.Parameter(w)
    weight.grad_dtype = torch.float32
    y = fp32_linear(x, weight)
    y.backward(dy)
    assert y.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == dtype
    for found, a, b, rounding in (
        (y, x.detach(), w.t(), 0.0),
        (x.grad, dy, w, torch.finfo(dtype).eps),
        (weight.grad, dy.t(), x.detach(), 0.0),
    ):
        a64, b64 = a.double(), b.double()
        exact, magnitude = a64 @ b64, a64.abs() @ b64.abs()
        assert torch.all((found.double() - exact).abs() <= 2**-18 * magnitude + rounding * exact.abs())
