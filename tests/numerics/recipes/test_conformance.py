"""What every recipe in the registry must do, held by one table: casts, shards, GEMMs, state, options, capabilities.

The casts are compared bit for bit with a second implementation in NumPy (`tests.fp8.reference` and here), and the three
GEMMs of a layer with float64 products of what that gives. What is special to a recipe is in its own file.

Shapes: m tokens, k inputs, n outputs; r rows, c columns of a matrix.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup, group

from megafp8.config import Fp8Config
from megafp8.fp8 import (
    E4M3,
    E5M2,
    RECIPES,
    BlockwiseScaling,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Format,
    Fp8Manager,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    Rule,
    StaticScaling,
)
from megafp8.numerics import reference as per_tensor_casts
from megafp8.numerics.philox import key_of
from megafp8.numerics.recipes import blockwise, mxfp8, nvfp4, rowwise
from megafp8.numerics.recipes.base import OPERANDS, Fp8Tensor, config_key
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import DEQUANTIZED, ScaledTensor, on_hopper
from tests.fp8.linear_layer import LinearLayer, Sum
from tests.fp8.reference import bytes_of, decode, encode, scale_of, spread, to_e2m1
from tests.fp8.test_manager import Model, copied
from tests.linear.test_linear import assert_product, managed, run
from tests.marks import slow_but
from tests.numerics.test_stochastic_rounding import uniform_by_hand
from tests.world import World

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIMPLE = [name for name in RECIPES if name != "custom"]
Matrix = NDArray[np.float32]


class Cast(NamedTuple):
    """A matrix as it is to be quantized: FP8 bytes `[r, c]`, scale_inv of each element, and that of the tensor."""

    data: NDArray[np.uint8]
    scale_inv: NDArray[np.float64]
    fmt: Format
    tensor_scale_inv: float = 1.0

    def dequantized(self) -> NDArray[np.float64]:
        """Values times the scales of their blocks."""
        return np.array([decode(code, self.fmt) for code in range(256)])[self.data] * self.scale_inv

    def values(self) -> NDArray[np.float64]:
        return self.dequantized() * self.tensor_scale_inv


def _same(x: Matrix) -> Matrix:
    return x


@dataclass(frozen=True)
class Reference:
    """How an operand is cast. `step(y)`: the distance of the format's values around y; `most`: its largest."""

    of_prepared: Callable[[Matrix], Cast]
    fmt: Format
    rows: int
    columns: int
    mantissa_bits: int = 3
    least_exponent: int = -6
    most: float = 448.0
    nearest: bool = True
    prepare: Callable[[Matrix], Matrix] = _same

    def cast(self, x: Matrix) -> Cast:
        return self.of_prepared(self.prepare(x))

    def step(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        exponent = np.frexp(np.abs(y))[1] - 1
        return np.asarray(2.0 ** (np.clip(exponent, self.least_exponent, None) - self.mantissa_bits))


def blocks(
    rows: int, columns: int, fmt: Format, scale: Callable[[float], float], dtype: type[Any] = np.float32
) -> Reference:
    """`scale` of a block from its amax, which is infinite where the block is not finite; products in `dtype`."""

    def cast(x: Matrix) -> Cast:
        factor = np.ones(x.shape, dtype)
        for top in range(0, x.shape[0], rows):
            for left in range(0, x.shape[1], columns):
                here = np.s_[top : top + rows, left : left + columns]
                factor[here] = scale(float(np.nan_to_num(np.abs(x[here]).max(), nan=np.inf, posinf=np.inf)))
        with np.errstate(over="ignore", invalid="ignore"):
            return Cast(encode(x.astype(dtype) * factor, fmt), (np.float32(1) / factor).astype(np.float64), fmt)

    bits = (2, -14, 57344.0) if fmt is E5M2 else (3, -6, 448.0)
    return Reference(cast, fmt, rows, columns, *bits)


def scaled(rows: int, columns: int, fmt: Format = E4M3, **options: Any) -> Reference:
    """Scales that fill the format's range; 1 for a block that is zero or not finite."""

    def scale(amax: float) -> float:
        usable = np.isfinite(amax) and max(amax, options.get("eps", 0.0)) > 0
        return scale_of(amax, fmt.max, **options) if usable else 1.0

    return blocks(rows, columns, fmt, scale)


WHOLE = 10**6


def per_tensor(fmt: Format = E4M3, **options: Any) -> Reference:
    return scaled(WHOLE, WHOLE, fmt, **options)


def given_amax(amax: float, fmt: Format = E4M3, **options: Any) -> Reference:
    return blocks(WHOLE, WHOLE, fmt, lambda _: scale_of(amax, fmt.max, **options))


def mx(fmt: Format = E4M3) -> Reference:
    """The power of two above amax / max, from 2^-127 to 2^127; scaling is exact in float64."""

    def scale(amax: float) -> float:
        quotient = float(np.float32(amax) / np.float32(fmt.max))
        mantissa, exponent = np.frexp(quotient)  # mantissa in [1/2, 1), exactly
        above = 127 if np.isinf(quotient) else int(exponent) - (mantissa == 0.5) if quotient else -127
        return float(2.0 ** -np.clip(above, -127, 127))

    return blocks(1, 32, fmt, scale, np.float64)


def hadamard(x: Matrix) -> Matrix:
    """Every 16 neighbours times the Hadamard matrix, from its definition: the sign is the parity of i & j. In fp32."""
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)], np.float32)
    y, whole = x.copy(), x.shape[1] // 16 * 16
    parts = [(x[:, :whole] * np.float32(0.25)).reshape(len(x), -1, 16)[:, :, [i]] * signs[i] for i in range(16)]
    while len(parts) > 1:  # in pairs of neighbours, as a butterfly adds
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    y[:, :whole] = parts[0].reshape(len(x), whole)
    return y


