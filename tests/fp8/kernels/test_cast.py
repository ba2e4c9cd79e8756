"""The fused cast against its plain twin, bit for bit: natively on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.quantize import amax, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
kernels = pytest.importorskip("megafp8.fp8.kernels.cast")

SHAPES = [(64, 64), (1, 1), (3, 200), (130, 65), (128, 1), (1, 257), (0, 16), (16, 0)]
FORMATS = [E4M3, E5M2]


def bits(x8: torch.Tensor) -> torch.Tensor:
    """Codes as integers; every NaN as one value, since backends choose different ones."""
    codes = x8.view(torch.uint8).int()
    return torch.where(x8.float().isnan(), -1, codes)


def check(x: torch.Tensor, scale: float, fmt: Format) -> None:
    x = x.to(DEVICE)
    factor = torch.tensor(scale, device=DEVICE)
    newest = torch.tensor(0.25, device=DEVICE)
    rows, columns = kernels.cast(x, factor, fmt, transpose=True, newest_amax=newest)
    expected = quantize(x, factor, fmt)
    assert torch.equal(bits(rows), bits(expected))
    assert columns is not None
    assert columns.is_contiguous()
    assert torch.equal(bits(columns), bits(expected).t())
    whole = amax(x) if x.numel() else torch.tensor(0.0)
    assert newest.item() == max(0.25, whole.item())
    alone, none = kernels.cast(x, factor, fmt, transpose=False, newest_amax=None)
    assert none is None
    assert torch.equal(bits(alone), bits(expected))
    if x.numel():
        assert kernels.amax(x).item() == whole.item()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple[int, int], dtype: torch.dtype, fmt: Format) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    check((torch.randn(shape, generator=generator) * 40).to(dtype), 3.7, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_bf16_value(fmt: Format) -> None:
    """All 65,536 codes, zeros, subnormals, infinities and NaNs among them, at several scales."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for scale in (1.0, 448.0, 1e-3, 3.4e38):
        check(every, scale, fmt)
    finite = torch.where(every.float().isfinite(), every, torch.zeros_like(every))
    check(finite, 1.0, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_halfway_between_neighbours_and_a_bit_beside(fmt: Format) -> None:
    """Every midpoint of two codes in fp32, where rounding to even decides, and the fp32 values next to it."""
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    values = codes[codes.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)]
    check(torch.cat([values, middle, *beside]).view(1, -1), 1.0, fmt)


@settings(max_examples=20, deadline=None)
@given(
    r=st.integers(1, 70),
    c=st.integers(1, 70),
    scale=st.floats(1e-30, 1e30),
    spread=st.floats(-30, 30),
    seed=st.integers(0, 999),
    fmt=st.sampled_from(FORMATS),
)
def test_any_matrix(r: int, c: int, scale: float, spread: float, seed: int, fmt: Format) -> None:
    x = torch.randn(r, c, generator=torch.Generator().manual_seed(seed)) * 10.0**spread
    check(x.bfloat16(), scale, fmt)
