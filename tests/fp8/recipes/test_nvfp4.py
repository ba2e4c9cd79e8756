"""NVFP4 against its definition, number by number; stochastic rounding and the Hadamard transform."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from megafp8.fp8 import E4M3
from megafp8.fp8.formats import E2M1
from megafp8.fp8.quantize import amax
from megafp8.fp8.recipes.nvfp4 import hadamard_transform, quantize_nvfp4, round_to_e2m1
from megafp8.fp8.stochastic_rounding import noise_key
from megafp8.philox import Key
from tests.fp8.reference import decode, encode, finite_values
from tests.fp8.test_blocks import spread
from tests.fp8.test_noise import uniform_by_hand

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WEIGHT = pytest.mark.parametrize("weight", [False, True], ids=["1x16", "16x16"])


def decode_e2m1(code: int) -> float:
    """The number four bits stand for: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code & 7) >> 1, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


MAGNITUDES = [decode_e2m1(code) for code in range(8)]


def nearest(x: float) -> float:
    """The nearest magnitude, the one of the even code in a tie, with x's sign; a NaN stays one."""
    if math.isnan(x):
        return x
    size = min(abs(x), MAGNITUDES[-1])
    code = min(range(8), key=lambda code: (abs(MAGNITUDES[code] - size), code % 2))
    return math.copysign(MAGNITUDES[code], x)


def by_chance(x: float, noise: float) -> float:
    """The neighbour above with the probability of the way there."""
    size = min(abs(x), MAGNITUDES[-1])
    low = max(m for m in MAGNITUDES if m <= size)
    high = min((m for m in MAGNITUDES if m > size), default=low)
    up = high > low and noise < (size - low) / (high - low)
    return math.copysign(high if up else low, x)


def tensor_scale_by_hand(x: NDArray[np.float32]) -> np.float32:
    """S: 1 for zeros and what is not finite."""
    whole = np.abs(x).max(initial=0)
    if not np.isfinite(whole) or whole == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return min(np.float32(2688) / whole, np.finfo(np.float32).max)


