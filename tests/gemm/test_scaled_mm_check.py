"""The trial of Blackwell's products, on stand-ins for GPUs that have them right, wrong or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.gemm import scaled_mm_check as block_scaled_check
from megafp8.gemm.dispatch import Fp8Gemm
from megafp8.gemm.scaled_mm_check import why_not_block_scaled
from megafp8.linear.state import Quantizers
from megafp8.numerics.recipes.mxfp8 import quantize_mxfp8
from megafp8.numerics.recipes.nvfp4 import quantize_nvfp4
from megafp8.numerics.tensor import ScaledTensor
from tests.fp8 import blackwell
from tests.fp8.reference import spread
from tests.linear.test_linear import assert_product, managed, run
from tests.numerics.recipes.test_conformance import CASES, expected, tensors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Blackwell GPU whose tensors lie on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    problems = block_scaled_check._problems
    monkeypatch.setattr(block_scaled_check, "_problems", lambda _: problems(CPU))
    monkeypatch.setattr(F, "scaled_mm", blackwell.scaled_mm)
    return monkeypatch


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_gpus_before_blackwell_are_not_tried(capability: tuple[int, int], gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    gpu.delattr(F, "scaled_mm")
    here = f"capability {capability[0]}.{capability[1]}"
    assert why_not_block_scaled(CUDA) == f"tensor cores for them come with compute capability 10.0, and this is {here}"
    assert str(why_not_block_scaled(CPU)).endswith("and this is cpu")


def test_right_products_are_no_reason(gpu: pytest.MonkeyPatch) -> None:
    assert why_not_block_scaled(CUDA) is None


def test_a_refusal_is_a_reason(gpu: pytest.MonkeyPatch) -> None:
    def refusing(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs["output_dtype"] == torch.float32:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nand more")
        return blackwell.scaled_mm(*args, **kwargs)

    gpu.setattr(F, "scaled_mm", refusing)
    reason = str(why_not_block_scaled(CUDA))
    assert reason.startswith("this GPU has tensor cores for them, but mxfp8 into float32 by scaled_mm of torch ")
    assert reason.endswith("was refused (CUBLAS_STATUS_NOT_SUPPORTED)")


def plain_layout(row: int, block: int, blocks: int) -> int:
    """Tiles whose rows follow each other."""
    return (row // 128 * -(-blocks // 4) + block // 4) * 512 + row % 128 * 4 + block % 4


def tiles_by_columns(row: int, block: int, blocks: int) -> int:
    """Right within a tile; tiles below each other come first, of two."""
    return (block // 4 * 2 + row // 128) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("layout", [plain_layout, tiles_by_columns])
def test_scales_read_in_another_layout_are_found_out(layout: Any, gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(blackwell, "offset", layout)
    assert str(why_not_block_scaled(CUDA)).endswith(" gave a wrong product")


def made(kind: str) -> tuple[ScaledTensor, ScaledTensor]:
    a, b = spread(20, 100, seed=1), spread(24, 100, seed=2)
    if kind == "mxfp8":
        return quantize_mxfp8(a), quantize_mxfp8(b)
    return quantize_nvfp4(a, weight=False, stochastic=None), quantize_nvfp4(b, weight=True, stochastic=None)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("backend", ["auto", "scaled_mm", "emulated"])
def test_gemms_go_where_the_trial_says(kind: str, backend: Any, gpu: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["output_dtype"])
        return blackwell.scaled_mm(*args, **kwargs)

    gpu.setattr(F, "scaled_mm", counted)
    product = Fp8Gemm(backend, CUDA)
    calls.clear()
    a, b = made(kind)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    y = product.tn(a, b, torch.bfloat16, use_fast_accum=True)
    torch.testing.assert_close(y, exact.bfloat16(), rtol=2.0**-7, atol=1e-5)
    total = torch.ones(20, 24)
    product.accumulate_tn(a, b, total, use_fast_accum=False)
    torch.testing.assert_close(total, (1 + exact).float(), rtol=1e-5, atol=1e-4)
    assert calls == ([] if backend == "emulated" else [torch.bfloat16, torch.float32])


def test_unlike_operands_and_float64_are_emulated(gpu: pytest.MonkeyPatch) -> None:
    product = Fp8Gemm("auto", CUDA)
    gpu.delattr(F, "scaled_mm")
    (a, b), (_, four) = made("mxfp8"), made("nvfp4")
    exact = a.dequantize(torch.float64) @ four.dequantize(torch.float64).t()
    torch.testing.assert_close(
        product.tn(a, four, torch.float32, use_fast_accum=False).double(), exact, rtol=1e-4, atol=1e-4
    )
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    torch.testing.assert_close(product.tn(a, b, torch.float64, use_fast_accum=False), exact)


@pytest.mark.parametrize("case", ["mxfp8", "nvfp4"])
def test_a_layer_on_blackwell(case: str, gpu: pytest.MonkeyPatch) -> None:
    """All three GEMMs, so that what backward keeps has both levels of scales."""
    calls: list[torch.dtype] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["output_dtype"])
        return blackwell.scaled_mm(*args, **kwargs)

    _, op = managed(CASES[case].recipe)
    own = (replace(q, tensor=replace(q.tensor, block_scaled=True)) for q in op.state.quantizers)  # type: ignore[type-var]
    op.state.complete(Quantizers(*own), Fp8Gemm("auto", CUDA), None)
    gpu.setattr(F, "scaled_mm", counted)
    x, weight, dy = tensors()
    results = run(op, x, weight, dy)
    assert len(calls) == 3
    for actual, (a, b) in zip(results, expected(case, x, weight, dy), strict=True):
        assert actual is not None
        assert_product(actual, a, b, ulp=2.0**-24)