def nv(weight: bool = False, key: tuple[int, int] | None = None, transform: bool = False) -> Reference:
    """NVFP4 from its definition, in fp32."""
    height = 16 if weight else 1

    def cast(x: Matrix) -> Cast:
        unit = np.float32(4 if transform else 1)  # of the transform it is sums that are cast
        x = x * unit
        y, scale_inv = np.zeros_like(x), np.ones(x.shape)
        whole = np.abs(x).max(initial=0)
        s = np.float32(scale_of(float(whole), 2688.0)) if np.isfinite(whole) and whole else np.float32(1)
        s = min(s, np.float32(2.0**118))  # so that s / block is finite
        noise = None if key is None else np.array(uniform_by_hand(*x.shape, key), np.float32)
        for top in range(0, x.shape[0], height):
            for left in range(0, x.shape[1], 16):
                here = np.s_[top : top + height, left : left + 16]
                with np.errstate(over="ignore", invalid="ignore"):
                    largest = np.nan_to_num(np.abs(x[here]).max(), nan=np.inf, posinf=np.inf)
                    code = encode(np.array([largest * (s / np.float32(6))], np.float32), E4M3)[0]
                    block = np.float32(decode(int(code), E4M3))
                    y[here] = x[here] * (np.float32(1) / block * s) if block else 0.0
                scale_inv[here] = block
        return Cast(encode(to_e2m1(y, noise), E4M3), scale_inv, E4M3, float(1 / unit / s))

    return Reference(
        cast, E4M3, rows=height, columns=16, mantissa_bits=1, least_exponent=0, most=6.0, nearest=key is None,
        prepare=hadamard if transform else _same,
    )  # fmt: skip


def gradient_key(part: str) -> tuple[int, int]:
    return key_of(0, "layer.grad_output", part)