def by_hand(x: NDArray[np.float32], weight: bool, key: Key | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Values, and the factor of each element, from the definition in fp32."""
    r, c = x.shape
    tensor_scale = tensor_scale_by_hand(x)
    noise = uniform_by_hand(r, c, key) if key else None
    values, factors = np.zeros_like(x), np.zeros_like(x)
    height = 16 if weight else 1
    for top in range(0, r, height):
        for left in range(0, c, 16):
            here = np.s_[top : top + height, left : left + 16]
            largest = np.nan_to_num(np.abs(x[here]).max(), nan=np.inf, posinf=np.inf)
            code = encode(np.array([largest * tensor_scale / np.float32(6)], np.float32), E4M3)[0]
            block = np.float32(decode(int(code), E4M3))
            factors[here] = block / tensor_scale
            for i in range(top, min(top + height, r)):
                for j in range(left, min(left + 16, c)):
                    y = float(x[i, j] * tensor_scale / block) if block else 0.0
                    values[i, j] = by_chance(y, noise[i][j]) if noise else nearest(y)
    return values, factors


def check(x: Tensor, *, weight: bool, key: Key | None = None, device: str = "cpu") -> None:
    scaled = quantize_nvfp4(x.to(device), weight=weight, stochastic=key)
    values, factors = by_hand(x.float().numpy(), weight, key)
    assert scaled.data.dtype == torch.float8_e4m3fn
    assert scaled.scale_inv.dtype == torch.float32
    assert scaled.granularity.name == ("16x16" if weight else "1x16")
    assert scaled.tensor_scale is not None
    assert scaled.tensor_scale.item() == tensor_scale_by_hand(x.float().numpy())
    assert tuple(scaled.scale_inv.shape) == (-(-x.shape[0] // (16 if weight else 1)), -(-x.shape[1] // 16))
    np.testing.assert_array_equal(scaled.data.float().cpu().numpy(), values)
    np.testing.assert_array_equal(scaled.dequantize().cpu().numpy(), values * factors)


def test_all_codes_are_values_of_the_format_that_holds_them() -> None:
    values = torch.tensor([decode_e2m1(code) for code in range(16)])
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(values.to(E2M1.dtype).float(), values)
    assert E2M1.max == MAGNITUDES[-1]
    assert E2M1.min_normal == MAGNITUDES[2]


@pytest.mark.parametrize("device", DEVICES)
def test_all_codes_round_to_themselves_by_any_noise(device: str) -> None:
    values = torch.tensor([decode_e2m1(code) for code in range(16)], device=device)
    for rounded in [round_to_e2m1(values)] + [
        round_to_e2m1(values, torch.full_like(values, u)) for u in (0.0, 0.5, 1 - 2**-24)
    ]:
        assert torch.equal(rounded, values)
        assert torch.equal(rounded.signbit(), values.signbit())


@pytest.mark.parametrize(
    ("x", "value"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_code(x: float, value: float) -> None:
    """PTX, cvt.rn.satfinite.e2m1x2.f32; the same table as in torchao's tests."""
    assert round_to_e2m1(torch.tensor([x, -x])).tolist() == [value, -value]
    beside = torch.nextafter(torch.tensor([x, x]), torch.tensor([0.0, 9.0]))
    assert round_to_e2m1(beside).tolist() == [max(m for m in MAGNITUDES if m < x), min(m for m in MAGNITUDES if m > x)]


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_of_every_bf16_value(device: str) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    x = x[(x.abs() < 8) | ~x.isfinite()]
    rounded = round_to_e2m1(x.to(device)).cpu()
    np.testing.assert_array_equal(rounded.numpy(), np.array([nearest(v) for v in x.tolist()], np.float32))
    assert torch.equal(rounded.signbit(), x.signbit())


@settings(max_examples=300)
@given(st.floats(-8, 8, width=32), st.integers(0, 2**24 - 1))
def test_rounding_of_any_number(x: float, word: int) -> None:
    assert round_to_e2m1(torch.tensor(x)).item() == nearest(x)
    noise = word / 2**24
    assert round_to_e2m1(torch.tensor(x), torch.tensor(noise)).item() == by_chance(x, noise)


@WEIGHT
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (17, 33), (16, 16), (32, 15), (2, 100)])
def test_values_and_factors(shape: tuple[int, int], weight: bool, device: str) -> None:
    x = spread(*shape, seed=sum(shape))
    check(x, weight=weight, device=device)
    check(x.bfloat16(), weight=weight, device=device)
    check(x, weight=weight, key=noise_key(1, 2, "dy"), device=device)


@WEIGHT
@pytest.mark.parametrize("device", DEVICES)
def test_factors_at_every_value_and_midpoint(weight: bool, device: str) -> None:
    """Under an amax of 2688, S is 1 and a block's factor is a sixth of its amax in E4M3."""
    values = finite_values(E4M3)
    points = 6 * np.concatenate([values, (values[1:] + values[:-1]) / 2, [448.0]])
    x = torch.zeros(16 if weight else 1, 16 * len(points))
    x[0, ::16] = torch.from_numpy(points).float()
    check(x, weight=weight, device=device)


