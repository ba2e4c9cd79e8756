"""Every source cast in every way by the tile kernel, against the reference, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megafp8.numerics import reference as casts
from megafp8.numerics import sources
from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.recipes.blockwise import cast_1x128, cast_128x128
from megafp8.numerics.recipes.rowwise import amaxes as both_amaxes
from megafp8.numerics.recipes.rowwise import cast_rows
from megafp8.numerics.sources import MatrixSource, Plain
from megafp8.numerics.tensor import QuantizedTensor
from tests.kernels import DEVICE, every_bf16, noise
from tests.marks import slow_but

kernels = pytest.importorskip("megafp8.kernels.quantize")
of_recipes = {"amaxes": both_amaxes, "cast_rows": cast_rows, "cast_1x128": cast_1x128, "cast_128x128": cast_128x128}
reference = SimpleNamespace(**vars(casts), **of_recipes)

FORMATS = [E4M3, E5M2]
SHAPES = [(1, 1), (3, 200), (130, 66), (0, 16), (16, 0), (128, 256)]  # the last: whole tiles only
SourceOf = Callable[[int, int, torch.dtype], MatrixSource]


def bits(x8: Tensor) -> Tensor:
    """Bytes as integers; every NaN as one value, since backends choose different ones."""
    return torch.where(x8.float().isnan(), -1, x8.view(torch.uint8).int())


def norm(centered: bool) -> SourceOf:
    def make(r: int, c: int, dtype: torch.dtype) -> MatrixSource:
        mean, bias = (noise(r, seed=1), noise(c, seed=1)) if centered else (None, None)
        source = sources.ZeroCenteredNormalized if centered else sources.Normalized
        return source(noise(r, c, scale=3, dtype=dtype), noise(r).abs(), noise(c, dtype=dtype), mean, bias)

    return make


def gated(source: type[sources.Gated]) -> SourceOf:
    return lambda r, c, dtype: source(noise(r, 2 * c, scale=4, dtype=dtype))


def gated_grad(source: type[sources.GatedGrad]) -> SourceOf:
    return lambda r, c, dtype: source(
        noise(r, c // 2 * 2, scale=4, dtype=dtype), noise(r, c // 2, scale=1e-3, dtype=dtype)
    )


SOURCES: dict[str, SourceOf] = {
    "plain": lambda r, c, dtype: Plain(noise(r, c, scale=40, dtype=dtype)),
    "rmsnorm": norm(centered=False),
    "zero_centered_layernorm": norm(centered=True),
    "swiglu": gated(sources.SwiGLU),
    "swiglu_grad": gated_grad(sources.SwiGLUGrad),
    "geglu": gated(sources.GeGLU),
    "geglu_grad": gated_grad(sources.GeGLUGrad),
    "gelu": lambda r, c, dtype: sources.GELU(noise(r, c, scale=4, dtype=dtype), noise(c, scale=9, dtype=dtype)),
    "gelu_grad": lambda r, c, dtype: sources.GELUGrad(
        noise(r, c, scale=4, dtype=dtype), noise(r, c, dtype=dtype, seed=1), noise(c, dtype=dtype)
    ),
}
BOTH = {"rowwise": True, "columnwise": True}
ORIENTATIONS = [BOTH, {"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}]
BLOCKS = ["cast_rows", "cast_1x128", "cast_128x128"]


def check_same(actual: QuantizedTensor, expected: QuantizedTensor) -> None:
    for a, e in zip(actual, expected):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert a.granularity is e.granularity
            assert a.data.is_contiguous()
            assert a.scale_inv.shape == e.scale_inv.shape
            assert torch.equal(a.scale_inv, e.scale_inv)
            assert torch.equal(bits(a.data), bits(e.data))


def check_values(source: MatrixSource) -> None:
    actual, expected = kernels.materialize(source), reference.materialize(source)
    assert torch.equal(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def check_tensor(
    source: MatrixSource, value: float, fmt: Format, orientations: Sequence[dict[str, bool]] = ORIENTATIONS
) -> None:
    """One scale for the tensor, its amax, and its values."""
    scale = torch.tensor(value, device=DEVICE)
    inverse = scale.reciprocal()
    for wanted in orientations:
        recorded, expected_amax = torch.tensor(0.25, device=DEVICE), torch.tensor(0.25, device=DEVICE)
        expected = reference.cast_tensor(source, scale, inverse, fmt, newest_amax=expected_amax, **wanted)
        check_same(kernels.cast_tensor(source, scale, inverse, fmt, newest_amax=recorded, **wanted), expected)
        assert recorded.item() == expected_amax.item()
    if source.dtype != torch.bfloat16:  # the interpreter rounds to bf16 incorrectly
        check_values(source)
    if orientations is not ORIENTATIONS:
        return
    expected = reference.cast_tensor(source, scale, inverse, fmt, newest_amax=None, **BOTH)
    check_same(kernels.cast_tensor(source, scale, inverse, fmt, newest_amax=None, **BOTH), expected)
    whole = kernels.amax(source)
    assert whole.item() == reference.amax(source).item()
    options: dict[str, Any] = {"power_of_two": value > 1, "eps": 0.0, **BOTH}
    check_same(
        kernels.cast_current(source, whole, fmt, **options), reference.cast_current(source, whole, fmt, **options)
    )


def check_blocks(source: MatrixSource, cast: str, fmt: Format = E4M3, **options: Any) -> None:
    options = {"power_of_two": False, "eps": 0.0, **BOTH, **options}
    check_same(getattr(kernels, cast)(source, fmt, **options), getattr(reference, cast)(source, fmt, **options))


@pytest.mark.parametrize(
    ("shape", "kind"),
    slow_but(
        itertools.product(SHAPES, SOURCES),
        *((shape, kind) for shape in [(0, 16), (16, 0)] for kind in SOURCES),
        # The others are read alike for one scale per block.
        *(((1, 1), kind) for kind in ("plain", "zero_centered_layernorm", "gelu_grad")),
        ((130, 66), "plain"),
        *(((128, 256), kind) for kind in ("rmsnorm", "swiglu", "swiglu_grad")),
    ),
    ids=str,
)
def test_one_scale_per_tensor(shape: tuple[int, int], kind: str) -> None:
    check_tensor(SOURCES[kind](*shape, torch.bfloat16), 3.7, E4M3)


OTHER_DTYPES = [*itertools.product(SOURCES, [torch.float32]), *itertools.product(SOURCES, [torch.float16])]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but(OTHER_DTYPES, ("plain", torch.float16)),
    ids=str,
)
def test_one_scale_per_tensor_of_another_dtype(kind: str, dtype: torch.dtype) -> None:
    check_tensor(SOURCES[kind](3, 40, dtype), 3.7, E5M2)


@pytest.mark.parametrize(
    ("shape", "kind", "cast"),
    slow_but(
        itertools.product([(1, 1), (3, 200), (130, 130), (0, 16), (16, 0)], SOURCES, BLOCKS),
        *itertools.product([(0, 16), (16, 0)], SOURCES, BLOCKS),
        *(((1, 1), kind, BLOCKS[i % 3]) for i, kind in enumerate(SOURCES)),
        *itertools.product([(3, 200)], ["plain"], BLOCKS),
        ((130, 130), "swiglu_grad", "cast_1x128"),
    ),
    ids=str,
)
def test_one_scale_per_block(shape: tuple[int, int], kind: str, cast: str) -> None:
    check_blocks(SOURCES[kind](*shape, torch.bfloat16), cast, power_of_two=True, eps=1e-4)


@pytest.mark.parametrize(
    ("kind", "cast"), slow_but(itertools.product(SOURCES, BLOCKS), ("geglu_grad", "cast_1x128"), ("plain", "cast_rows"))
)
def test_one_scale_per_block_in_one_orientation(kind: str, cast: str) -> None:
    for wanted in ORIENTATIONS:
        check_blocks(SOURCES[kind](3, 200, torch.bfloat16), cast, **wanted)


LARGER = [(shape, kind) for kind in SOURCES for shape in [(3, 200), (130, 66), (0, 16)]]


@pytest.mark.parametrize(
    ("shape", "kind"),
    slow_but(
        LARGER,
        *(((0, 16), kind) for kind in SOURCES),
        # The others differ from these in a formula, which the tests of one scale per block cover.
        *(((3, 200), kind) for kind in ("zero_centered_layernorm", "swiglu_grad")),
    ),
    ids=str,
)
def test_rows_and_columns_of_a_larger_tensor(shape: tuple[int, int], kind: str) -> None:
    """Their given amaxes are larger than the source's own."""
    source = SOURCES[kind](*shape, torch.bfloat16)
    amaxes = kernels.amaxes(source)
    for ours, theirs, extent in zip(amaxes, reference.amaxes(source), source.shape, strict=True):
        assert ours.shape == (extent,)
        assert torch.equal(ours, theirs)
    larger = tuple(amax * (1 + noise(amax.shape[0]).abs()) for amax in amaxes)
    check_blocks(source, "cast_rows", amaxes=larger)
    made = kernels.cast_rows(source, E4M3, amaxes=larger, power_of_two=False, eps=0.0, **BOTH)
    for orientation, amax in zip(made[:2], larger):
        torch.testing.assert_close(orientation.scale_inv.squeeze(-1), torch.where(amax > 0, amax / 448, 1.0))


