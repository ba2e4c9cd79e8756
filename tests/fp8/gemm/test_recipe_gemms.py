"""The three GEMMs of every recipe against float64 products of the operands as quantized.

The casts themselves are held in test_blocks.py, test_microscaling.py and test_nvfp4.py; here it is which cast each
GEMM's operands get, of which values and along which dim. Delayed and current scaling are in test_linear.py.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megafp8.fp8.blocks import quantize_1x128, quantize_128x128, quantize_rows
from torch import Tensor, nn

from megafp8.fp8 import (
    E4M3,
    E5M2,
    RECIPES,
    BlockwiseScaling,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    Rule,
    StaticScaling,
)
from megafp8.fp8.recipes.base import OPERANDS
from megafp8.fp8.recipes.mxfp8 import quantize_mxfp8
from megafp8.fp8.recipes.nvfp4 import hadamard_transform, quantize_nvfp4
from megafp8.fp8.sources import Plain
from megafp8.fp8.stochastic_rounding import noise_key
from megafp8.fp8.tensor import ScaledTensor
from megafp8.ops.linear import Fp8Linear
from tests.ops.test_linear import assert_product, cast_exactly, managed, run

M, N, K = 48, 160, 192  # more than a block of 128, and no whole number of them

Cast = Callable[[Tensor], Tensor]


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, Tensor]:
    """x `[m, k]`, a weight `[n, k]`, dy `[m, n]`; rows and columns of very different sizes."""
    generator = torch.Generator().manual_seed(0)

    def uneven(r: int, c: int, scale: float) -> Tensor:
        x = torch.randn(r, c, generator=generator) * scale
        return x * 2.0 ** torch.randint(-6, 7, (r, 1), generator=generator) * (1 + torch.arange(c) / c)

    x, w, dy = uneven(M, K, 2.0), uneven(N, K, 0.1), uneven(M, N, 1e-3)
    return x.to(dtype).requires_grad_(), nn.Parameter(w.to(dtype)), dy.to(dtype)


def rows(x: Tensor) -> Tensor:
    return x.detach()


def columns(x: Tensor) -> Tensor:
    return x.detach().t().contiguous()


def by(quantize: Callable[..., ScaledTensor], **options: Any) -> Cast:
    return lambda x_rc: quantize(x_rc, **options).dequantize(torch.float64)


def key(part: str, microbatch: int = 0, step: int = 0, seed: int = 0) -> tuple[int, int]:
    return noise_key(seed, step, f"layer.grad_output\0{microbatch}\0{part}")


def transformed(cast: Cast) -> Cast:
    return lambda x_rc: cast(hadamard_transform(x_rc))


FACTOR: dict[str, Any] = {"power_of_two": False, "eps": 0.0}
ROW = by(quantize_rows, fmt=E4M3, **FACTOR)
LINE = by(quantize_1x128, fmt=E4M3, power_of_two=True, eps=0.0)
SQUARE = by(quantize_128x128, fmt=E4M3, power_of_two=True, eps=0.0)
MX = by(quantize_mxfp8)
FOUR = by(quantize_nvfp4, weight=False, stochastic=None)
FOUR_SQUARE = by(quantize_nvfp4, weight=True, stochastic=None)
FOUR_ROWS = by(quantize_nvfp4, weight=False, stochastic=key("rows"))
FOUR_COLUMNS = transformed(by(quantize_nvfp4, weight=False, stochastic=key("columns")))


def static(amax: float, fmt: Any = E4M3) -> Cast:
    """As float32 divides the format's maximum by the amax."""
    return lambda x_rc: cast_exactly(x_rc, fmt, torch.tensor(fmt.max) / torch.tensor(amax))


def own_amax(x_rc: Tensor) -> Tensor:
    """By its own amax."""
    return cast_exactly(x_rc, E4M3)


