"""MXFP8's scales in E8M0 against rational arithmetic, and its blocks at the edges of the range."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.recipes.mxfp8 import e8m0_decode, e8m0_encode, quantize_mxfp8

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def byte_of(value: float) -> int:
    """The smallest byte whose power of two is not below `value`, saturating."""
    if math.isnan(value):
        return 255
    if math.isinf(value):
        return 254
    return next((e for e in range(255) if Fraction(2) ** (e - 127) >= Fraction(value)), 254)


@pytest.mark.parametrize("device", DEVICES)
def test_all_bytes_decode_to_their_powers_of_two(device: str) -> None:
    values = e8m0_decode(torch.arange(256, dtype=torch.uint8, device=device)).cpu()
    assert values.dtype == torch.float32
    assert values[:255].double().tolist() == [math.ldexp(1.0, e - 127) for e in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_encoding_at_and_beside_every_power_of_two(device: str) -> None:
    powers = np.array([math.ldexp(1.0, e) for e in range(-149, 128)], np.float32)
    beside = [np.nextafter(powers, np.float32(end)) for end in (0, np.inf)]
    values = np.concatenate([powers, *beside, [0.0, -0.0, np.inf, np.nan]]).astype(np.float32)
    found = e8m0_encode(torch.from_numpy(values).to(device)).cpu()
    assert found.dtype == torch.uint8
    assert found.tolist() == [byte_of(float(v)) for v in values]


@settings(max_examples=200)
@given(st.integers(0, 0x7F800000))
def test_encoding_of_any_number(bits: int) -> None:
    value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert e8m0_encode(value).item() == byte_of(value.item())


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        # PTX, cvt.rp.satfinite.ue8m0x2.f32; OCP MX 1.0, section 5.4.1.
        (1.0, 127), (1.0000001, 128), (1.5, 128), (2.0, 128), (0.75, 127), (0.5, 126),
        (2.0**-127, 0), (2.0**-126, 1), (2.0**-149, 0), (0.0, 0), (2.0**127, 254), (3.4e38, 254),
        (float("inf"), 254), (float("nan"), 255),
    ],
)  # fmt: skip
def test_known_bytes(value: float, byte: int) -> None:
    assert e8m0_encode(torch.tensor(value)).item() == byte


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


def scale_byte_of_nvidia(amax: float, fp8_max: float) -> int:
    """The rule of arXiv:2506.08027 with Transformer Engine's arithmetic: amax times the rounded reciprocal in fp32."""
    value = float(np.float32(amax) * np.float32(1.0 / fp8_max))
    if math.isinf(value):
        return 254
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    log2_rounded_up = exponent - (mantissa == 0.5)
    return 0 if value == 0 else min(max(log2_rounded_up + 127, 0), 254)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_scales_are_those_of_nvidias_recipe_and_not_of_ocp(fmt: Format, device: str) -> None:
    """At and beside all powers of two and all multiples of the format's maximum by them; zero, subnormals."""
    powers = np.array([math.ldexp(1.0, e) for e in range(-149, 128)])
    edges = np.concatenate([powers, powers[powers < 2.0**112] * fmt.max]).astype(np.float32)
    beside = [np.nextafter(edges, np.float32(end)) for end in (0, np.inf)]
    amaxes = np.concatenate([edges, *beside, [0.0, 1e-42]]).astype(np.float32)
    x = torch.from_numpy(amaxes).to(device).view(-1, 1)
    found = e8m0_encode(quantize_mxfp8(x, fmt).scale_inv).flatten().tolist()
    assert found == [scale_byte_of_nvidia(float(amax), fmt.max) for amax in amaxes]
    normal = amaxes[(amaxes >= 2.0**-100) & (amaxes <= 2.0**100)]
    ocp = np.floor(np.log2(normal.astype(np.float64))) - math.floor(math.log2(fmt.max)) + 127
    kept = (amaxes >= 2.0**-100) & (amaxes <= 2.0**100)
    rounded_up = np.array(found)[kept] - ocp
    assert set(rounded_up) == {0, 1}  # one more where the largest value is above the format's maximum
    assert np.array_equal(rounded_up == 1, normal > fmt.max * 2.0 ** (ocp - 127))


def test_blocks_at_the_edges() -> None:
    x = torch.zeros(5, 32)
    x[1, 0] = 448 * 2.0**-127  # the largest amax of byte 0
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