QKV_SHAPES = [  # the last: whether each sample has its own angles
    *((4, 3, 4, 1, 6, True), (0, 1, 1, 1, 4, False), (2, 1, 1, 1, 8, False)),
    *((3, 1, 2, 1, 8, False), (5, 2, 3, 1, 8, True), (17, 1, 2, 2, 16, False), (132, 1, 1, 1, 128, False)),
    # Four neighbouring tokens have the same angles; whole tiles; neither.
    *((5, 4, 1, 1, 16, False), (16, 4, 1, 1, 16, False), (6, 4, 1, 1, 16, True)),
]


@pytest.mark.parametrize(
    ("shape", "cast"),
    slow_but(
        itertools.product(QKV_SHAPES, ["tensor", *BLOCKS]),
        *itertools.product(QKV_SHAPES[:2], ["tensor", *BLOCKS]),
        (QKV_SHAPES[2], "cast_rows"),
        (QKV_SHAPES[2], "cast_1x128"),
        *((shape, "tensor") for shape in QKV_SHAPES[-3:-1]),
    ),
    ids=str,
)
def test_gradient_of_qkv(shape: tuple[int, int, int, int, int, bool], cast: str) -> None:
    """A head of 6 fits no tile and is computed by the reference; only one of 128 is a block wide."""
    s, b, a, g, d, own_angles = shape
    dq, dk, dv = (noise(s, b, heads, d, seed=i) for i, heads in enumerate((a, g, g)))
    angles = noise(s, b if own_angles else 1, 1, d // 2, seed=3)
    x_rc, weight_hd, statistics = noise(s * b, (a + 2 * g) * d), noise(a + g, d), noise(2, s * b, a + g)
    of_norms = sources.HeadNorms(x_rc, statistics, weight_hd, zero_centered=own_angles)
    for norms in (None, of_norms, of_norms._replace(weight_hd=None)):
        source = sources.QKVGrad(dq, dk, dv, angles.cos(), angles.sin(), norms)
        if cast != "tensor":
            check_blocks(source, cast)
        else:  # norms change values only
            check_tensor(source, 3.7, E4M3, ORIENTATIONS if norms is None else [BOTH])


@pytest.mark.parametrize("kind", ["plain", "zero_centered_layernorm", "swiglu_grad", "gelu_grad"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_columns(shape: tuple[int, int], kind: str) -> None:
    source = SOURCES[kind](*shape, torch.bfloat16)
    assert torch.equal(kernels.column_sums(source), reference.column_sums(source))


def test_amaxes_that_are_not_finite() -> None:
    x = noise(5, 8)
    x[1, 2], x[3, 4] = torch.nan, -torch.inf
    magnitudes = torch.where(x.isnan(), torch.inf, x.abs())
    for dim, amaxes in zip((1, 0), kernels.amaxes(Plain(x)), strict=True):
        assert torch.equal(amaxes, magnitudes.amax(dim=dim))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_every_bf16_value(fmt: Format) -> None:
    every = every_bf16()
    for scale in (1.0, 448.0, 1e-3, 3.4e38):
        check_tensor(Plain(every), scale, fmt)
    check_tensor(Plain(torch.where(every.float().isfinite(), every, torch.zeros_like(every))), 1.0, fmt)


@pytest.mark.slow
def test_sigmoid_of_every_bf16_value() -> None:
    """The gate is bf16, so these are all inputs of the exponential and the division."""
    gate = every_bf16()
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    check_tensor(sources.SwiGLU(gate_up), 1.0, E4M3)
    check_values(sources.SwiGLU(gate_up.float()))


@pytest.mark.parametrize("shape", [(3, 72), (16, 0)], ids=str)
def test_other_activations(shape: tuple[int, int]) -> None:
    """ReLU, its square, clamped and limited SwiGLU, also at the bounds and of what is not finite."""
    x, gate_up = (noise(shape[0], width, scale=6) for width in (shape[1], 2 * shape[1]))
    for values in (x, gate_up):
        values.view(-1)[: 5 * bool(values.numel())] = torch.tensor([0.0, 10.0, -7.0, torch.inf, torch.nan])[
            : values.numel()
        ]
    dy, bias = noise(*shape, seed=1), noise(shape[1])
    for source in (
        sources.ReLU(x, bias), sources.ReLUGrad(x, dy, bias), sources.SquaredReLU(x), sources.SquaredReLUGrad(x, dy),
        sources.ClampedSwiGLU(gate_up), sources.ClampedSwiGLUGrad(gate_up, dy),
        sources.LimitedSwiGLU(gate_up), sources.LimitedSwiGLUGrad(gate_up, dy),
    ):  # fmt: skip
        check_values(source)


@pytest.mark.slow
def test_gelu_of_every_bf16_value() -> None:
    """Where its cube overflows, where it is x or 0, and all between; without a bias."""
    x = every_bf16().float()
    one = torch.ones_like(x)
    gate_up = torch.cat([x, one], dim=1)
    for source in (
        sources.GELU(x), sources.GELUGrad(x, one), sources.GeGLU(gate_up), sources.GeGLUGrad(gate_up, one)
    ):  # fmt: skip
        check_values(source)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_midpoints_of_neighbours_and_one_bit_beside(fmt: Format) -> None:
    """Every midpoint of two FP8 values in fp32, where rounding to even decides, and the fp32 values next to it."""
    every = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    values = every[every.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)]
    found = torch.cat([values, middle, *beside])
    check_tensor(Plain(torch.nn.functional.pad(found, (0, -len(found) % 64)).view(-1, 64).to(DEVICE)), 1.0, fmt)


@pytest.mark.parametrize(
    ("cast", "value"),
    slow_but(
        itertools.product(BLOCKS, [0.0, 1e-40, 3e-39, 1e38, torch.inf, torch.nan]),
        *((cast, 3e-39) for cast in BLOCKS),
        ("cast_1x128", torch.nan),
    ),
)
def test_blocks_of_special_values(cast: str, value: float) -> None:
    """A block of zeros, of numbers whose scale overflows, or with an infinity or a NaN in it."""
    x = noise(130, 132)
    x[:128, :128] = 0.0
    x[3, 5] = value
    check_blocks(Plain(x), cast, power_of_two=True)


@pytest.mark.slow
@settings(max_examples=4)
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
    check_blocks(Plain(x), cast, fmt, power_of_two=bool(seed % 2))
