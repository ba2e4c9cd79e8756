"""Casts bit for bit against a second implementation; where scales come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.fp8 import E4M3, E5M2, Format
from megafp8.fp8.quantize import amax, dequantize, quantize
from megafp8.fp8.quantizers import CurrentQuantizer, DelayedQuantizer, Quantizer
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import ScaledTensor
from tests.fp8.reference import bytes_of, encode, finite_values, scale_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


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


def rows_of(quantizer: Quantizer, x: Tensor) -> ScaledTensor:
    rows = quantizer(Plain(x), rowwise=True, columnwise=False).rowwise
    assert rows is not None
    return rows


@FORMATS
def test_cast_saturates_infinities_and_keeps_nan(fmt: Format) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38, -0.0])
    values = quantize(x, torch.tensor(2.0), fmt).float()
    assert values[:2].tolist() == [fmt.max, -fmt.max]
    assert values[2].isnan()
    assert values[3] == fmt.max
    assert values[4] == 0
    assert values[4].signbit()


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


@pytest.mark.parametrize("power_of_two", [False, True])
@FORMATS
def test_current_scale_is_from_the_tensor_itself(fmt: Format, power_of_two: bool) -> None:
    x = torch.randn(6, 10) * 3
    x8, scale_inv, *_ = rows_of(CurrentQuantizer(fmt, None, eps=0.0, power_of_two=power_of_two), x)
    scale = np.float32(scale_of(x.abs().max().item(), fmt.max, power_of_two=power_of_two))
    assert scale_inv.item() == np.float32(1) / scale
    np.testing.assert_array_equal(bytes_of(x8), encode(x.numpy() * scale, fmt))


def test_current_scale_of_zeros_and_of_a_broken_tensor_is_one() -> None:
    quantizer = CurrentQuantizer(E4M3, None, eps=0.0, power_of_two=False)
    for value in (0.0, torch.inf, torch.nan):
        x8, scale_inv, *_ = rows_of(quantizer, torch.tensor([[value, 0.0]]))
        assert scale_inv.item() == 1
        assert x8.float()[0, 1] == 0


def test_current_scale_with_an_epsilon() -> None:
    quantizer = CurrentQuantizer(E4M3, None, eps=1.75, power_of_two=False)
    assert rows_of(quantizer, torch.zeros(1, 1)).scale_inv.item() == 1 / 256
    assert rows_of(quantizer, torch.tensor([[-3.5]])).scale_inv.item() == 1 / 128


def test_delayed_casts_with_the_given_scale_and_raises_the_amax() -> None:
    scale, newest = torch.tensor(2.0), torch.tensor(3.0)
    quantizer = DelayedQuantizer(E4M3, scale, scale.reciprocal(), newest)
    x8, scale_inv, *_ = rows_of(quantizer, torch.tensor([[1.0, -2.5]]))
    assert x8.float().tolist() == [[2.0, -5.0]]
    assert scale_inv.item() == 0.5
    assert newest.item() == 3
    rows_of(quantizer, torch.tensor([[1.0, -4.5]]))
    assert newest.item() == 4.5
    quantizer.recording = False
    rows_of(quantizer, torch.tensor([[9.0]]))
    assert newest.item() == 4.5
