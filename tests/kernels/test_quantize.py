"""Every source cast every way by the tile kernel, against the plain twin, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megafp8.fp8 import reference
from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.recipes.blockwise import cast_1x128, cast_128x128
from megafp8.fp8.recipes.rowwise import amaxes as both_amaxes
from megafp8.fp8.recipes.rowwise import cast_rows
from megafp8.fp8.sources import GELU, GELUGrad, Normalized, Plain, QKVGrad, ScaledColumns, Source, SwiGLU, SwiGLUGrad
from megafp8.fp8.tensor import QuantizedTensor
from tests.kernels import DEVICE

kernels = pytest.importorskip("megafp8.kernels.quantize")
of_recipes = {"amaxes": both_amaxes, "cast_rows": cast_rows, "cast_1x128": cast_1x128, "cast_128x128": cast_128x128}
plain = SimpleNamespace(**vars(reference), **of_recipes)

FORMATS = [E4M3, E5M2]
SHAPES = [(64, 64), (1, 1), (3, 200), (130, 66), (0, 16), (16, 0)]


def bits(x8: Tensor) -> Tensor:
    """Codes as integers; every NaN as one value, since backends choose different ones."""
    return torch.where(x8.float().isnan(), -1, x8.view(torch.uint8).int())


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def rms(r: int, c: int, dtype: torch.dtype) -> Source:
    return Normalized(noise(r, c, scale=3, dtype=dtype), noise(r).abs(), noise(c, dtype=dtype))


def layer(r: int, c: int, dtype: torch.dtype) -> Source:
    return Normalized(
        noise(r, c, dtype=dtype), noise(r).abs(), noise(c, dtype=dtype), noise(r, seed=1), noise(c, seed=1)
    )


SOURCES: dict[str, Callable[[int, int, torch.dtype], Source]] = {
    "plain": lambda r, c, dtype: Plain(noise(r, c, scale=40, dtype=dtype)),
    "rmsnorm": rms,
    "layernorm": layer,
    "swiglu": lambda r, c, dtype: SwiGLU(noise(r, 2 * c, scale=4, dtype=dtype)),
    "swiglu_grad": lambda r, c, dtype: SwiGLUGrad(
        noise(r, c // 2 * 2, scale=4, dtype=dtype), noise(r, c // 2, scale=1e-3, dtype=dtype)
    ),
    "gelu": lambda r, c, dtype: GELU(noise(r, c, scale=4, dtype=dtype), noise(c, scale=9, dtype=dtype)),
    "gelu_grad": lambda r, c, dtype: GELUGrad(
        noise(r, c, scale=4, dtype=dtype), noise(c, dtype=dtype), dy_rc=noise(r, c, dtype=dtype, seed=1)
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {"plain scales": {"power_of_two": False, "eps": 0.0}}
OPTIONS["powers of two"] = {"power_of_two": True, "eps": 1e-4}
BLOCKS = ["cast_rows", "cast_1x128", "cast_128x128"]


def same(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    for a, e in zip(actual, expected):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert a.granularity is e.granularity
            assert a.data.is_contiguous()
            assert a.scale_inv.shape == e.scale_inv.shape
            assert torch.equal(a.scale_inv, e.scale_inv)
            assert torch.equal(bits(a.data), bits(e.data))


def check_tensor(source: Source, scale: float, fmt: Format) -> None:
    factor = torch.tensor(scale, device=DEVICE)
    inverse = factor.reciprocal()
    for wanted in (
        {"rowwise": True, "columnwise": True},
        {"rowwise": True, "columnwise": False},
        {"rowwise": False, "columnwise": True},
    ):
        noted, expected_note = torch.tensor(0.25, device=DEVICE), torch.tensor(0.25, device=DEVICE)
        expected = plain.cast_tensor(source, factor, inverse, fmt, newest_amax=expected_note, **wanted)
        same(kernels.cast_tensor(source, factor, inverse, fmt, newest_amax=noted, **wanted), expected)
        assert noted.item() == expected_note.item()
        same(kernels.cast_tensor(source, factor, inverse, fmt, newest_amax=None, **wanted), expected)
    whole = kernels.amax(source)
    assert whole.item() == plain.amax(source).item()
    options: dict[str, Any] = {"rowwise": True, "columnwise": True, "power_of_two": scale > 1, "eps": 0.0}
    same(kernels.cast_current(source, whole, fmt, **options), plain.cast_current(source, whole, fmt, **options))


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, E4M3), (torch.float32, E5M2)], ids=str)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_factor_a_tensor(shape: tuple[int, int], kind: str, dtype: torch.dtype, fmt: Format) -> None:
    check_tensor(SOURCES[kind](*shape, dtype), 3.7, fmt)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("cast", BLOCKS)
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (130, 130), (0, 16), (16, 0)], ids=str)
def test_a_factor_a_block(shape: tuple[int, int], kind: str, cast: str, options: dict[str, Any]) -> None:
    source = SOURCES[kind](*shape, torch.bfloat16)
    for wanted in (
        {"rowwise": True, "columnwise": True},
        {"rowwise": True, "columnwise": False},
        {"rowwise": False, "columnwise": True},
    ):
        actual = getattr(kernels, cast)(source, E4M3, **wanted, **options)
        same(actual, getattr(plain, cast)(source, E4M3, **wanted, **options))


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shape", [(3, 200), (130, 258), (0, 16)], ids=str)
def test_rows_and_columns_of_a_larger_tensor(shape: tuple[int, int], kind: str) -> None:
    """Their amaxes are known to be larger than the source's own."""
    source = SOURCES[kind](*shape, torch.bfloat16)
    amaxes = kernels.amaxes(source)
    for ours, theirs, extent in zip(amaxes, plain.amaxes(source), source.shape, strict=True):
        assert ours.shape == (extent,)
        assert torch.equal(ours, theirs)
    larger = tuple(amax * (1 + noise(amax.shape[0]).abs()) for amax in amaxes)
    options: dict[str, Any] = {"rowwise": True, "columnwise": True, "power_of_two": False, "eps": 0.0}
    made = kernels.cast_rows(source, E4M3, amaxes=larger, **options)
    same(made, plain.cast_rows(source, E4M3, amaxes=larger, **options))
    for part, amax in zip(made[:2], larger):
        torch.testing.assert_close(part.scale_inv.squeeze(-1), torch.where(amax > 0, amax / 448, 1.0))


