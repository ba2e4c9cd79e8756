"""Scales without a division and reciprocals without a branch, against their definitions, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.numerics import sources
from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.quantize import scale_from_amax
from tests.kernels import DEVICE

triton = pytest.importorskip("triton")
arithmetic = pytest.importorskip("megafp8.kernels.arithmetic")
tl = triton.language

WIDTH = 1024


@triton.jit
def scale_kernel(amax, scale, inverse, eps, MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    s = arithmetic.scale_from_amax(tl.load(amax + i), MAX, eps, POWER_OF_TWO)
    tl.store(scale + i, s)
    tl.store(inverse + i, arithmetic.inverse(s, POWER_OF_TWO))


@triton.jit
def function_kernel(x, y, SIGMOID: tl.constexpr, INTERPRETED: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    if SIGMOID:
        tl.store(y + i, arithmetic.sigmoid(tl.load(x + i), INTERPRETED))
    else:
        tl.store(y + i, arithmetic.reciprocal(tl.load(x + i), INTERPRETED))


def amaxes() -> Tensor:
    """fp32 of every exponent, with the mantissas where something changes: around 1.75, at both ends, and some more."""
    mantissas = torch.cat(
        [
            torch.tensor([0, 1, 2, 0x5FFFFE, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFE, 0x7FFFFF]),
            torch.randint(0, 1 << 23, (6,), generator=torch.Generator().manual_seed(0)),
        ]
    )
    exponents = torch.arange(256) << 23
    return (exponents[:, None] + mantissas).flatten().int().view(torch.float32).to(DEVICE)  # infinities and NaNs too


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_scale_of_every_exponent(fmt: Format, power_of_two: bool, eps: float) -> None:
    amax = amaxes()
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    scale_kernel[(len(amax) // WIDTH,)](
        amax.view(torch.int32), scale, inverse, eps, fmt.max, power_of_two, WIDTH, enable_fp_fusion=False
    )
    expected = scale_from_amax(
        amax.nan_to_num(nan=torch.inf, posinf=torch.inf), fmt.max, eps=eps, power_of_two=power_of_two
    )
    assert torch.equal(scale, expected)
    assert torch.equal(inverse, expected.reciprocal())


def evaluated(x: Tensor, *, sigmoid: bool) -> Tensor:
    y = torch.empty_like(x)
    function_kernel[(len(x) // WIDTH,)](x, y, sigmoid, arithmetic.INTERPRETED, WIDTH, enable_fp_fusion=False)
    return y


def test_sigmoid_of_every_exponent() -> None:
    x = torch.cat([amaxes(), -amaxes()])
    assert torch.equal(evaluated(x, sigmoid=True).nan_to_num(nan=7.0), sources.sigmoid(x).nan_to_num(nan=7.0))


@pytest.mark.parametrize("exponent", [0, 1, 64, 125])
@pytest.mark.gpu
def test_reciprocal_of_every_mantissa(exponent: int) -> None:
    """Where a Newton step could fail to round to nearest, it would at some mantissa."""
    x = (torch.arange(1 << 23, dtype=torch.int32, device="cuda") + ((127 + exponent) << 23)).view(torch.float32)
    assert torch.equal(evaluated(x, sigmoid=False), torch.ones_like(x) / x)
