"""FP8 products of both backends against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.fp8 import E4M3, E5M2, Format
from megafp8.gemm.dispatch import Fp8Gemm, GemmBackend, gemm
from megafp8.numerics.recipes.mxfp8 import quantize_mxfp8
from megafp8.numerics.recipes.nvfp4 import quantize_nvfp4
from megafp8.numerics.tensor import ScaledTensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Error of one sum as a share of Σ|a·b|. fp32: one rounding for each of k = 96 terms at most, and the two scales. A
# Hopper tensor core aligns the terms of a block to the largest and keeps 13 bits below it.
FP32_SUM, HOPPER_SUM = 100 * 2.0**-24, 2.0**-11
SCALES = (0.3, 1.7e-3)
# torch 2.11 has no CPU kernel for scaled_mm; 2.13 has.
NO_CPU_KERNEL = not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
needs_cpu_kernel = pytest.mark.skipif(NO_CPU_KERNEL, reason="this torch has no scaled_mm on CPU")


def operands(m: int, n: int, k: int, a_fmt: Format, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * n * k)
    a = (torch.randn(m, k, generator=generator) * 20).to(a_fmt.dtype)
    b = (torch.randn(n, k, generator=generator) * 20).to(E4M3.dtype)
    return a.to(device), b.to(device)


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, backend: GemmBackend, fast: bool = False) -> Tensor:
    scales = (torch.tensor(s, device=a.device) for s in SCALES)
    a_scale_inv, b_scale_inv = scales
    product = Fp8Gemm(backend, a.device)
    return product.tn(ScaledTensor(a, a_scale_inv), ScaledTensor(b, b_scale_inv), out_dtype, use_fast_accum=fast)


def exact(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64 and Σ|a·b|, both scaled."""
    factor = float(torch.tensor(SCALES[0])) * float(torch.tensor(SCALES[1]))
    a64, b64 = a.double(), b.double()
    return a64 @ b64.t() * factor, a64.abs() @ b64.abs().t() * factor


