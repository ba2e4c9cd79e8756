"""The norm kernels against their plain twin, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megafp8.ops import norm_reference as plain
from tests.kernels import DEVICE

kernels = pytest.importorskip("megafp8.kernels.norm")

SHAPES = [(5, 64), (7, 100), (1, 1), (33, 257), (3, 4096), (0, 16)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(shape: tuple[int, int], dtype: torch.dtype, centered: bool) -> None:
    x, branch = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    for total, given in ((x, None), (x + branch, branch)):
        actual, mean, rstd = kernels.statistics(x, given, 1e-5, centered=centered)
        expected_mean, expected_rstd = plain.statistics(total, 1e-5, centered=centered)
        assert torch.equal(actual, total)
        assert torch.equal(rstd, expected_rstd)
        assert (mean is None) == (expected_mean is None)
        assert mean is None or torch.equal(mean, expected_mean)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape: tuple[int, int], dtype: torch.dtype, centered: bool) -> None:
    dy, x, dresidual = (noise(*shape, dtype=dtype, seed=i) for i in range(3))
    weight = noise(shape[1], dtype=dtype)
    mean, rstd = plain.statistics(x, 1e-5, centered=centered)
    for residual in (None, dresidual):
        actual = kernels.backward(dy, x, mean, rstd, weight, residual)
        expected = plain.backward(dy, x, mean, rstd, weight, residual)
        for a, e in zip(actual, expected):
            assert (a is None) == (e is None)
            assert a is None or torch.equal(a, e)