# Recipe; then the casts of input, weight, grad_output: of rows, and of columns.
GIVEN = (("*.input", 400.0), ("*.weight", 20.0), ("*.grad_output", 0.25))
CASES: dict[str, tuple[Fp8Recipe, tuple[Cast, Cast, Cast], tuple[Cast, Cast, Cast]]] = {
    "rowwise": (RowwiseScaling(), (ROW, ROW, ROW), (ROW, ROW, ROW)),
    "rowwise-hybrid": (
        RowwiseScaling(fp8_format="hybrid"),
        (ROW, ROW, by(quantize_rows, fmt=E5M2, **FACTOR)),
        (ROW, ROW, by(quantize_rows, fmt=E5M2, **FACTOR)),
    ),
    "blockwise": (BlockwiseScaling(), (LINE, SQUARE, LINE), (LINE, SQUARE, LINE)),
    "static": (StaticScaling(amax=GIVEN), *[(static(400.0), static(20.0), static(0.25, E5M2))] * 2),
    "mxfp8": (MXFP8Scaling(), (MX, MX, MX), (MX, MX, MX)),
    "nvfp4": (NVFP4Scaling(), (FOUR, FOUR_SQUARE, FOUR_ROWS), (transformed(FOUR), FOUR_SQUARE, FOUR_COLUMNS)),
    "custom-per-tensor": (
        CustomScaling(
            rules=(
                Rule(layers="other", input=MXFP8Scaling(), weight=MXFP8Scaling(), grad_output=MXFP8Scaling()),
                Rule(
                    layers="lay*",
                    input=CurrentScaling(),
                    weight=StaticScaling(amax=GIVEN[1:2]),
                    grad_output=CurrentScaling(fp8_format="e4m3"),
                ),
                Rule(layers="*", input=RowwiseScaling(), weight=RowwiseScaling(), grad_output=RowwiseScaling()),
            )
        ),
        *[(own_amax, static(20.0), own_amax)] * 2,
    ),
    "custom-emulated": (
        CustomScaling(
            rules=(Rule(layers="*", input=MXFP8Scaling(), weight=RowwiseScaling(), grad_output=NVFP4Scaling()),)
        ),
        (MX, ROW, FOUR_ROWS),
        (MX, ROW, FOUR_COLUMNS),
    ),
}  # fmt: skip