QKV_SHAPES = [
    *((5, 2, 3, 1, 8), (17, 1, 2, 2, 32), (4, 3, 4, 1, 6), (0, 1, 1, 1, 4)),
    pytest.param((132, 1, 1, 1, 128), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", QKV_SHAPES, ids=str)
@pytest.mark.parametrize("own_angles", [False, True])
def test_gradient_of_qkv(shape: tuple[int, ...], own_angles: bool) -> None:
    """Heads of q, k and v gathered, turned back and cast. A head of 6 fits no tile and takes the plain way; only one of
    128 is a block wide."""
    s, b, a, g, d = shape
    dq, dk, dv = (noise(s, b, heads, d, seed=i) for i, heads in enumerate((a, g, g)))
    angles = noise(s, b if own_angles else 1, 1, d // 2, seed=3)
    source = QKVGrad(dq, dk, dv, angles.cos(), angles.sin())
    check_tensor(source, 3.7, E4M3)
    assert torch.equal(kernels.materialize(source), plain.materialize(source))
    options: dict[str, Any] = {"power_of_two": False, "eps": 0.0, "rowwise": True, "columnwise": True}
    for cast in BLOCKS:
        same(getattr(kernels, cast)(source, E4M3, **options), getattr(plain, cast)(source, E4M3, **options))


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int], kind: str) -> None:
    source = SOURCES[kind](*shape, torch.float32)
    assert torch.equal(kernels.materialize(source), plain.materialize(source))


@pytest.mark.parametrize("kind", ["plain", "layernorm", "swiglu_grad", "gelu_grad"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_columns(shape: tuple[int, int], kind: str) -> None:
    source = SOURCES[kind](*shape, torch.bfloat16)
    assert torch.equal(kernels.column_sums(source), plain.column_sums(source))


@pytest.mark.parametrize("shape", [(3, 200), (0, 16)], ids=str)
def test_channels_with_factors_of_their_own(shape: tuple[int, int]) -> None:
    """An activation, its gradient and a weight, each channel multiplied by a power of two."""
    r, c = shape
    scale = noise(c, scale=3).round().exp2()
    gate_up, dy, weight = (noise(r, width, scale=4) for width in (2 * c, c, c))
    for source in (SwiGLU(gate_up, scale), SwiGLUGrad(gate_up, dy, scale), ScaledColumns(weight, scale)):
        check_tensor(source, 3.7, E4M3)
        assert torch.equal(kernels.materialize(source), plain.materialize(source))
        amaxes = torch.full((2, source.shape[1]), 2.0, device=DEVICE)
        kernels.raise_column_amax(source, amaxes[0])
        plain.raise_column_amax(source, amaxes[1])
        assert torch.equal(amaxes[0], amaxes[1])
        assert (amaxes > 2).any() == bool(r)


def test_amaxes_of_columns_that_are_not_finite() -> None:
    x = noise(5, 8)
    x[1, 2], x[3, 4] = torch.nan, -torch.inf
    amax = torch.zeros(8, device=DEVICE)
    kernels.raise_column_amax(Plain(x), amax)
    expected = torch.where(x.isnan(), torch.inf, x.abs()).amax(dim=0)
    assert torch.equal(amax, expected)


def every_bf16() -> Tensor:
    """All 65,536 codes: zeros, subnormals, infinities and NaNs among them."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_bf16_value(fmt: Format) -> None:
    every = every_bf16()
    for scale in (1.0, 448.0, 1e-3, 3.4e38):
        check_tensor(Plain(every), scale, fmt)
    check_tensor(Plain(torch.where(every.float().isfinite(), every, torch.zeros_like(every))), 1.0, fmt)


def test_sigmoid_of_every_bf16_value() -> None:
    """The gate is bf16, so this is every value that the exponential and the division will see."""
    gate = every_bf16()
    check_tensor(SwiGLU(torch.cat([gate, torch.ones_like(gate)], dim=1)), 1.0, E4M3)
    actual = kernels.materialize(SwiGLU(torch.cat([gate, torch.ones_like(gate)], dim=1).float()))
    expected = plain.materialize(SwiGLU(torch.cat([gate, torch.ones_like(gate)], dim=1).float()))
    assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.slow
def test_gelu_of_every_bf16_value() -> None:
    """Where its cube overflows, where it is all of x or nothing of it, and all between; without a bias."""
    every = every_bf16()
    for source in (GELU(every.float()), GELUGrad(every.float(), dy_rc=torch.ones_like(every).float())):
        actual, expected = kernels.materialize(source), plain.materialize(source)
        assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_halfway_between_neighbours_and_a_bit_beside(fmt: Format) -> None:
    """Every midpoint of two codes in fp32, where rounding to even decides, and the fp32 values next to it."""
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    values = codes[codes.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)]
    check_tensor(Plain(torch.cat([values, middle, *beside]).view(1, -1).to(DEVICE)), 1.0, fmt)


@pytest.mark.parametrize("value", [0.0, 1e-40, 3e-39, 1e38, torch.inf, torch.nan])
@pytest.mark.parametrize("cast", BLOCKS)
def test_blocks_of_odd_values(cast: str, value: float) -> None:
    """A block of zeros, of numbers whose scale overflows, or with something infinite or undefined in it."""
    x = noise(130, 260)
    x[:128, :128] = 0.0
    x[3, 5] = value
    options = {"power_of_two": True, "eps": 0.0, "rowwise": True, "columnwise": True}
    same(getattr(kernels, cast)(Plain(x), E4M3, **options), getattr(plain, cast)(Plain(x), E4M3, **options))


@settings(max_examples=20)
@given(
    r=st.integers(1, 70),
    c=st.integers(1, 70),
    scale=st.floats(1e-30, 1e30),
    spread=st.floats(-30, 30),
    seed=st.integers(0, 999),
    fmt=st.sampled_from(FORMATS),
    cast=st.sampled_from(BLOCKS),
)
def test_any_matrix(r: int, c: int, scale: float, spread: float, seed: int, fmt: Format, cast: str) -> None:
    x = noise(r, c, scale=10.0**spread, dtype=torch.bfloat16, seed=seed)
    check_tensor(Plain(x), scale, fmt)
    options = {"power_of_two": bool(seed % 2), "eps": 0.0, "rowwise": True, "columnwise": True}
    same(getattr(kernels, cast)(Plain(x), fmt, **options), getattr(plain, cast)(Plain(x), fmt, **options))
