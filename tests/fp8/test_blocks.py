"""Casts by rows and blocks against loops over blocks in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megafp8.fp8 import E4M3, E5M2, Format
from megafp8.fp8.quantize import block_amax, quantize_1x128, quantize_128x128, quantize_rows
from megafp8.fp8.tensor import BLOCK_1X128, BLOCK_128X128, ROW, ScaledTensor
from tests.fp8.reference import bytes_of, encode, scale_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Quantize = Callable[..., ScaledTensor]
# Rows and columns of a block; a row of any length is below a million.
QUANTIZERS: dict[str, tuple[Quantize, int, int]] = {
    "row": (quantize_rows, 1, 10**6),
    "1x128": (quantize_1x128, 1, 128),
    "128x128": (quantize_128x128, 128, 128),
}
SHAPES = [(1, 1), (3, 200), (130, 129), (128, 256), (129, 1), (2, 128)]


def by_hand(
    x: NDArray[np.float32], block: tuple[int, int], fmt: Format, *, power_of_two: bool, eps: float
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes, and the inverse factor of each element, block by block."""
    codes, factors = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    for top in range(0, x.shape[0], block[0]):
        for left in range(0, x.shape[1], block[1]):
            here = np.s_[top : top + block[0], left : left + block[1]]
            largest = float(np.abs(x[here]).max())  # NumPy's maximum of a NaN is a NaN
            usable = np.isfinite(largest) and max(largest, eps) > 0
            scale = np.float32(scale_of(largest, fmt.max, power_of_two=power_of_two, eps=eps) if usable else 1)
            with np.errstate(over="ignore", invalid="ignore"):
                codes[here] = encode(x[here] * scale, fmt)
            factors[here] = np.float32(1) / scale
    return codes, factors


def check(name: str, x: Tensor, fmt: Format, *, power_of_two: bool, eps: float = 0.0, device: str = "cpu") -> None:
    function, rows, columns = QUANTIZERS[name]
    scaled = function(x.to(device), fmt, power_of_two=power_of_two, eps=eps)
    codes, factors = by_hand(x.float().numpy(), (rows, columns), fmt, power_of_two=power_of_two, eps=eps)
    assert scaled.data.dtype == fmt.dtype
    assert scaled.scale_inv.dtype == torch.float32
    assert scaled.granularity.name == name
    assert tuple(scaled.scale_inv.shape) == (-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    np.testing.assert_array_equal(bytes_of(scaled.data), codes)
    with np.errstate(over="ignore"):
        values = scaled.data.float().cpu().numpy() * factors
    np.testing.assert_array_equal(scaled.dequantize().cpu().numpy(), values)  # NaN equals NaN here


def spread(r: int, c: int, seed: int, octaves: float = 12) -> Tensor:
    """Normals of sizes that differ by block: each element times a power of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, c, generator=generator) * 2 ** (octaves * torch.rand(r, c, generator=generator) - octaves / 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_codes_and_factors(name: str, shape: tuple[int, int], fmt: Format, power_of_two: bool, device: str) -> None:
    check(name, spread(*shape, seed=sum(shape)).bfloat16(), fmt, power_of_two=power_of_two, device=device)


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(QUANTIZERS)),
    r=st.integers(1, 140),
    c=st.integers(1, 300),
    scale=st.floats(-40, 36),
    eps=st.sampled_from([0.0, 1e-4, 30.0]),
    power_of_two=st.booleans(),
    special=st.sampled_from([0.0, -0.0, 1e-45, -1e-39, 3.4e38, float("inf"), -float("inf"), float("nan")]),
    fmt=st.sampled_from([E4M3, E5M2]),
    seed=st.integers(0, 999),
)
def test_any_matrix(
    name: str, r: int, c: int, scale: float, eps: float, power_of_two: bool, special: float, fmt: Format, seed: int
) -> None:
    x = spread(r, c, seed) * 10.0**scale
    x[seed % r, (7 * seed) % c] = special
    check(name, x, fmt, power_of_two=power_of_two, eps=eps)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_block_that_is_not_finite_has_factor_one_and_leaves_the_others_alone(name: str) -> None:
    x = torch.ones(256, 256)
    x[0, 0], x[0, 1], x[200, 200] = torch.nan, torch.inf, -torch.inf
    scaled = QUANTIZERS[name][0](x, E4M3, power_of_two=True, eps=0.0)
    values = scaled.data.float()
    assert values[0, 0].isnan()
    assert values[0, 1] == 448
    assert values[200, 200] == -448
    assert scaled.scale_inv[0, 0] == scaled.scale_inv[-1 if name == "128x128" else 200, -1] == 1
    assert values[0, 2] == values[200, 199] == 1
    assert scaled.dequantize()[130, 5] == 1
    assert values[130, 5] == 256  # its own factor, rounded down from 448
    assert values.isnan().sum() == 1


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_have_factor_one(name: str) -> None:
    scaled = QUANTIZERS[name][0](torch.tensor([[0.0, -0.0]]), E4M3, power_of_two=False, eps=0.0)
    assert (scaled.scale_inv == 1).all()
    assert bytes_of(scaled.data).tolist() == [[0x00, 0x80]]


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (5, 0), (0, 256), (256, 0)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_empty_matrices(name: str, shape: tuple[int, int]) -> None:
    scaled = QUANTIZERS[name][0](torch.empty(shape, dtype=torch.bfloat16), E4M3, power_of_two=True, eps=0.0)
    assert scaled.data.shape == shape
    assert tuple(scaled.scale_inv.shape) == scaled.granularity.grid(*shape)
    assert (scaled.scale_inv == 1).all()
    assert scaled.dequantize().shape == shape


@pytest.mark.parametrize("name", QUANTIZERS)
def test_powers_of_two_are_rounded_down(name: str) -> None:
    for amax, factor in [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (225.0, 1.0), (1.0, 1 / 256)]:
        scaled = QUANTIZERS[name][0](torch.tensor([[amax, -amax / 3]]), E4M3, power_of_two=True, eps=0.0)
        assert scaled.scale_inv.unique().tolist() == [factor]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_round_trip_is_within_half_a_step(name: str, power_of_two: bool) -> None:
    x = spread(150, 270, seed=5)
    scaled = QUANTIZERS[name][0](x, E4M3, power_of_two=power_of_two, eps=0.0)
    _, factors = by_hand(
        x.numpy(), (QUANTIZERS[name][1], QUANTIZERS[name][2]), E4M3, power_of_two=power_of_two, eps=0.0
    )
    error = (scaled.dequantize().double() - x.double()).abs().numpy()
    # Half a unit of the three-bit mantissa, or half the spacing of subnormals; some fp32 roundings where not a power.
    bound = np.maximum(x.double().abs().numpy() * 2.0**-4, factors.astype(np.float64) * 2.0**-10)
    assert (error <= bound * (1.0 if power_of_two else 1 + 2.0**-18)).all()


def test_columns_are_a_cast_of_their_own_except_for_squares() -> None:
    x = spread(128, 128, seed=9)
    rows, columns = (quantize_1x128(a, E4M3, power_of_two=True, eps=0.0) for a in (x, x.t().contiguous()))
    assert not torch.equal(columns.dequantize().t(), rows.dequantize())
    rows, columns = (quantize_128x128(a, E4M3, power_of_two=True, eps=0.0) for a in (x, x.t().contiguous()))
    assert torch.equal(columns.dequantize().t(), rows.dequantize())


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