def expected(case: str, x: Tensor, w: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The factors of y, dx and dw, in float64."""
    _, of_rows, of_columns = CASES[case]
    x_mk, w_nk, dy_mn = (cast(rows(t)) for cast, t in zip(of_rows, (x, w, dy)))
    x_km, w_kn, dy_nm = (cast(columns(t)) for cast, t in zip(of_columns, (x, w, dy)))
    return [(x_mk, w_nk.t()), (dy_mn, w_kn.t()), (dy_nm, x_km.t())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gemms(case: str, dtype: torch.dtype) -> None:
    _, op = managed(CASES[case][0])
    x, weight, dy = tensors(dtype)
    y, dx, dw = run(op, x, weight, dy)
    assert dx is not None
    assert dw is not None
    assert y.dtype == dx.dtype == dw.dtype == dtype
    for actual, (a, b) in zip((y, dx, dw), expected(case, x, weight, dy), strict=True):
        assert_product(actual, a, b, ulp=2.0**-8 if dtype == torch.bfloat16 else 2.0**-24)


def test_every_recipe_is_here_or_in_test_linear() -> None:
    assert {recipe.name for recipe, _, _ in CASES.values()} | {"delayed", "current"} == RECIPES.keys()
    assert all(recipe.name == name for name, recipe in RECIPES.items())


@pytest.mark.parametrize("gemm", range(3), ids=["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("case", ["rowwise", "nvfp4"])
def test_a_gemm_in_high_precision_beside_others(case: str, gemm: int) -> None:
    override = (gemm == 0, gemm == 1, gemm == 2)
    _, op = managed(type(CASES[case][0])(override_linear_precision=override))
    x, weight, dy = tensors()
    results = run(op, x, weight, dy)
    products = expected(case, x, weight, dy)
    x64, w64, dy64 = (t.detach().double() for t in (x, weight, dy))
    products[gemm] = [(x64, w64.t()), (dy64, w64), (dy64.t(), x64)][gemm]
    for actual, (a, b) in zip(results, products, strict=True):
        assert actual is not None
        assert_product(actual, a, b)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "custom"])
def test_granularity_is_what_the_quantizers_make(name: str) -> None:
    recipe = StaticScaling(amax=GIVEN) if name == "static" else RECIPES[name]()
    _, op = managed(recipe)
    assert isinstance(op, Fp8Linear)
    for operand, quantizer in zip(OPERANDS, op.quantizers, strict=True):
        made = quantizer(Plain(torch.randn(256, 256)), rowwise=True, columnwise=True)
        assert made.rowwise is not None
        assert made.columnwise is not None
        assert made.rowwise.granularity is made.columnwise.granularity is recipe.granularity(operand)
        assert quantizer.per_tensor == (made.rowwise.scale_inv.numel() == 1)


@pytest.mark.parametrize("case", ["rowwise", "blockwise", "static", "mxfp8", "nvfp4"])
def test_a_sink_takes_the_weight_gradient_in_place(case: str) -> None:
    """Twice added to what is there."""
    _, op = managed(CASES[case][0])
    x, weight, dy = tensors()

    class Sink:
        main_grad, count = torch.ones(N, K), 0

        def added(self) -> None:
            self.count += 1

    weight.grad_sink = Sink()  # type: ignore[attr-defined]
    run(op, x, weight, dy)
    ((a, b),) = expected(case, x, weight, dy)[2:]
    assert weight.grad is None
    assert weight.grad_sink.count == 1  # type: ignore[attr-defined]
    assert_product(Sink.main_grad - 1, a, b, ulp=2.0**-22)


def test_nvfp4_rounds_each_microbatch_and_step_anew() -> None:
    manager, op = managed(NVFP4Scaling())
    x, weight, dy = tensors()

    def dx() -> Tensor:
        x.grad = None
        run(op, x, weight, dy)
        assert x.grad is not None
        return x.grad.clone()

    w_kn = FOUR_SQUARE(columns(weight))
    for step in range(2):
        for microbatch in range(3):
            cast = by(quantize_nvfp4, weight=False, stochastic=key("rows", microbatch, step))
            with manager.recording(False):
                dx()  # an evaluation does not count
            assert_product(dx(), cast(rows(dy)), w_kn.t())
        manager.end_step()


def test_nvfp4_numbers_microbatches_of_all_replicas_and_heeds_the_seed() -> None:
    """Rank 1 of 3 has the micro-batches 1, 4, ... of the global batch."""
    _, op = managed(NVFP4Scaling(), seed=5, data_parallel=(1, 3))
    x, weight, dy = tensors()
    w_kn = FOUR_SQUARE(columns(weight))
    for microbatch in (1, 4):
        x.grad = None
        _, dx, _ = run(op, x, weight, dy)
        assert dx is not None
        cast = by(quantize_nvfp4, weight=False, stochastic=key("rows", microbatch, seed=5))
        assert_product(dx, cast(rows(dy)), w_kn.t())


def test_nvfp4_is_right_on_average() -> None:
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


def test_delayed_operands_of_a_mixture_advance() -> None:
    """Only theirs: the state of a custom recipe is that of the operands that have any."""
    delayed = DelayedScaling(amax_history_len=3)
    rule = Rule(layers="*", input=delayed, weight=CurrentScaling(), grad_output=delayed)
    manager, op = managed(CustomScaling(rules=(rule,)))
    x, weight, dy = tensors()
    run(op, x, weight, dy)
    manager.end_step()
    state = manager.state_dict()
    assert sorted(state) == [
        f"fp8.layer.{operand}.{what}" for operand in ("grad_output", "input") for what in ("amax_history", "scale")
    ]
    assert state["fp8.layer.input.amax_history"].tolist() == [0, x.detach().abs().max(), 0]
    y, _, _ = run(op, x, weight, dy)
    assert_product(y, cast_exactly(x, E4M3), cast_exactly(weight, E4M3).t())
