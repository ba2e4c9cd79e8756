"""Casts and scales bit for bit against a second implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megafp8.fp8 import E4M3, E5M2, Format
from megafp8.numerics.quantize import amax, block_amax, dequantize, quantize, quantize_blocks, scale_from_amax
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, Granularity, ScaledTensor
from tests.fp8.reference import bytes_of, encode, finite_values, scale_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
FP32_MAX = torch.finfo(torch.float32).max
AMAXES = [1e-45, 1e-40, 1.17e-38, 1e-30, 0.1, 1 / 3, 1.0, 447.0, 448.0, 449.0, 57344.0, 1e30, FP32_MAX]


def all_bf16() -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def boundaries(fmt: Format) -> Tensor:
    """Every value, every midpoint between neighbours (the overflow one too), and the fp32 numbers next to each."""
    values = finite_values(fmt)
    step = values[-1] - values[-2]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] + step / 2, values[-1] + step]])
    points = points.astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    return torch.from_numpy(np.concatenate([points, -points]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 0.37, 1.7e5, 2.0**-12, torch.finfo(torch.float32).max])
@FORMATS
def test_cast_of_every_bf16_value(fmt: Format, scale: float, device: str) -> None:
    x = all_bf16()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = encode(x.float().numpy() * np.float32(scale), fmt)
    x8 = quantize(x.to(device), torch.tensor(scale, device=device), fmt)
    assert x8.dtype == fmt.dtype
    np.testing.assert_array_equal(bytes_of(x8), expected)


@pytest.mark.parametrize("device", DEVICES)
@FORMATS
def test_cast_at_every_boundary(fmt: Format, device: str) -> None:
    x = boundaries(fmt)
    x8 = quantize(x.to(device), torch.tensor(1.0, device=device), fmt)
    np.testing.assert_array_equal(bytes_of(x8), encode(x.numpy(), fmt))


def test_quantize_leaves_its_argument_alone() -> None:
    x = torch.full((4,), 1000.0)
    quantize(x, torch.tensor(1.0), E4M3)
    assert x.tolist() == [1000.0] * 4


@FORMATS
def test_dequantize_inverts_a_power_of_two_scale(fmt: Format) -> None:
    values = torch.from_numpy(finite_values(fmt)).float()
    scale = torch.tensor(2.0**-5)
    x8 = quantize(values / scale, scale, fmt)
    torch.testing.assert_close(dequantize(x8, scale.reciprocal()), values / scale, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax(dtype: torch.dtype) -> None:
    assert amax(torch.tensor([[1.0, -3.0], [2.0, 0.5]], dtype=dtype)).item() == 3
    assert amax(torch.tensor([[1.0, 5.0]], dtype=dtype)).item() == 5
    assert amax(torch.tensor([-0.0, 0.0], dtype=dtype)).item() == 0
    assert amax(torch.tensor([1.0, -torch.inf], dtype=dtype)).item() == torch.inf
    assert amax(torch.tensor([1.0, torch.nan, 2.0], dtype=dtype)).item() == torch.inf
    assert amax(torch.tensor([1.0], dtype=dtype)).dtype == torch.float32


def test_transpose_is_a_row_major_copy() -> None:
    x = torch.randn(5, 7)
    matrix = ScaledTensor(quantize(x, torch.tensor(1.0), E4M3), torch.tensor(1.0))
    transposed = matrix.t()
    assert transposed.data.is_contiguous()
    np.testing.assert_array_equal(bytes_of(transposed.data), bytes_of(matrix.data).T)


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_scale_bit_for_bit(fp8_max: float, power_of_two: bool, margin: int, eps: float) -> None:
    options: dict[str, Any] = {"margin": margin, "eps": eps, "power_of_two": power_of_two}
    amax = torch.cat([torch.tensor(AMAXES), torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 9])
    expected = [scale_of(a, fp8_max, **options) for a in amax.tolist()]
    assert scale_from_amax(amax, fp8_max, **options).tolist() == expected
    assert scale_from_amax(amax, torch.full_like(amax, fp8_max), **options).tolist() == expected


def test_tiny_amax_gives_the_largest_scale() -> None:
    assert scale_from_amax(torch.tensor(1e-45), 448.0).item() == FP32_MAX
    assert scale_from_amax(torch.tensor(1e-45), 448.0, power_of_two=True).item() == 2.0**127


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_unusable_amax_gives_one_or_the_previous_scale(amax: float, power_of_two: bool) -> None:
    x = torch.tensor([amax, 1.0])
    assert scale_from_amax(x, 448.0, power_of_two=power_of_two)[0].item() == 1
    previous = torch.tensor([0.7, 0.7])
    kept = scale_from_amax(x, 448.0, power_of_two=power_of_two, previous=previous)
    assert kept[0] == previous[0]
    assert kept[1] == (256 if power_of_two else 448)


def test_eps_applies_to_zero_but_not_to_infinity() -> None:
    scale = scale_from_amax(torch.tensor([0.0, math.inf, math.nan]), 448.0, eps=2.0)
    assert scale.tolist() == [224, 1, 1]


@given(amax=st.floats(2.0**-100, 2.0**100, width=32), margin=st.integers(0, 4), fp8_max=st.sampled_from([448, 57344]))
def test_power_of_two_with_margin_is_the_older_definition(amax: float, margin: int, fp8_max: int) -> None:
    """2^(floor(log2(fp8_max / amax)) - margin), the logarithm taken exactly (of the fp32 quotient)."""
    quotient = float(np.float32(fp8_max) / np.float32(amax))
    expected = 2.0 ** (math.frexp(quotient)[1] - 1 - margin)
    assert scale_from_amax(torch.tensor(amax), float(fp8_max), margin=margin, power_of_two=True).item() == expected


def test_scaled_amax_never_exceeds_the_format() -> None:
    amax = torch.rand(10000, generator=torch.Generator().manual_seed(1)) * 100 + 1e-3
    power = scale_from_amax(amax, 448.0, power_of_two=True)
    assert ((amax * power) <= 448).all()
    assert ((amax * power) > 224 * (1 - 1e-6)).all()


def test_scale_keeps_any_shape() -> None:
    amax = torch.rand(2, 3, 4) + 1
    assert scale_from_amax(amax, 448.0).shape == amax.shape
    assert scale_from_amax(amax[0, 0, 0], 448.0).shape == ()


@pytest.mark.parametrize(
    ("largest", "scale_inv"), [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (225.0, 1.0), (1.0, 1 / 256)]
)
@pytest.mark.parametrize("granularity", [ROW, BLOCK_1X128, BLOCK_128X128], ids=lambda g: g.name)
def test_powers_of_two_are_rounded_down(granularity: Granularity, largest: float, scale_inv: float) -> None:
    x = torch.tensor([[largest, -largest / 3]])
    scaled = quantize_blocks(x, E4M3, granularity, power_of_two=True, eps=0.0)
    assert scaled.scale_inv.unique().tolist() == [scale_inv]


def test_block_amax_takes_any_dtype_and_layout() -> None:
    x = torch.arange(12.0).view(3, 4) - 9
    for granularity, expected in [
        (ROW, [[9.0], [5.0], [2.0]]),
        (BLOCK_1X128, [[9.0], [5.0], [2.0]]),
        (BLOCK_128X128, [[9.0]]),
    ]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            largest = block_amax(x.to(dtype), granularity)
            assert largest.dtype == torch.float32
            assert largest.tolist() == expected
    x[0, 1], x[1, 2] = torch.nan, -torch.inf
    assert block_amax(x, ROW).flatten().tolist() == [torch.inf, torch.inf, 2]
    x[:, 1:] = 0
    assert block_amax(x.t(), ROW).tolist() == [[9.0], [0.0], [0.0], [0.0]]