class Case(NamedTuple):
    """A recipe, and how it casts (input, weight, grad_output): rowwise, and columnwise where that is another way."""

    recipe: Fp8Recipe
    rowwise: tuple[Reference, Reference, Reference]
    other_columnwise: tuple[Reference, Reference, Reference] | None = None

    @property
    def columnwise(self) -> tuple[Reference, Reference, Reference]:
        return self.other_columnwise or self.rowwise


def _all(reference: Reference) -> tuple[Reference, Reference, Reference]:
    return reference, reference, reference


HYBRID = (per_tensor(), per_tensor(), per_tensor(E5M2))
GIVEN = (("lay*.input", 400.0), ("*.input", 3.0), ("*.weight", 20.0), ("*", 0.25))
LINE, SQUARE = scaled(1, 128, power_of_two=True), scaled(128, 128, power_of_two=True)
ROW = scaled(1, WHOLE)
ROW5 = scaled(1, WHOLE, E5M2, power_of_two=True, eps=30.0)
CASES: dict[str, Case] = {
    "delayed": Case(DelayedScaling(amax_history_len=3, interval=2), HYBRID),  # in its first step by the tensor's amax
    "delayed-margin": Case(
        DelayedScaling(margin=-1, power_of_two_scale=True, fp8_format="e4m3"),
        _all(per_tensor(margin=-1, power_of_two=True)),
    ),
    "current": Case(CurrentScaling(), HYBRID),
    "current-options": Case(
        CurrentScaling(power_of_two=True, amax_epsilon=30.0, fp8_format="e4m3"),
        _all(per_tensor(power_of_two=True, eps=30.0)),
    ),
    "rowwise": Case(RowwiseScaling(), _all(ROW)),
    "rowwise-options": Case(
        RowwiseScaling(power_of_two=True, amax_epsilon=30.0, fp8_format="hybrid"),
        (scaled(1, WHOLE, power_of_two=True, eps=30.0), scaled(1, WHOLE, power_of_two=True, eps=30.0), ROW5),
    ),
    "blockwise": Case(BlockwiseScaling(), (LINE, SQUARE, LINE)),
    "blockwise-options": Case(
        BlockwiseScaling(power_of_two=False, amax_epsilon=1e-4, fp8_format="hybrid"),
        (scaled(1, 128, eps=1e-4), scaled(128, 128, eps=1e-4), scaled(1, 128, E5M2, eps=1e-4)),
    ),
    "static": Case(StaticScaling(amax=GIVEN), (given_amax(400.0), given_amax(20.0), given_amax(0.25, E5M2))),
    "static-margin": Case(
        StaticScaling(amax=GIVEN, margin=2, power_of_two=True, fp8_format="e4m3"),
        (*(given_amax(a, margin=2, power_of_two=True) for a in (400.0, 20.0, 0.25)),),  # type: ignore[arg-type]
    ),
    "mxfp8": Case(MXFP8Scaling(), _all(mx())),
    "mxfp8-hybrid": Case(MXFP8Scaling(fp8_format="hybrid"), (mx(), mx(), mx(E5M2))),
    "nvfp4": Case(
        NVFP4Scaling(),
        (nv(), nv(weight=True), nv(key=gradient_key("rows"))),
        (nv(transform=True), nv(weight=True), nv(key=gradient_key("columns"), transform=True)),
    ),
    "custom": Case(
        CustomScaling(
            rules=(
                Rule(layers="other", input=MXFP8Scaling(), weight=MXFP8Scaling(), grad_output=MXFP8Scaling()),
                Rule(
                    layers="lay*",
                    input=CurrentScaling(),
                    weight=StaticScaling(amax=GIVEN),
                    grad_output=CurrentScaling(fp8_format="e4m3"),
                ),
                Rule(layers="*", input=RowwiseScaling(), weight=RowwiseScaling(), grad_output=RowwiseScaling()),
            )
        ),
        (per_tensor(), given_amax(20.0), per_tensor()),
    ),
    "custom-emulated": Case(
        CustomScaling(
            rules=(Rule(layers="*", input=MXFP8Scaling(), weight=RowwiseScaling(), grad_output=NVFP4Scaling()),)
        ),
        (mx(), ROW, nv(key=gradient_key("rows"))),
        (mx(), ROW, nv(key=gradient_key("columns"), transform=True)),
    ),
}
by_case = pytest.mark.parametrize("case", CASES)
by_default = pytest.mark.parametrize("name", SIMPLE)


