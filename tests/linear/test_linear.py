"""The three GEMMs against float64 products of the operands as quantized, and the protocols around them.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafp8.fp8 import E4M3, E5M2, BlockwiseScaling, CurrentScaling, DelayedScaling, Fp8Manager, Fp8Recipe
from megafp8.gemm.dispatch import Fp8Gemm
from megafp8.linear import gemms, linear
from megafp8.linear.linear import high_precision_linear
from megafp8.numerics.quantize import quantize, scale_from_amax
from tests.fp8.linear_layer import LinearLayer, Sum

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
S, B, K, N = 6, 8, 32, 16  # 48 tokens


def managed(recipe: Fp8Recipe | None, device: str = "cpu", **options: Any) -> tuple[Fp8Manager, LinearLayer]:
    manager = Fp8Manager(recipe, amax_group=None, **options)
    op = LinearLayer(manager)
    manager.materialize(torch.device(device))
    return manager, op


def tensors(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, Tensor]:
    """x `[s, b, k]`, a weight `[n, k]`, dy `[s, b, n]`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(S, B, K, generator=generator) * 2
    w = torch.randn(N, K, generator=generator) * 0.1
    dy = torch.randn(S, B, N, generator=generator) * 1e-3
    parameter = nn.Parameter(w.to(device, dtype))
    return x.to(device, dtype).requires_grad_(), parameter, dy.to(device, dtype)


def cast_exactly(x: Tensor, fmt: Any, scale: Tensor | None = None) -> Tensor:
    """The numbers an FP8 copy of `x` stands for, float64 (the casts themselves are held in test_quantize.py)."""
    if scale is None:
        scale = scale_from_amax(x.detach().float().abs().max(), fmt.max)
    return quantize(x.detach(), scale, fmt).double() * scale.reciprocal().double()


def assert_product(actual: Tensor, a: Tensor, b: Tensor, device: str = "cpu", ulp: float = 2.0**-24) -> None:
    """`actual` is a · b (float64) up to the accumulation of the device and one rounding to the result's dtype."""
    share = 2.0**-11 if device == "cuda" else 100 * 2.0**-24
    expected, magnitude = a @ b, a.abs() @ b.abs()
    error = (actual.double().reshape(expected.shape) - expected).abs()
    assert (error <= share * magnitude + ulp * expected.abs()).all()


