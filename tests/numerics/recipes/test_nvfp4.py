"""NVFP4: rounding to four bits, scales at their edges, stochastic rounding in training, the Hadamard transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from megafp8.fp8 import E4M3, NVFP4Scaling
from megafp8.numerics.formats import E2M1
from megafp8.numerics.quantize import amax
from megafp8.numerics.recipes.nvfp4 import hadamard_sums, quantize_nvfp4, round_to_e2m1
from megafp8.numerics.stochastic_rounding import CastNoise
from tests.fp8.reference import E2M1_VALUES, finite_values, spread, to_e2m1
from tests.linear.test_linear import assert_product, managed, run
from tests.numerics.recipes.test_conformance import check_cast, nv, tensors
from tests.numerics.test_stochastic_rounding import made_noise

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WEIGHT = pytest.mark.parametrize("weight", [False, True], ids=["1x16", "16x16"])
ALL_VALUES = torch.tensor([*E2M1_VALUES, *-E2M1_VALUES]).float()


def test_the_format_that_holds_all_values() -> None:
    """The number four bits stand for: sign, two bits of exponent with bias 1, one of mantissa."""
    exponents, mantissas = np.divmod(np.arange(8), 2)
    values = np.where(exponents == 0, mantissas / 2, (1 + mantissas / 2) * 2.0 ** (exponents - 1))
    np.testing.assert_array_equal(E2M1_VALUES, values)
    assert torch.equal(ALL_VALUES.to(E2M1.dtype).float(), ALL_VALUES)
    assert E2M1_VALUES[-1] == E2M1.max


@pytest.mark.parametrize("device", DEVICES)
def test_all_values_round_to_themselves_by_any_noise(device: str) -> None:
    values = ALL_VALUES.to(device)
    for rounded in [round_to_e2m1(values)] + [
        round_to_e2m1(values, torch.full_like(values, u)) for u in (0.0, 0.5, 1 - 2**-16)
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
    assert round_to_e2m1(beside).tolist() == [E2M1_VALUES[x > E2M1_VALUES].max(), E2M1_VALUES[x < E2M1_VALUES].min()]


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_of_every_bf16_value(device: str) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    rounded = round_to_e2m1(x.to(device)).cpu()
    np.testing.assert_array_equal(rounded.numpy(), to_e2m1(x.numpy()))
    assert torch.equal(rounded.signbit(), x.signbit())


@settings(max_examples=300)
@given(st.floats(-8, 8, width=32), st.integers(0, 2**16 - 1))
def test_rounding_of_any_number(x: float, half: int) -> None:
    value, noise = np.array([x], np.float32), np.array([half / 2**16], np.float32)
    assert round_to_e2m1(torch.tensor(x)).item() == to_e2m1(value).item()
    assert round_to_e2m1(torch.tensor(x), torch.tensor(noise.item())).item() == to_e2m1(value, noise).item()


@WEIGHT
@pytest.mark.parametrize("device", DEVICES)
def test_block_scales_at_every_value_and_midpoint(weight: bool, device: str) -> None:
    """Under an amax of 2688, S is 1 and a block's scale is a sixth of its amax in E4M3."""
    values = finite_values(E4M3)
    points = 6 * np.concatenate([values, (values[1:] + values[:-1]) / 2, [448.0]])
    x = torch.zeros(16 if weight else 1, 16 * len(points))
    x[0, ::16] = torch.from_numpy(points).float()
    made = quantize_nvfp4(x.to(device), weight=weight, stochastic=None)
    check_cast(made, x, nv(weight))
    assert made.tensor_scale_inv is not None
    assert made.tensor_scale_inv.item() == 1


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


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_rounding_is_unbiased(device: str) -> None:
    """One row many times, with 6 in it and 2688 as the amax, so that factors are 1 and values are x."""
    n = 16384
    row = torch.tensor([6, 5.9, 5.0, 4.1, 3.7, 3.0, 2.2, 1.9, 1.6, 1.0, 0.6, 0.3, 0.01, 0.0, -0.2, -4.7])
    x = row.repeat(n + 1, 1)
    x[-1] *= 448
    noise = CastNoise(*(x if isinstance(x, tuple) else x.to(device) for x in made_noise("dy", step=1, seed=3)))
    scaled = quantize_nvfp4(x.to(device), weight=False, stochastic=noise)
    assert (scaled.scale_inv[:-1] == 1).all()
    values = scaled.data[:-1].double().cpu()
    step = torch.where(row.abs() < 2, 0.5, torch.where(row.abs() < 4, 1.0, 2.0)).double()
    part = (row.double() / step).abs().frac()
    deviation = step * (part * (1 - part) / n).sqrt()
    assert ((values.mean(0) - row.double()).abs() <= 5 * deviation + 1e-9).all()
    assert ((values - row).abs() < step).all()
    to_nearest = quantize_nvfp4(x, weight=False, stochastic=None).data[0].double()
    assert ((to_nearest - row).abs() > 5 * deviation)[part > 0].any()