def test_every_recipe_has_a_case_and_a_name_in_configs() -> None:
    assert {case.recipe.name for case in CASES.values()} == RECIPES.keys()
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    assert set(get_args(Fp8Config.model_fields["recipe"].annotation)) == {"none", *RECIPES}


# --- casts ----------------------------------------------------------------------------------------------------------


def quantizers(case: str, device: str = "cpu") -> Any:
    op = managed(CASES[case].recipe, device)[1]
    return op.state.quantizers


def check_cast(made: ScaledTensor | None, x: Tensor, reference: Reference) -> None:
    """`made` is the cast of `x` bit for bit, within half a step of it (a whole one where rounded stochastically)."""
    assert made is not None
    expected = reference.cast(x.float().numpy())
    r, c = x.shape
    assert made.scale_inv.dtype == torch.float32
    with np.errstate(over="ignore", invalid="ignore"):
        values, dequantized = expected.values(), made.dequantize().cpu().numpy()
        if made.granularity is DEQUANTIZED:
            data = torch.from_numpy(expected.dequantized()).float().bfloat16()  # exact, but for subnormals
            assert made.data.dtype == torch.bfloat16
            assert made.data.is_contiguous() or made.data.t().is_contiguous()
            assert made.scale_inv.shape == ()
            assert made.scale_inv.item() == expected.tensor_scale_inv
            assert torch.equal(made.data.cpu().nan_to_num(nan=7.0), data.nan_to_num(nan=7.0))
            np.testing.assert_allclose(dequantized, values.astype(np.float32), rtol=0, atol=2.0**-134)
        else:
            down, across = -(-r // reference.rows), -(-c // reference.columns)
            assert made.data.dtype == reference.fmt.dtype
            assert made.data.is_contiguous()
            assert tuple(made.scale_inv.shape) == (() if reference.rows == WHOLE else (down, across))
            np.testing.assert_array_equal(bytes_of(made.data), expected.data)
            np.testing.assert_array_equal(dequantized, values.astype(np.float32))
        assert made.scale_inv.isfinite().all()
        scale_inv = expected.scale_inv * expected.tensor_scale_inv
        y = reference.prepare(x.float().numpy()) / np.where(scale_inv == 0, 1.0, scale_inv)
        fits = (scale_inv > 0) & (np.abs(y) <= reference.most)
        error = np.abs(values / np.where(fits, scale_inv, 1.0) - y)[fits]
    assert (error <= reference.step(y[fits]) * (0.5 if reference.nearest else 1.0) * (1 + 1e-5)).all()


SHAPES = [(1, 1), (3, 200), (130, 129), (17, 33)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "shape", "dtype"),
    slow_but(
        itertools.product(CASES, SHAPES, [torch.bfloat16, torch.float32]),
        *((case, shape, torch.bfloat16) for case in CASES for shape in SHAPES[:2]),
        *((case, SHAPES[2], torch.bfloat16) for case in CASES if case not in ("nvfp4", "custom-emulated")),
        *((case, SHAPES[3], torch.float32) for case in CASES),
    ),
)
def test_casts(case: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = spread(*shape, seed=sum(shape)).to(dtype)
    for quantizer, by_rows, by_columns in zip(quantizers(case, device), *CASES[case][1:2], CASES[case].columnwise):
        made = quantizer(Plain(x.to(device)), rowwise=True, columnwise=True)
        check_cast(made.rowwise, x, by_rows)
        check_cast(made.columnwise, x.float().t().contiguous(), by_columns)


@settings(max_examples=60)
@given(
    case=st.sampled_from(sorted(CASES)),
    operand=st.sampled_from([0, 1, 2]),
    r=st.integers(1, 40),
    c=st.integers(1, 140),
    scale=st.floats(-44, 36),
    special=st.sampled_from([0.0, -0.0, 1e-45, -1e-39, 3.4e38, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 999),
)
def test_any_matrix(case: str, operand: int, r: int, c: int, scale: float, special: float, seed: int) -> None:
    x = (spread(r, c, seed, octaves=30).double() * 10.0**scale).float()
    x[seed % r, (7 * seed) % c] = special
    made = quantizers(case)[operand](Plain(x), rowwise=True, columnwise=False)
    assert made.columnwise is None
    check_cast(made.rowwise, x, CASES[case].rowwise[operand])


@by_default
def test_zeros_and_what_is_not_finite(name: str) -> None:
    """Zeros stay zeros, an infinity saturates, a NaN stays one; neither harms other blocks."""
    x = torch.ones(256, 256)
    x[0, 0], x[0, 1], x[200, 200], x[64:80] = torch.nan, torch.inf, -torch.inf, 0.0
    for quantizer, reference in zip(quantizers(name), CASES[name].rowwise, strict=True):
        made = quantizer(Plain(x), rowwise=True, columnwise=False).rowwise
        values, back = made.data.float(), made.dequantize()
        largest = reference.most
        if made.granularity is DEQUANTIZED:  # times the scale of a block that is not finite
            largest = 448 * 2.0**127 if name == "mxfp8" else 6.0 * 448
        assert values[0, 0].isnan()
        assert values.isnan().sum() == 1
        assert values[0, 1] == -values[200, 200] == torch.tensor(largest)
        assert not values[64:80].any()
        assert reference.rows == WHOLE or back[130, 5] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (5, 0), (0, 256), (256, 0)])
