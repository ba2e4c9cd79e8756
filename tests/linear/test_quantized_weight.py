"""Quantized weights: errors against naive rounding, layouts over ranks, products on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import group

from megafp8.linear import quantized_weight
from megafp8.linear.quantized_weight import WEIGHT_FORMATS, QuantizedWeightFormat, WeightFormatName, quantize_weight
from tests.world import World


def heavy_tailed(n: int, k: int) -> Tensor:
    """Student's t with five degrees of freedom, as weights often are."""
    generator = torch.Generator().manual_seed(n + k)
    normal, others = torch.randn(n, k, generator=generator), torch.randn(5, n, k, generator=generator)
    return 0.02 * normal / others.square().mean(0).sqrt()


def naive(w_nk: Tensor, form: QuantizedWeightFormat) -> Tensor:
    """The numbers nearest to w where the largest magnitude of a row or group is the largest of the format; float64."""
    w = w_nk.double().view(len(w_nk), -1, form.group or w_nk.shape[1])
    largest = {"int8": 127, "fp8": 448, "int4": 7}[form.kind]
    scale_inv = w.abs().amax(2, keepdim=True) / largest
    scaled = w / scale_inv
    rounded = scaled.to(torch.float8_e4m3fn).double() if form.kind == "fp8" else scaled.round()
    return (rounded * scale_inv).view_as(w_nk)


@pytest.mark.parametrize(
    ("name", "gain"), [("int8", 1.0), ("fp8", 0.97), ("int4", 0.6), ("int4-64", 0.6), ("int4-32", 0.6)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_smaller_than_that_of_naive_rounding(
    monkeypatch: pytest.MonkeyPatch, name: WeightFormatName, gain: float, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(quantized_weight._CHUNK, "cpu", 5 * 1024)  # several chunks, of which one is shorter
    form, w = WEIGHT_FORMATS[name], heavy_tailed(63, 1024).to(dtype)
    found = quantize_weight(w, form)
    difference = (found.dequantize(torch.float64) - w.double()).square().mean()
    assert difference < gain * (naive(w, form) - w.double()).square().mean()
    assert found.shape == (63, 1024)
    per_weight = {"int8": 1 + 4 / 1024, "fp8": 1 + 4 / 1024, "int4": 0.5 + 3 / (form.group or 1)}[form.kind]
    stored = (found.data, found.scale_inv_gn, found.zero_gn)
    assert sum(x.nbytes for x in stored if x is not None) == per_weight * w.numel()
    assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_zeros_and_numbers_that_are_not_finite(name: WeightFormatName) -> None:
    """Zeros stay zeros; a row or group with NaN or infinity is NaN, others are not."""
    w = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    w[0, 3], w[1, 250], w[2] = torch.nan, torch.inf, 0
    found, form = quantize_weight(w, WEIGHT_FORMATS[name]).dequantize(), WEIGHT_FORMATS[name]
    width = form.group or 256
    assert found[0, :width].isnan().all()
    assert found[1, -width:].isnan().all()
    assert found.isnan().sum() == 2 * width
    assert not found[2].any()


def test_int4_stores_halves_of_groups_in_bytes() -> None:
    """What other kernels read: columns 0 and 32 of a group of 64 are its first byte."""
    w = torch.arange(16.0).repeat(4)[None] - 7
    weight = quantize_weight(w, WEIGHT_FORMATS["int4-64"])
    assert weight.zero_gn is not None
    assert (weight.scale_inv_gn.item(), weight.zero_gn.item()) == (1, 7)
    q = (w + 7).to(torch.uint8)
    torch.testing.assert_close(weight.data, q[:, :32] | (q[:, 32:] << 4))
    torch.testing.assert_close(weight.dequantize(), w, rtol=0, atol=0)


def _slices(w: Tensor, name: WeightFormatName) -> list[Tensor]:
    world = group.WORLD
    assert world is not None
    own = w.chunk(world.size(), dim=1)[world.rank()]
    found = quantize_weight(own, WEIGHT_FORMATS[name], world)
    return [x for x in (found.data, found.scale_inv_gn, found.zero_gn) if x is not None]


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_columns_on_several_ranks_are_quantized_as_on_one(world2: World, name: WeightFormatName) -> None:
    w = heavy_tailed(24, 512)
    whole = quantize_weight(w, WEIGHT_FORMATS[name])
    of_ranks = world2.run(_slices, w, name)
    as_bytes = [x.view(torch.uint8) for x in (whole.data, *(x[0] for x in of_ranks))]
    torch.testing.assert_close(torch.cat(as_bytes[1:], dim=1), as_bytes[0], rtol=0, atol=0)
    for index, expected in enumerate([whole.scale_inv_gn, whole.zero_gn]):
        if expected is None:
            continue
        found = [x[index + 1] for x in of_ranks]
        joined = torch.cat(found) if name == "int4" else found[1]
        torch.testing.assert_close(joined, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_on_a_cpu(name: WeightFormatName, dtype: torch.dtype) -> None:
    weight = quantize_weight(heavy_tailed(24, 256), WEIGHT_FORMATS[name])
    x, bias = torch.randn(5, 256).to(dtype), torch.randn(24)
    expected = x.double() @ weight.dequantize(torch.float64).t() + bias
    tolerance = {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    found = weight.product(x, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **tolerance)