def run(
    op: Callable[..., Tensor], x: Tensor, weight: nn.Parameter, dy: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    y = op(x, weight)
    y.backward(dy)
    return y, x.grad, weight.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_current_scaling_gemms(fp8_format: Any, dtype: torch.dtype, device: str) -> None:
    _, op = managed(CurrentScaling(fp8_format=fp8_format), device)
    x, weight, dy = tensors(device, dtype)
    y, dx, dw = run(op, x, weight, dy)
    gradient_format = E5M2 if fp8_format == "hybrid" else E4M3
    x8, w8 = cast_exactly(x, E4M3).flatten(0, 1), cast_exactly(weight, E4M3)
    dy8 = cast_exactly(dy, gradient_format).flatten(0, 1)
    assert dx is not None
    assert dw is not None
    assert y.shape == (S, B, N)
    assert y.dtype == dx.dtype == dw.dtype == dtype
    ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    assert_product(y, x8, w8.t(), device, ulp)
    assert_product(dx, dy8, w8, device, ulp)
    assert_product(dw, dy8.t(), x8, device, ulp)


@pytest.mark.parametrize("device", DEVICES)
def test_delayed_scaling_gemms_use_the_scales_of_the_step_before(device: str) -> None:
    manager, op = managed(DelayedScaling(amax_history_len=4), device)
    x, weight, dy = tensors(device)
    run(op, x, weight, dy)
    manager.end_step()
    scales = {name: tensor.clone() for name, tensor in manager.state_dict().items() if name.endswith("scale")}
    for tensor, operand, fmt in ((x, "input", E4M3), (weight, "weight", E4M3), (dy, "grad_output", E5M2)):
        expected = fmt.max / tensor.detach().abs().max().item()
        assert scales[f"fp8.layer.{operand}.scale"].item() == pytest.approx(expected, rel=1e-6)

    x2 = (x.detach() * 3).requires_grad_()  # saturates: the scale is of the smaller x
    weight.grad = None
    y, dx, dw = run(op, x2, weight, dy)
    x8 = cast_exactly(x2, E4M3, scales["fp8.layer.input.scale"]).flatten(0, 1)
    w8 = cast_exactly(weight, E4M3, scales["fp8.layer.weight.scale"])
    dy8 = cast_exactly(dy, E5M2, scales["fp8.layer.grad_output.scale"]).flatten(0, 1)
    assert dx is not None
    assert dw is not None
    assert x8.abs().max() < x2.abs().max() / 2
    assert_product(y, x8, w8.t(), device)
    assert_product(dx, dy8, w8, device)
    assert_product(dw, dy8.t(), x8, device)


@pytest.mark.parametrize("gemm", range(3), ids=["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("override", [True, False])
def test_each_gemm_can_stay_in_high_precision(gemm: int, override: bool) -> None:
    """One GEMM overridden, or all but one: what is overridden is plain, the rest is as quantized."""
    choice = [(i == gemm) == override for i in range(3)]
    _, op = managed(CurrentScaling(override_linear_precision=(choice[0], choice[1], choice[2])))
    x, weight, dy = tensors()
    y, dx, dw = run(op, x, weight, dy)
    plain = [t.detach().double() for t in (x.flatten(0, 1), weight, dy.flatten(0, 1))]
    cast = [cast_exactly(x, E4M3).flatten(0, 1), cast_exactly(weight, E4M3), cast_exactly(dy, E5M2).flatten(0, 1)]
    assert dx is not None
    assert dw is not None
    for high, actual, first, second in (
        (choice[0], y, lambda x, w, dy: x, lambda x, w, dy: w.t()),
        (choice[1], dx, lambda x, w, dy: dy, lambda x, w, dy: w),
        (choice[2], dw, lambda x, w, dy: dy.t(), lambda x, w, dy: x),
    ):
        used, other = (plain, cast) if high else (cast, plain)
        assert_product(actual, first(*used), second(*used))
        wrong = first(*other) @ second(*other)
        assert (actual.reshape(wrong.shape).double() - wrong).abs().max() > 1e-3 * wrong.abs().max()


def test_backward_keeps_fp8_only() -> None:
    _, op = managed(CurrentScaling())
    x, weight, _ = tensors()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        op(x, weight)
    assert sorted((t.dtype, t.numel()) for t in kept if t.numel() > 1) == [(torch.float8_e4m3fn, S * B * K)]


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["none", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_grad_sink_takes_fp32_and_autograd_nothing(recipe: Fp8Recipe | None, dtype: torch.dtype, device: str) -> None:
    _, op = managed(recipe, device)
    x, weight, dy = tensors(device, dtype)
    _, dx, dw = run(op, x, weight, dy)
    assert dw is not None
    weight.grad, sink = None, Sum(weight)
    x2 = x.detach().requires_grad_()
    _, dx2, none = run(op, x2, weight, dy)
    assert none is None
    assert sink.count == 1
    assert torch.equal(sink.main_grad.to(dtype), dw)
    assert dx is not None
    assert dx2 is not None
    assert torch.equal(dx, dx2)
    if dtype == torch.bfloat16:  # unrounded: it holds more than bf16 can
        assert not torch.equal(sink.main_grad.bfloat16().float(), sink.main_grad)


def closed_over(op: LinearLayer, weight: nn.Parameter, x: Tensor) -> Tensor:
    """A module's forward: the weight is no argument of the checkpoint."""
    return op(x, weight)


@pytest.mark.parametrize("recipe", [None, CurrentScaling(), DelayedScaling()], ids=["none", "current", "delayed"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_changes_nothing(recipe: Fp8Recipe | None, use_reentrant: bool) -> None:
    results = []
    for recompute in (False, True):
        manager, op = managed(recipe)
        x, weight, dy = tensors()
        sink, taken = Sum(weight), list[Tensor]()
        for _ in range(3):
            for scale in (1.0, 2.0):  # micro-batches
                x_i = x * scale
                layer = partial(closed_over, op, weight)
                y = checkpoint(layer, x_i, use_reentrant=use_reentrant) if recompute else layer(x_i)
                y.backward(dy)
                taken.append(sink.main_grad.clone())
            manager.end_step()
        assert x.grad is not None
        assert sink.count == 6
        results.append([x.grad, *taken, *manager.state_dict().values()])
    assert len(results[0]) == len(results[1])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["none", "current"])
def test_only_wanted_gradients_are_computed(recipe: Fp8Recipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[str] = []

    def counted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            products.append(name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(gemms, "gemm", counted("gemm", gemms.gemm))
    monkeypatch.setattr(Fp8Gemm, "tn", counted("tn", Fp8Gemm.tn))
    for x_wanted, w_wanted in ((True, False), (False, True), (True, True)):
        _, op = managed(recipe)
        x, weight, dy = tensors()
        x.requires_grad_(x_wanted)
        weight.requires_grad_(w_wanted)
        products.clear()
        run(op, x, weight, dy)
        assert len(products) == 1 + x_wanted + w_wanted
        assert (x.grad is not None, weight.grad is not None) == (x_wanted, w_wanted)


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), CurrentScaling(), BlockwiseScaling()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_functions_without_communication_are_the_general_ones(
    recipe: Fp8Recipe | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Functions for layers without communication against the general ones, bit for bit."""
    results: list[list[Tensor | None]] = []
    for local in (True, False):
        if not local:
            monkeypatch.setattr(linear, "LOCAL_COMM", None)  # what a layer's communication is compared with
        manager, op = managed(recipe)
        results.append([])
        for x_wanted, w_wanted in ((True, True), (True, False), (False, True)):
            x, weight, dy = tensors(dtype=dtype)
            x.requires_grad_(x_wanted)
            weight.requires_grad_(w_wanted)
            op.state.invalidate_weight()
            y = op(x.transpose(0, 1), weight)
            y.backward(dy.transpose(0, 1))
            results[-1] += [y, x.grad, weight.grad]
            manager.end_step()
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_weight_is_quantized_once_until_invalidated() -> None:
    manager, op = managed(CurrentScaling())
    x, weight, dy = tensors()
    with torch.no_grad():
        op(x, weight)
    rows_alone: Any = op.state.fp8_weight(weight, columnwise=False)
    assert rows_alone.made.columnwise is None
    run(op, x, weight, dy)
    w8: Any = op.state.fp8_weight(weight, columnwise=True)
    y, _, _ = run(op, x, weight, dy)
    assert op.state.fp8_weight(weight, columnwise=False) is w8
    assert w8.made.columnwise is not None
    with torch.no_grad():
        weight.mul_(-2)
    assert torch.equal(op(x, weight), y)  # stale by design until told
    manager.end_step()
    assert torch.equal(op(x, weight), -2 * y)
    with torch.no_grad():
        weight.mul_(-0.5)
    manager.invalidate_weights()
    assert torch.equal(op(x, weight), y)


@pytest.mark.parametrize("override", [(False, False, False), (True, False, False), (False, True, False)])
def test_a_weight_transposed_in_each_backward_has_the_bits_of_a_kept_transpose(override: Any) -> None:
    """Also of later micro-batches, and of the step after; only the other copy is kept."""
    results, sizes = [], []
    for keeps in (True, False):
        manager = Fp8Manager(DelayedScaling(override_linear_precision=override), amax_group=None)
        op = LinearLayer(manager, keeps_transpose=keeps)
        manager.materialize(torch.device("cpu"))
        x, weight, dy = tensors()
        found: list[Tensor | None] = []
        for _ in range(2):
            for _ in range(2):
                found += [part.clone() if part is not None else None for part in run(op, x, weight, dy)]
            made: Any = op.state.fp8_weight(weight, columnwise=not override[1])
            sizes.append(sum(part is not None for part in made.made))
            manager.end_step()
        results.append(found)
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert sizes == ([1, 1, 1, 1] if override[1] else [2, 2, 1, 1])


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["none", "current"])
def test_bias_and_its_gradient(recipe: Fp8Recipe | None) -> None:
    _, op = managed(recipe)
    x, weight, dy = tensors(dtype=torch.bfloat16)
    bias = nn.Parameter(torch.linspace(-1, 1, N).bfloat16())
    y = op(x, weight, bias)
    y.backward(dy)
    assert torch.equal(y, op(x, weight) + bias)
    expected = dy.double().sum((0, 1))
    assert bias.grad is not None
    assert ((bias.grad.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-8).all()


def test_bias_gradient_is_summed_in_fp32() -> None:
    """In bf16, adding ones stops at 256."""
    bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    x = torch.zeros(1024, 3, 8, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
    high_precision_linear(x, weight, bias).backward(torch.ones(1024, 3, 4, dtype=torch.bfloat16))
    assert bias.grad is not None
    assert bias.grad.tolist() == [3072] * 4


def test_strided_and_expanded_arguments() -> None:
    _, op = managed(CurrentScaling())
    x, weight, _ = tensors()
    strided = x.detach().transpose(0, 1).requires_grad_()
    y = op(strided, weight)
    assert torch.equal(y, op(strided.contiguous(), weight))
    columns = x.detach().flatten(0, 1).t().contiguous().t()
    assert torch.equal(op(columns, weight), op(x.detach(), weight).flatten(0, 1))
    y.sum().backward()  # dy is a scalar, expanded
    assert strided.grad is not None
    assert_product(strided.grad[0, 0], torch.ones(1, N).double(), cast_exactly(weight, E4M3))


def test_high_precision_gradients_in_float64() -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(4, dtype=torch.float64))
    assert torch.autograd.gradcheck(high_precision_linear, (x, weight, bias))
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(high_precision_linear(x, weight, bias), expected, atol=1e-14, rtol=0)


def test_high_precision_converts_a_weight_of_another_dtype() -> None:
    x, _, dy = tensors(dtype=torch.bfloat16)
    _, weight, _ = tensors(dtype=torch.float32)
    y, dx, dw = run(high_precision_linear, x, weight, dy)
    assert y.dtype == torch.bfloat16
    assert dx is not None
    assert dw is not None
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    assert_product(y, x.detach().double().flatten(0, 1), weight.detach().bfloat16().double().t(), ulp=2.0**-8)


def test_an_operation_used_too_early_says_what_is_missing() -> None:
    manager = Fp8Manager(CurrentScaling(), amax_group=None)
    op = LinearLayer(manager)
    x, weight, _ = tensors()
    with pytest.raises(AssertionError, match="materialize"):
        op(x, weight)