@by_default
def test_empty_matrices(name: str, shape: tuple[int, int]) -> None:
    for quantizer in quantizers(name):
        made = quantizer(Plain(torch.empty(shape, dtype=torch.bfloat16)), rowwise=True, columnwise=True)
        for matrix, size in ((made.rowwise, shape), (made.columnwise, shape[::-1])):
            assert matrix.data.shape == size
            assert tuple(matrix.scale_inv.shape) == matrix.granularity.grid(*size)
            assert matrix.granularity is quantizer.granularity
            assert matrix.dequantize().shape == size


FINE = (mxfp8, nvfp4)


@pytest.mark.parametrize("module", [per_tensor_casts, rowwise, blockwise, *FINE], ids=lambda module: module.__name__)
def test_every_reference_cast_has_a_kernel_with_its_parameters(module: Any) -> None:
    kernels = pytest.importorskip(f"megafp8.kernels.{'fine_blocks' if module in FINE else 'quantize'}")
    casts = [f for f in vars(module).values() if inspect.isfunction(f) and "source" in inspect.signature(f).parameters]
    public = [f for f in casts if f.__module__ == module.__name__ and not f.__name__.startswith("_")]
    assert public
    for cast in public:
        expected = inspect.signature(cast).parameters
        assert list(inspect.signature(getattr(kernels, cast.__name__)).parameters) == list(expected)


# --- shards ---------------------------------------------------------------------------------------------------------