@settings(max_examples=40)
@given(
    r=st.integers(1, 20),
    c=st.integers(1, 40),
    scale=st.floats(-44, 36),
    special=st.sampled_from([0.0, 1e-45, -1e-39, 3.4e38, float("inf"), -float("inf"), float("nan")]),
    weight=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_matrix(r: int, c: int, scale: float, special: float, weight: bool, seed: int) -> None:
    x = (spread(r, c, seed, octaves=30).double() * 10.0**scale).float()
    check(x, weight=weight)
    check(x, weight=weight, key=noise_key(seed, 0, "dy"))
    x[seed % r, (7 * seed) % c] = special
    check(x, weight=weight)


@WEIGHT
def test_round_trip_error(weight: bool) -> None:
    """Half a step at most, but for the largest values of a block whose factor was rounded down: those saturate at 6."""
    x = spread(48, 64, seed=2, octaves=6)
    scaled = quantize_nvfp4(x, weight=weight, stochastic=None)
    _, factors = by_hand(x.numpy(), weight, None)
    error, size = (scaled.dequantize() - x).abs().numpy() / factors, x.abs().numpy() / factors
    step = np.select([size < 2, size < 4], [0.5, 1.0], 2.0)
    assert (error <= np.where(size > 6, size - 6, step / 2) * (1 + 1e-6) + 1e-6).all()
    assert size.max() <= 6 * (1 + 1 / 16)


@WEIGHT
def test_blocks_that_are_zero_tiny_or_not_finite(weight: bool) -> None:
    zeros = quantize_nvfp4(torch.zeros(32, 32), weight=weight, stochastic=None)
    assert not zeros.data.float().any()
    assert not zeros.scale_inv.any()

    # Beside an amax of 2688 (S = 1) the smallest factor is 2^-9, and 6·2^-10 or less vanishes.
    x = torch.zeros(64, 16)
    x[0, 0], x[16, 0], x[32, 0], x[48, 0] = 2688.0, 6 * 2.0**-9, 6 * 2.0**-10, -6 * 2.0**-10 * 1.01
    scaled = quantize_nvfp4(x, weight=weight, stochastic=None)
    assert scaled.data.float()[::16, 0].tolist() == [6, 6, 0, -3]
    assert scaled.scale_inv[:: (1 if weight else 16), 0].tolist() == [448, 2.0**-9, 0, 2.0**-9]

    x = torch.ones(64, 16)
    x[0, 0], x[16, 0], x[32, 0] = torch.nan, torch.inf, -torch.inf
    scaled = quantize_nvfp4(x, weight=weight, stochastic=None)
    values = scaled.data.float()
    assert values[0, 0].isnan()
    assert values.isnan().sum() == 1
    assert values[[16, 32], 0].tolist() == [6, -6]
    assert values[16, 1] == 0
    assert values[48, 0] == 6  # a finite block under S = 1: 1/6 is 0.171875 in E4M3, and 5.8 rounds to 6
    assert scaled.scale_inv[-1, 0] == 0.171875


@pytest.mark.parametrize("shape", [(0, 32), (0, 0), (3, 0), (0, 5)])
@pytest.mark.parametrize("transformed", [False, True])
@WEIGHT
def test_empty_matrices(shape: tuple[int, int], weight: bool, transformed: bool) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    x = hadamard_transform(x) if transformed else x
    scaled = quantize_nvfp4(x, weight=weight, stochastic=noise_key(0, 0, ""))
    assert scaled.data.shape == shape
    assert tuple(scaled.scale_inv.shape) == scaled.granularity.grid(*shape)
    assert scaled.dequantize().shape == shape


@WEIGHT
def test_a_slice_is_cast_as_in_the_whole(weight: bool) -> None:
    """Slices of whole blocks, one of them without the tensor's largest values."""
    x = spread(32, 64, seed=5)
    x[:, 48:] *= 2.0**-9
    whole = quantize_nvfp4(x, weight=weight, stochastic=None)
    part = quantize_nvfp4(x[:, 48:], amax(x), weight=weight, stochastic=None)
    assert torch.equal(part.data.float(), whole.data[:, 48:].float())
    assert torch.equal(part.scale_inv, whole.scale_inv[:, 3:])
    alone = quantize_nvfp4(x[:, 48:], weight=weight, stochastic=None)
    assert not torch.equal(alone.scale_inv, part.scale_inv)


def test_weights_are_the_same_forward_and_backward() -> None:
    x = spread(40, 56, seed=4)
    rows, columns = (quantize_nvfp4(a, weight=True, stochastic=None) for a in (x, x.t().contiguous()))
    assert torch.equal(columns.dequantize().t(), rows.dequantize())


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_rounding_is_unbiased(device: str) -> None:
    """One row many times, with 6 in it and 2688 as the amax, so that factors are 1 and values are x."""
    n = 16384
    row = torch.tensor([6, 5.9, 5.0, 4.1, 3.7, 3.0, 2.2, 1.9, 1.6, 1.0, 0.6, 0.3, 0.01, 0.0, -0.2, -4.7])
    x = row.repeat(n + 1, 1)
    x[-1] *= 448
    scaled = quantize_nvfp4(x.to(device), weight=False, stochastic=noise_key(3, 1, "dy"))
    assert (scaled.scale_inv[:-1] == 1).all()
    values = scaled.data[:-1].double().cpu()
    step = torch.where(row.abs() < 2, 0.5, torch.where(row.abs() < 4, 1.0, 2.0)).double()
    part = (row.double() / step).abs().frac()
    deviation = step * (part * (1 - part) / n).sqrt()
    assert ((values.mean(0) - row.double()).abs() <= 5 * deviation + 1e-9).all()
    assert ((values - row).abs() < step).all()
    to_nearest = quantize_nvfp4(x, weight=False, stochastic=None).data[0].double()
    assert ((to_nearest - row).abs() > 5 * deviation)[part > 0].any()


def test_noise_is_a_function_of_the_key() -> None:
    x = spread(32, 32, seed=1)

    def data(step: int) -> Tensor:
        scaled = quantize_nvfp4(x, weight=False, stochastic=noise_key(0, step, "dy"))
        return scaled.data.float()

    assert torch.equal(data(0), data(0))
    assert not torch.equal(data(0), data(1))


def sylvester() -> NDArray[np.float64]:
    """The Hadamard matrix of 16 points from its definition: the sign is the parity of the common bits of i and j."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4


def test_hadamard_transform() -> None:
    matrix = sylvester()
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    x = torch.randint(-50, 50, (5, 48)).float()  # sums of integers are exact
    expected = x.double().numpy().reshape(5, 3, 16) @ matrix
    np.testing.assert_array_equal(hadamard_transform(x).numpy(), expected.reshape(5, 48))
    ragged = hadamard_transform(x[:, :37])
    assert ragged.dtype == torch.float32
    np.testing.assert_array_equal(ragged[:, :32].numpy(), expected.reshape(5, 48)[:, :32])
    assert torch.equal(ragged[:, 32:], x[:, 32:37])
    assert torch.equal(hadamard_transform(x[:, :7].bfloat16()), x[:, :7])


@pytest.mark.parametrize("c", [16, 64, 37, 5])
def test_the_transform_leaves_the_product(c: int) -> None:
    a, b = torch.randint(-50, 50, (4, c)).float(), torch.randint(-50, 50, (6, c)).float()
    assert torch.equal(hadamard_transform(a) @ hadamard_transform(b).t(), a @ b.t())


def test_an_outlier_is_spread_over_its_block_and_the_product_stays() -> None:
    """Impulses become rows of the matrix, of one magnitude, which E2M1 represents: their product stays as it was."""
    a, b = torch.zeros(2, 32), torch.zeros(3, 32)
    a[0, 3], a[1, 20], b[0, 3], b[1, 20], b[2, 19] = 4.0, -8.0, 2.0, 16.0, 4.0
    parts = [quantize_nvfp4(hadamard_transform(x), weight=False, stochastic=None) for x in (a, b)]
    assert parts[0].data.float().abs()[0].tolist() == [6.0] * 16 + [0.0] * 16
    product = parts[0].dequantize() @ parts[1].dequantize().t()
    torch.testing.assert_close(product, a @ b.t(), atol=0, rtol=1e-6)  # 2688 / amax and its inverse are rounded
