"""MXFP8 against rational arithmetic: the codes of factors, and the casts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megafp8.fp8 import E4M3, E5M2, Format
from megafp8.fp8.recipes.mxfp8 import e8m0_decode, e8m0_encode, quantize_mxfp8
from tests.fp8.reference import bytes_of, encode
from tests.fp8.test_blocks import spread

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def of_bits(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def code_of(value: float) -> int:
    """The smallest code whose power of two is not below `value`, saturating."""
    if math.isnan(value):
        return 255
    if math.isinf(value):
        return 254
    return next((e for e in range(255) if Fraction(2) ** (e - 127) >= Fraction(value)), 254)


def by_hand(x: NDArray[np.float32], fmt: Format) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Codes, and the factor of each block, in float64, where the scaling is exact."""
    r, c = x.shape
    codes, factors = np.zeros((r, c), np.uint8), np.zeros((r, -(-c // 32)))
    for i in range(r):
        for j in range(factors.shape[1]):
            block = x[i, 32 * j : 32 * j + 32]
            largest = np.nan_to_num(np.abs(block).max(), nan=np.inf, posinf=np.inf)
            e = code_of(float(largest / np.float32(fmt.max)))
            codes[i, 32 * j : 32 * j + 32] = encode(block.astype(np.float64) * 2.0 ** (127 - e), fmt)
            factors[i, j] = 2.0 ** (e - 127)
    return codes, factors


def check(x: Tensor, fmt: Format = E4M3, device: str = "cpu") -> None:
    scaled = quantize_mxfp8(x.to(device), fmt)
    codes, factors = by_hand(x.float().numpy(), fmt)
    assert scaled.data.dtype == fmt.dtype
    assert scaled.granularity.name == "1x32"
    np.testing.assert_array_equal(bytes_of(scaled.data), codes)
    assert scaled.scale_inv.dtype == torch.float32
    np.testing.assert_array_equal(scaled.scale_inv.cpu().double().numpy(), factors)


@pytest.mark.parametrize("device", DEVICES)
def test_all_codes_decode_to_their_powers_of_two(device: str) -> None:
    values = e8m0_decode(torch.arange(256, dtype=torch.uint8, device=device)).cpu()
    assert values.dtype == torch.float32
    assert values[:255].double().tolist() == [math.ldexp(1.0, e - 127) for e in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_encoding_at_and_beside_every_power_of_two(device: str) -> None:
    powers = np.array([math.ldexp(1.0, e) for e in range(-149, 128)], np.float32)
    beside = [np.nextafter(powers, np.float32(end)) for end in (0, np.inf)]
    values = np.concatenate([powers, *beside, [0.0, -0.0, np.inf, np.nan]]).astype(np.float32)
    codes = e8m0_encode(torch.from_numpy(values).to(device)).cpu()
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [code_of(float(v)) for v in values]


@settings(max_examples=200)
@given(st.integers(0, 0x7F800000))
def test_encoding_of_any_number(bits: int) -> None:
    value = of_bits([bits])
    assert e8m0_encode(value).item() == code_of(value.item())


@pytest.mark.parametrize(
    ("value", "code"),
    [
        # PTX, cvt.rp.satfinite.ue8m0x2.f32; OCP MX 1.0, section 5.4.1.
        (1.0, 127), (1.0000001, 128), (1.5, 128), (2.0, 128), (0.75, 127), (0.5, 126),
        (2.0**-127, 0), (2.0**-126, 1), (2.0**-149, 0), (0.0, 0), (2.0**127, 254), (3.4e38, 254),
        (float("inf"), 254), (float("nan"), 255),
    ],
)  # fmt: skip
def test_known_codes(value: float, code: int) -> None:
    assert e8m0_encode(torch.tensor(value)).item() == code


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (2, 33), (5, 100), (1, 31), (17, 64)])
def test_codes_and_factors(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check(spread(*shape, seed=sum(shape), octaves=30).to(dtype), device=device)


@settings(max_examples=40)
@given(
    r=st.integers(1, 5),
    c=st.integers(1, 70),
    scale=st.floats(-44, 36),
    special=st.sampled_from([0.0, 1e-45, -1e-39, 3.4e38, float("inf"), -float("inf"), float("nan")]),
    fmt=st.sampled_from([E4M3, E5M2]),
    seed=st.integers(0, 999),
)
def test_any_matrix(r: int, c: int, scale: float, special: float, fmt: Format, seed: int) -> None:
    x = (spread(r, c, seed).double() * 10.0**scale).float()
    check(x, fmt)
    x[seed % r, (7 * seed) % c] = special
    check(x, fmt)


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_value_fills_the_range_and_never_saturates(device: str) -> None:
    """Every bf16 and the fp32 numbers beside each multiple of 448, alone in a block: scaled into (224, 448]."""
    every = torch.arange(0x0080, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    edges = torch.tensor([448 * 2.0**e for e in range(-126, 119)])
    beside = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (0.0, torch.inf)]
    x = torch.cat([every[every >= 448 * 2.0**-126], edges, *beside])
    scaled = quantize_mxfp8(x.to(device).view(-1, 1))
    ratio = x.double() / scaled.scale_inv.cpu().flatten().double()
    assert ratio.max() == 448
    assert ratio.min() > 224


def test_round_trip_is_within_half_a_step() -> None:
    x = spread(64, 200, seed=3, octaves=20)
    scaled = quantize_mxfp8(x)
    factor = scaled.scale_inv.repeat_interleave(32, dim=1)[:, :200].double()
    error = (scaled.dequantize().double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, factor * 2.0**-10)).all()


def test_blocks_at_the_edges() -> None:
    x = torch.zeros(5, 32)
    x[1, 0] = 448 * 2.0**-127  # the largest amax of code 0
    x[2, :2] = torch.tensor([torch.inf, 1e30])
    x[3, :2] = torch.tensor([torch.nan, 1.0])
    x[4, 0] = 2.0**-140
    scaled = quantize_mxfp8(x)
    assert e8m0_encode(scaled.scale_inv).flatten().tolist() == [0, 0, 254, 254, 0]
    values = scaled.data.float()
    assert values[1, 0] == 448
    assert values[2, :2].tolist() == [448, 0]
    assert values[3, 0].isnan()
    assert values[3, 1] == 0
    assert values[4, 0] == 2.0**-9 * round(2.0**-13 * 2**9)
    back = scaled.dequantize()
    assert back[1, 0] == x[1, 0]
    assert back[2, 0] == torch.inf
    assert back[3, 0].isnan()
    assert (back[0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 32), (0, 0), (3, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    scaled = quantize_mxfp8(torch.empty(shape, dtype=torch.bfloat16))
    assert scaled.data.shape == shape
    assert tuple(scaled.scale_inv.shape) == (shape[0], shape[1] // 32)
    assert scaled.dequantize().shape == shape