def _shards_are_cast_as_in_the_whole(case: str) -> bool:
    """Inputs and gradients whose tokens are sharded over all ranks; whether the shards can be cast alone."""
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    recipe = CASES[case].recipe
    aligned = recipe.capabilities.shard_alignment
    tokens = 2 * (aligned or 1)
    whole = spread(tokens * world.size(), 48, seed=3)
    part = slice(tokens * world.rank(), tokens * (world.rank() + 1))
    for quantizer, of_whole in zip(quantizers(case), quantizers(case), strict=True):
        own = quantizer.for_sharded_input(world)
        assert (own is None) == (aligned is None)
        if own is None:
            continue
        assert (own.shard_alignment, own.per_tensor) == (aligned, quantizer.per_tensor)
        assert own.for_sharded_input(world) is not None
        made = own(Plain(whole[part].contiguous()), rowwise=True, columnwise=not own.per_tensor)
        expected = of_whole(Plain(whole), rowwise=True, columnwise=True)
        dequantized = own.granularity is DEQUANTIZED
        if not dequantized:
            np.testing.assert_array_equal(bytes_of(made.rowwise.data), bytes_of(expected.rowwise.data[part]))
        if own.per_tensor:
            assert torch.equal(made.rowwise.scale_inv, expected.rowwise.scale_inv)
            continue
        assert torch.equal(made.rowwise.dequantize(), expected.rowwise.dequantize()[part])
        if not dequantized:
            np.testing.assert_array_equal(bytes_of(made.columnwise.data), bytes_of(expected.columnwise.data[:, part]))
        assert torch.equal(made.columnwise.dequantize(), expected.columnwise.dequantize()[:, part])
    return aligned is not None


@by_default
def test_shards_are_cast_as_in_the_whole(world2: World, name: str) -> None:
    alone = RECIPES[name].capabilities.shard_alignment is not None
    assert world2.run(_shards_are_cast_as_in_the_whole, name) == [alone] * 2


# --- GEMMs ----------------------------------------------------------------------------------------------------------

M, N, K = 48, 160, 192  # more than a block of 128, and no whole number of them


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, Tensor]:
    """x `[m, k]`, a weight `[n, k]`, dy `[m, n]`; rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(0)

    def uneven(r: int, c: int, scale: float) -> Tensor:
        x = torch.randn(r, c, generator=generator) * scale
        return x * 2.0 ** torch.randint(-6, 7, (r, 1), generator=generator) * (1 + torch.arange(c) / c)

    x, w, dy = uneven(M, K, 2.0), uneven(N, K, 0.1), uneven(M, N, 1e-3)
    return x.to(dtype).requires_grad_(), nn.Parameter(w.to(dtype)), dy.to(dtype)


def cast_values(reference: Reference, x: Tensor, transposed: bool = False) -> Tensor:
    """What the cast of x, or of its transpose, stands for, in float64."""
    x = x.detach().float()
    return torch.from_numpy(reference.cast((x.t() if transposed else x).contiguous().numpy()).values())


def expected(case: str, x: Tensor, w: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The two operands of y, dx and dw, in float64."""
    x_mk, w_nk, dy_mn = map(cast_values, CASES[case].rowwise, (x, w, dy))
    x_km, w_kn, dy_nm = (cast_values(ref, t, transposed=True) for ref, t in zip(CASES[case].columnwise, (x, w, dy)))
    return [(x_mk, w_nk.t()), (dy_mn, w_kn.t()), (dy_nm, x_km.t())]


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_but(
        itertools.product(CASES, [torch.float32, torch.bfloat16]),
        *((case, torch.float32) for case in CASES),
        ("delayed", torch.bfloat16),
    ),
)
def test_gemms(case: str, dtype: torch.dtype) -> None:
    """Forward and gradients against float64 products of the operands as cast."""
    _, op = managed(CASES[case].recipe)
    x, weight, dy = tensors(dtype)
    y, dx, dw = run(op, x, weight, dy)
    assert dx is not None
    assert dw is not None
    assert y.dtype == dx.dtype == dw.dtype == dtype
    for actual, (a, b) in zip((y, dx, dw), expected(case, x, weight, dy), strict=True):
        assert_product(actual, a, b, ulp=2.0**-8 if dtype == torch.bfloat16 else 2.0**-24)