def bf16_ordinal(x: Tensor) -> Tensor:
    """Integers that count bf16 numbers along the real line."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


SHAPES = pytest.mark.parametrize("shape", [(48, 32, 96), (1, 16, 16), (7, 20, 33), (16, 3, 5)])
A_FORMATS = pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("auto", "cpu"),
        ("emulated", "cpu"),
        pytest.param("scaled_mm", "cpu", marks=needs_cpu_kernel),
        pytest.param("auto", "cuda", marks=pytest.mark.gpu),
        pytest.param("emulated", "cuda", marks=pytest.mark.gpu),
    ],
)
@A_FORMATS
@SHAPES
def test_fp32_result_against_float64(
    shape: tuple[int, int, int], a_fmt: Format, backend: GemmBackend, device: str
) -> None:
    a, b = operands(*shape, a_fmt, device)
    y = product(a, b, torch.float32, backend)
    expected, magnitude = exact(a, b)
    share = HOPPER_SUM if device == "cuda" and backend != "emulated" else FP32_SUM
    assert y.dtype == torch.float32
    assert y.shape == shape[:2]
    assert y.is_contiguous()
    assert ((y.double() - expected).abs() <= share * magnitude).all()


@needs_cpu_kernel
@A_FORMATS
@SHAPES
def test_backends_agree_within_one_bf16_step_on_cpu(shape: tuple[int, int, int], a_fmt: Format) -> None:
    a, b = operands(*shape, a_fmt, "cpu")
    results = [bf16_ordinal(product(a, b, torch.bfloat16, backend)) for backend in ("scaled_mm", "emulated")]
    assert (results[0] - results[1]).abs().max() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@A_FORMATS
@SHAPES
def test_bf16_result_on_hopper(shape: tuple[int, int, int], a_fmt: Format, fast: bool) -> None:
    a, b = operands(*shape, a_fmt, "cuda")
    y = product(a, b, torch.bfloat16, "scaled_mm", fast)
    expected, magnitude = exact(a, b)
    assert ((y.double() - expected).abs() <= HOPPER_SUM * magnitude + 2.0**-8 * expected.abs()).all()


def fine(kind: str, m: int, n: int, k: int, device: str = "cpu") -> tuple[ScaledTensor, ScaledTensor]:
    """Operands with blocks of 32, or 16 and 16×16, of rows with very different sizes."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        (torch.randn(r, k, generator=generator) * 10.0 ** torch.randint(-9, 2, (r, 1), generator=generator)).to(device)
        for r in (m, n)
    )
    if kind == "mxfp8":
        return quantize_mxfp8(a, E5M2), quantize_mxfp8(b)
    return quantize_nvfp4(a, weight=False, stochastic=None), quantize_nvfp4(b, weight=True, stochastic=None)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_dequantized_products_are_those_of_blocks(kind: str) -> None:
    """In float64 the only difference is where a tensor's scale is rounded."""
    a, b = fine(kind, 33, 20, 100)
    product = Fp8Gemm("auto", torch.device("cpu"))
    y, dequantized = (
        product.tn(x, w, torch.float64, use_fast_accum=False) for x, w in ((a, b), (a.dequantized(), b.dequantized()))
    )
    magnitude = a.dequantize(torch.float64).abs() @ b.dequantize(torch.float64).abs().t()
    assert ((y - dequantized).abs() <= 2.0**-50 * magnitude).all()


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["auto", "scaled_mm"])
@pytest.mark.parametrize("shape", [(48, 32, 96), (7, 20, 33)])
def test_products_in_bf16(kind: str, device: str, backend: GemmBackend, shape: tuple[int, int, int]) -> None:
    """Row-major and transposed, rounded once to bf16 and added in fp32."""
    a, b = (x.dequantized() for x in fine(kind, *shape, device))
    transposed = b._replace(data=b.data.t().contiguous().t())
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    magnitude = a.dequantize(torch.float64).abs() @ b.dequantize(torch.float64).abs().t()
    product = Fp8Gemm(backend, torch.device(device))
    for w in (b, transposed):
        for dtype, ulp in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-23)):
            into = torch.full(shape[:2], torch.nan, dtype=dtype, device=device)
            y = product.tn(a, w, dtype, use_fast_accum=False, out=into)
            assert y is into
            assert ((y.double() - expected).abs() <= ulp * expected.abs() + FP32_SUM * magnitude).all()
        total = expected.float()
        product.accumulate_tn(a, w, total, use_fast_accum=False)
        assert ((total.double() - 2 * expected).abs() <= 2.0**-22 * expected.abs() + FP32_SUM * magnitude).all()


def test_emulated_rounds_to_bf16_once() -> None:
    a, b = operands(16, 16, 64, E4M3, "cpu")
    expected = product(a, b, torch.float32, "emulated").to(torch.bfloat16)
    assert torch.equal(product(a, b, torch.bfloat16, "emulated"), expected)


def test_scales_whose_product_underflows() -> None:
    """1e-25 · 1e-25 is 0 in fp32, the sum times both is not."""
    a = torch.full((1, 16), 448.0).to(E4M3.dtype)
    tiny = torch.tensor(1e-25)
    operand = ScaledTensor(a, tiny)
    y = Fp8Gemm("emulated", a.device).tn(operand, operand, torch.float32, use_fast_accum=False)
    assert y.item() == pytest.approx(448.0**2 * 16 * 1e-50, abs=2.0**-149)
    assert y.item() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_high_precision_sums_of_bf16_reach_fp32_unrounded(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 64, generator=generator).bfloat16().to(device)
    b = torch.randn(64, 4, generator=generator).bfloat16().to(device)
    expected = a.double() @ b.double()
    y = gemm(a, b, torch.float32)
    magnitude = a.double().abs() @ b.double().abs()
    assert ((y.double() - expected).abs() <= 64 * 2.0**-24 * magnitude).all()
    y16 = gemm(a, b, torch.bfloat16)
    assert y16.dtype == torch.bfloat16
    assert ((y16.double() - expected).abs() <= 2.0**-8 * expected.abs() + 64 * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_high_precision_keeps_and_converts_dtypes(dtype: torch.dtype, device: str) -> None:
    a = torch.randn(3, 5, dtype=dtype, device=device)
    b = torch.randn(5, 2, dtype=dtype, device=device)
    torch.testing.assert_close(gemm(a, b, dtype), a @ b, atol=0, rtol=0)
    assert gemm(a, b, torch.bfloat16).dtype == torch.bfloat16
