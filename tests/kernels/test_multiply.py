"""Multiplication in place by a factor on the device, against torch's."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import DEVICE


@pytest.mark.parametrize("n", [0, 1, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0, math.nan])
def test_as_torch_does(monkeypatch: pytest.MonkeyPatch, n: int, factor: float) -> None:
    from megafp8.kernels import multiply  # once Triton knows where its kernels run

    monkeypatch.setattr(multiply, "_PROGRAMS", 2)  # each has several stretches
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    found = x.to(DEVICE, copy=True)
    multiply.multiply_(found, torch.tensor(factor, device=DEVICE))
    torch.testing.assert_close(found.cpu(), x * factor, rtol=0, atol=0, equal_nan=True)