@pytest.mark.parametrize("gemm", range(3), ids=["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("case", ["rowwise", "nvfp4"])
def test_a_gemm_in_high_precision_beside_others(case: str, gemm: int) -> None:
    _, op = managed(type(CASES[case].recipe)(override_linear_precision=(gemm == 0, gemm == 1, gemm == 2)))
    x, weight, dy = tensors()
    results = run(op, x, weight, dy)
    products = expected(case, x, weight, dy)
    x64, w64, dy64 = (t.detach().double() for t in (x, weight, dy))
    products[gemm] = [(x64, w64.t()), (dy64, w64), (dy64.t(), x64)][gemm]
    for actual, (a, b) in zip(results, products, strict=True):
        assert actual is not None
        assert_product(actual, a, b)


@by_default
def test_a_sink_takes_the_weight_gradient_in_place(name: str) -> None:
    _, op = managed(CASES[name].recipe)
    x, weight, dy = tensors()
    sink = Sum(weight)
    sink.main_grad.fill_(1)
    run(op, x, weight, dy)
    ((a, b),) = expected(name, x, weight, dy)[2:]
    assert weight.grad is None
    assert sink.count == 1
    assert_product(sink.main_grad - 1, a, b, ulp=2.0**-22)


# --- state ----------------------------------------------------------------------------------------------------------

CALIBRATED = StaticScaling(calibration_steps=2, amax=(("first.weight", 3.0),))
MIXED = CustomScaling(
    rules=(
        Rule(
            layers="first",
            input=CASES["delayed"].recipe,
            weight=StaticScaling(calibration_steps=2),
            grad_output=CurrentScaling(),
        ),
        Rule(layers="*", input=NVFP4Scaling(), weight=NVFP4Scaling(), grad_output=NVFP4Scaling()),
    )
)
REMEMBERING = {
    **{name: CASES[name].recipe for name in SIMPLE if name != "static"}, "static": CALIBRATED, "custom": MIXED
}  # fmt: skip
STATE = {
    "delayed": {"amax_history", "scale", "step"},
    "static": {"amax", "calibrated_steps"},
    "nvfp4": {"noise_step"},
    "custom": {"amax_history", "scale", "step", "amax", "calibrated_steps", "noise_step"},
}
"""What is in checkpoints, by the last part of its name."""


@pytest.mark.parametrize(
    ("in_place", "saved_after"),
    slow_but(itertools.product([False, True], [0, 1, 3]), (False, 0), (True, 1), (False, 3)),
)
@pytest.mark.parametrize("name", RECIPES)
def test_a_restart_continues_bit_for_bit(name: str, in_place: bool, saved_after: int) -> None:
    """Before the first step, in the middle of a calibration or an interval, and after."""
    recipe = REMEMBERING[name]
    model = Model(recipe)
    for step in range(saved_after):
        model.step(step)
    state, weights = copied(model.manager), [w.detach().clone() for w in model.weights]
    assert {key.rpartition(".")[2] for key in state} == STATE.get(name, set())
    resumed = Model(recipe)
    resumed.step(99)
    with torch.no_grad():
        for weight, saved in zip(resumed.weights, weights, strict=True):
            weight.copy_(saved)
    if in_place:
        for key, tensor in resumed.manager.state_dict().items():
            tensor.copy_(state[key])
        resumed.manager.invalidate_weights()
    else:
        resumed.manager.load_state_dict(state)
    for step in range(saved_after, 6):
        for ours, theirs in zip(resumed.step(step), model.step(step), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(copied(resumed.manager).values(), copied(model.manager).values(), strict=True):
        assert torch.equal(ours, theirs)


# --- options and capabilities ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "fp8_format": ("e5m2", "it must be 'hybrid' or 'e4m3'|it must be 'e4m3', which holds"),
    "override_linear_precision": ((0, 0, "no"), "three booleans"),
    "use_fast_accum": ((True, False), "three booleans"),
    "interval": (0, "interval is 0; it must be at least 1"),
    "amax_history_len": (0, "amax_history_len is 0"),
    "amax_compute_algo": ("mean", "amax_compute_algo is 'mean'; it must be 'max', 'most_recent' or a callable"),
    "amax_epsilon": (-1.0, "amax_epsilon is -1.0; it must be 0 or more"),
    "amax": ((("*", 0.0),), "a pattern and an amax that is finite and more than 0"),
    "calibration_steps": (-1, "calibration_steps is -1; it must be 0 or more"),
}
"""A value that means nothing, and the message; other options take any value of their type."""
ANY = {"margin", "power_of_two", "power_of_two_scale", "rules"}


@pytest.mark.parametrize("name", RECIPES)
def test_options(name: str) -> None:
    """Each is a key of the config, and refuses what means nothing."""
    required = {"rules": MIXED.rules} if name == "custom" else {}
    for option in fields(RECIPES[name]):
        assert config_key(option) in Fp8Config.model_fields
        assert (option.name in REFUSED) != (option.name in ANY)
        if option.name in REFUSED:
            value, message = REFUSED[option.name]
            with pytest.raises(ValueError, match=message):
                RECIPES[name](**{**required, option.name: value})


def test_defaults_are_the_documented_ones() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.amax_history_len, recipe.amax_compute_algo) == (0, 1, 1024, "max")
    for name in SIMPLE:
        made, per_tensor_scale = RECIPES[name](), RECIPES[name].capabilities.per_tensor
        assert made.use_fast_accum == (True, False, False)
        assert made.override_linear_precision == (False, False, False)
        assert [made.format_of(operand) for operand in OPERANDS] == [E4M3, E4M3, E5M2 if per_tensor_scale else E4M3]


IN_BLOCKS: dict[str, Callable[[Tensor, str], ScaledTensor]] = {
    "mxfp8": lambda x, _: mxfp8.quantize_mxfp8(x),
    "nvfp4": lambda x, operand: nvfp4.quantize_nvfp4(x, weight=operand == "weight", stochastic=None),
}
"""Casts before their blocks are multiplied into the data."""


@by_default
def test_capabilities_are_what_the_quantizers_do(name: str) -> None:
    recipe = CASES[name].recipe
    capabilities = recipe.capabilities
    x = spread(256, 256, seed=1)
    for operand, quantizer in zip(OPERANDS, quantizers(name), strict=True):
        granularity = getattr(capabilities.granularity, operand)
        assert quantizer.granularity is (granularity if on_hopper(granularity) else DEQUANTIZED)
        made, again = (quantizer(Plain(x), rowwise=True, columnwise=True) for _ in range(2))
        assert made.rowwise.granularity is made.columnwise.granularity is quantizer.granularity
        cast = IN_BLOCKS[name](x, operand) if name in IN_BLOCKS else made.rowwise
        assert cast.granularity is recipe.granularity(operand) is granularity
        assert granularity.two_level == (cast.tensor_scale_inv is not None)
        assert quantizer.per_tensor == capabilities.per_tensor == (cast.scale_inv.numel() == 1)
        assert quantizer.shard_alignment == (capabilities.shard_alignment or 1)
        is_transpose = torch.equal(made.columnwise.dequantize().t(), made.rowwise.dequantize())
        assert is_transpose == (capabilities.per_tensor or (granularity.rows or 0) > 1)
        differs = not torch.equal(made.rowwise.dequantize(), again.rowwise.dequantize())
        assert differs == (name == "nvfp4" and operand == "grad_output")
        assert cast.data.float().unique().numel() <= (2**4 if name == "nvfp4" else 2**8)
    manager = Fp8Manager(recipe, amax_group=None)
    LinearLayer(manager)
    manager.materialize(torch.device("cpu"))
    histories = [t for key, t in manager.state_dict().items() if key.endswith("amax_history")]
    assert sum(map(len, histories)) == len(OPERANDS) * recipe.history_len


def test_a_recipe_of_recipes_scales_nothing_itself() -> None:
    tensor = Fp8Tensor("layer", "input", None, None)
    with pytest.raises(NotImplementedError, match="CustomScaling does not scale tensors itself"):
        MIXED.bound_cast(tensor, torch.device("cpu"))