def test_noise_is_a_function_of_its_place() -> None:
    x = spread(32, 32, seed=1)

    def data(step: int) -> Tensor:
        scaled = quantize_nvfp4(x, weight=False, stochastic=made_noise("dy", step))
        return scaled.data.float()

    assert torch.equal(data(0), data(0))
    assert not torch.equal(data(0), data(1))


def sylvester() -> NDArray[np.float64]:
    """The Hadamard matrix of 16 points from its definition: the sign is the parity of the common bits of i and j."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4


def hadamard_transform(x_rc: Tensor) -> Tensor:
    return hadamard_sums(x_rc) / 4


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


# --- in training ----------------------------------------------------------------------------------------------------


def cast_gradient(dy: Tensor, microbatch: int, step: int = 0, seed: int = 0) -> Tensor:
    noise = made_noise("layer.grad_output", step, microbatch, seed)
    return quantize_nvfp4(dy, weight=False, stochastic=noise).dequantize(torch.float64)


def test_each_microbatch_and_step_is_rounded_anew() -> None:
    manager, op = managed(NVFP4Scaling())
    x, weight, dy = tensors()

    def dx() -> Tensor:
        x.grad = None
        run(op, x, weight, dy)
        assert x.grad is not None
        return x.grad.clone()

    w_nk = quantize_nvfp4(weight.detach(), weight=True, stochastic=None).dequantize(torch.float64)
    for step in range(2):
        for microbatch in range(3):
            with manager.recording(False):
                dx()  # an evaluation does not count
            assert_product(dx(), cast_gradient(dy, microbatch, step), w_nk)
        manager.end_step()


def test_it_numbers_microbatches_of_all_replicas_and_heeds_the_seed() -> None:
    """Rank 1 of 3 has the micro-batches 1, 4, ... of the global batch."""
    _, op = managed(NVFP4Scaling(), seed=5, data_parallel=(1, 3))
    x, weight, dy = tensors()
    w_nk = quantize_nvfp4(weight.detach(), weight=True, stochastic=None).dequantize(torch.float64)
    for microbatch in (1, 4):
        x.grad = None
        _, dx, _ = run(op, x, weight, dy)
        assert dx is not None
        assert_product(dx, cast_gradient(dy, microbatch, seed=5), w_nk)


def test_it_is_right_on_average() -> None:
    """Of a gradient that rounding to nearest would lose to a neighbour a thousand times as large."""
    _, op = managed(NVFP4Scaling())
    weight = nn.Parameter(torch.eye(16))
    dy = torch.full((1, 16), 0.1)
    dy[0, 0] = 6.0
    draws, total = 400, torch.zeros(1, 16)
    for _ in range(draws):
        x = torch.zeros(1, 16, requires_grad=True)
        op(x, weight).backward(dy)
        assert x.grad is not None
        total += x.grad
    assert total[0, 0] == pytest.approx(draws * 6, rel=1e-3)
    # A value is 0.5 with probability 0.2, else 0: the mean of 400 · 15 has a deviation of 0.0026.
    assert (total[0, 1:] / draws).mean() == pytest.approx(0.1, abs=0.008)
    assert quantize_nvfp4(dy, weight=False, stochastic=None).data.float()[0, 1:].abs().max() == 0
