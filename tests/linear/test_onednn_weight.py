"""Weights for oneDNN's kernels against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.linear.onednn_weight import OneDnnInt8Weight, OneDnnWeight, packs, packs_int8

N, K = 96, 160
TOKENS = (1, 8, 130)


def _exact(x_mk: Tensor, w_nk: Tensor, bias_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product, and the sum of the magnitudes of its terms, which bounds the error of any order of sums."""
    x, w = x_mk.double(), w_nk.double()
    y, magnitude = x @ w.t(), x.abs() @ w.abs().t()
    return (y, magnitude) if bias_n is None else (y + bias_n.double(), magnitude + bias_n.double().abs())


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_product(dtype: torch.dtype, m: int, biased: bool) -> None:
    if not packs(dtype):
        pytest.skip(f"oneDNN has no kernels for {dtype} here")
    w, x = torch.randn(N, K, dtype=dtype), torch.randn(m, K, dtype=dtype)
    bias = torch.randn(N) if biased else None
    exact, magnitude = _exact(x, w, None if bias is None else bias.to(dtype))
    eps = torch.finfo(dtype).eps
    for keeps_rows in (False, True):
        weight = OneDnnWeight(w, keeps_rows=keeps_rows)
        assert weight.shape == (N, K)
        y = weight.product(x, bias)
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= eps * exact.abs() + 2**-20 * magnitude).all()
    assert torch.backends.mkldnn.enabled


def _int8(n: int = N) -> tuple[Tensor, Tensor]:
    if not packs_int8():
        pytest.skip("this processor sums products of bytes in int16")
    return torch.randint(-127, 128, (n, K), dtype=torch.int8), torch.rand(n) / 64 + 1e-3


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_int8(dtype: torch.dtype, m: int, biased: bool) -> None:
    """Each input is off by at most half a step of its token's second digit, 1/(127 · 254) of its largest magnitude."""
    data, scale_inv = _int8()
    x = (torch.randn(m, K) * torch.logspace(-3, 3, m)[:, None]).to(dtype)
    bias = torch.randn(N) if biased else None
    y = OneDnnInt8Weight(data, scale_inv).product(x, bias)
    w = data.double() * scale_inv.double()[:, None]
    exact, _ = _exact(x, w, bias)
    step_m1 = x.double().abs().amax(1, keepdim=True) / 127 / 254
    bound = 0.55 * step_m1 * w.abs().sum(1) + torch.finfo(dtype).eps * exact.abs()
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= bound).all()


def test_int8_is_exact_for_multiples_of_the_step() -> None:
    """Inputs that int8 has, at both ends of its range, in int32 sums."""
    data, scale_inv = _int8()
    q = torch.randint(-127, 128, (5, K))
    q[:, 0], q[:, 1] = 127, -127
    y = OneDnnInt8Weight(data, torch.ones(N)).product(q.float())
    assert torch.equal(y, (q @ data.long().t()).float())
    assert not torch.equal(OneDnnInt8Weight(data, scale_inv).product(q.float()), y)


def test_int8_of_a_token_does_not_depend_on_others() -> None:
    weight = OneDnnInt8Weight(*_int8())
    x = torch.randn(8, K, dtype=torch.bfloat16)
    x[3] *= 1000
    x[5] = 0
    x[6, 2] = torch.nan
    y = weight.product(x)
    assert torch.equal(y[:3], weight.product(x[:3]))
    assert torch.equal(y[5], torch.zeros(N, dtype=torch.bfloat16))
    assert y[6].isnan().all()
    assert y[[0, 1, 2, 3, 4, 5, 7]].isfinite().all()
