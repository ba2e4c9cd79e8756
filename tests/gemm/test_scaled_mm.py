"""Operands arranged for Blackwell, against the documented layouts; the products on a stand-in for its scaled_mm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from megafp8.fp8 import E4M3, E5M2
from megafp8.gemm.scaled_mm import arranged, block_scaled_mm, multiplies, packed, swizzled
from megafp8.numerics.recipes.mxfp8 import e8m0_decode, quantize_mxfp8
from megafp8.numerics.recipes.nvfp4 import quantize_nvfp4
from megafp8.numerics.tensor import BLOCK_1X16, BLOCK_1X32, BLOCK_16X16, TENSOR, ScaledTensor
from tests.fp8 import blackwell
from tests.fp8.reference import finite_values, spread

KINDS = pytest.mark.parametrize("kind", ["mxfp8", "mxfp8-e5m2", "nvfp4", "nvfp4-weight"])
# Within and beyond a tile of 128 rows × 4 blocks, with padding of k, n and blocks, and without any.
SHAPES = pytest.mark.parametrize("mnk", [(1, 1, 1), (7, 20, 33), (128, 16, 128), (130, 136, 200), (33, 48, 320)])


def operands(kind: str, m: int, n: int, k: int) -> tuple[ScaledTensor, ScaledTensor]:
    a, b = spread(m, k, seed=1), spread(n, k, seed=2)
    if kind.startswith("mxfp8"):
        return quantize_mxfp8(a, E5M2 if kind == "mxfp8-e5m2" else E4M3), quantize_mxfp8(b)
    return (
        quantize_nvfp4(a, weight=False, stochastic=None),
        quantize_nvfp4(b, weight=kind == "nvfp4-weight", stochastic=None),
    )


@pytest.mark.parametrize("shape", [(1, 1), (5, 4), (128, 4), (129, 5), (300, 11), (0, 3), (3, 0)])
def test_scales_lie_as_documented(shape: tuple[int, int]) -> None:
    r, c = shape
    numbers = 1 + torch.arange(r * c, dtype=torch.int32).view(r, c)
    for byte in (numbers % 251, numbers // 251):  # two bytes tell all scales apart
        flat = swizzled(byte.to(torch.uint8), r)
        expected = torch.zeros(-(-r // 128) * 128 * -(-c // 4) * 4, dtype=torch.uint8)
        for i in range(r):
            for j in range(c):
                expected[blackwell.offset(i, j, c)] = byte[i, j]
        assert torch.equal(flat, expected)


def test_scales_fill_the_tiles_of_padded_rows() -> None:
    scales = torch.full((128, 1), 9, dtype=torch.uint8)
    flat = swizzled(scales, 144)
    assert flat.numel() == 2 * 512
    assert not flat[512:].any()


def test_pairs_of_all_four_bit_values() -> None:
    values = torch.tensor(blackwell.E2M1_VALUES)
    values = torch.cat([values, -values])
    first, second = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    held = torch.stack([first, second], dim=1).to(torch.float8_e4m3fn)
    pairs = packed(held.view(torch.uint8))
    assert pairs.flatten().tolist() == [low | high << 4 for low in range(16) for high in range(16)]
    assert torch.equal(blackwell.unpacked(pairs), held.double())


def test_block_scales_keep_their_byte() -> None:
    block = torch.from_numpy(finite_values(E4M3)).float().view(1, -1)
    data = torch.zeros(1, 16 * block.shape[1]).to(torch.float8_e4m3fn)
    x = ScaledTensor(data, block, BLOCK_1X16, torch.tensor(3.0))
    found = blackwell.unswizzled(arranged(x).scale_inv[0], 1, block.shape[1])
    assert torch.equal(found, block.double())


def test_powers_of_two_keep_their_byte() -> None:
    data = torch.arange(255, dtype=torch.uint8).view(1, -1)
    x = ScaledTensor(torch.zeros(1, 32 * 255).to(torch.float8_e4m3fn), e8m0_decode(data), BLOCK_1X32)
    flat = arranged(x).scale_inv[0].view(torch.uint8)
    assert [flat[blackwell.offset(0, j, 255)].item() for j in range(255)] == list(range(255))


@KINDS
@SHAPES
def test_an_arranged_matrix_has_the_values_of_the_matrix(kind: str, mnk: tuple[int, int, int]) -> None:
    for x in operands(kind, *mnk):
        r, k = x.data.shape
        found = arranged(x, row_multiple=16)
        values = blackwell.operand(*found)
        assert values.shape == (r + -r % 16, k + -k % 32)
        assert not values[r:].any()
        assert not values[:, k:].any()
        assert torch.equal(values[:r, :k], x.dequantize(torch.float64))


@KINDS
@SHAPES
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_products(
    kind: str, mnk: tuple[int, int, int], out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", blackwell.scaled_mm)
    a, b = operands(kind, *mnk)
    assert multiplies(a, b, out_dtype)
    y = block_scaled_mm(a, b, out_dtype)
    assert y.dtype == out_dtype
    assert y.shape == mnk[:2]
    assert y.is_contiguous()
    a64, b64 = a.dequantize(torch.float64), b.dequantize(torch.float64)
    allowed = 2.0**-22 * (a64.abs() @ b64.abs().t()) + torch.finfo(out_dtype).eps * (a64 @ b64.t()).abs()
    assert ((y.double() - a64 @ b64.t()).abs() <= allowed).all()


@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="older torch checks less")
@KINDS
@SHAPES
def test_torch_takes_the_operands(kind: str, mnk: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own checks for CUDA, which need no GPU: shapes, strides, dtypes, counts of scales, swizzles."""
    real, shapes = F.scaled_mm, []

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        with FakeTensorMode():
            args, kwargs = tree_map_only(Tensor, on_cuda, (args, kwargs))
            y = real(*args, **kwargs)
        shapes.append(tuple(y.shape))
        return torch.empty(y.shape, dtype=y.dtype)

    def on_cuda(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    monkeypatch.setattr(F, "scaled_mm", checked)
    a, b = operands(kind, *mnk)
    assert block_scaled_mm(a, b, torch.float32).shape == mnk[:2]
    m, n, _ = mnk
    assert shapes == [(m, n + -n % 16)]
    monkeypatch.setattr("megafp8.gemm.scaled_mm.swizzled", lambda scales, r: swizzled(scales, r)[:-1])
    with pytest.raises(RuntimeError, match="scaling scale_a must have"):  # so there are checks
        block_scaled_mm(a, b, torch.float32)


@pytest.mark.parametrize("weight", [False, True])
def test_a_nan_shows_in_its_row_and_nowhere_else(weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", blackwell.scaled_mm)
    x, other = spread(20, 64, seed=1), spread(5, 64, seed=2)
    x[3, 17] = torch.nan
    a = quantize_nvfp4(x, weight=weight, stochastic=None)
    b = quantize_nvfp4(other, weight=False, stochastic=None)
    expected = (a.dequantize() @ b.dequantize().t()).isnan()
    assert expected[3].all()
    assert expected.sum() == 5
    assert torch.equal(block_scaled_mm(a, b, torch.float32).isnan(), expected)
    assert torch.equal(block_scaled_mm(b, a, torch.float32).isnan(), expected.t())


@pytest.mark.parametrize(
    ("a", "b", "dtypes", "out_dtype", "expected"),
    [
        (BLOCK_1X32, BLOCK_1X32, (E4M3, E4M3), torch.float32, True),
        (BLOCK_1X32, BLOCK_1X32, (E5M2, E4M3), torch.bfloat16, True),
        (BLOCK_1X32, BLOCK_1X32, (E5M2, E5M2), torch.bfloat16, False),
        (BLOCK_1X32, BLOCK_1X32, (E4M3, E4M3), torch.float64, False),
        (BLOCK_1X16, BLOCK_16X16, (E4M3, E4M3), torch.bfloat16, True),
        (BLOCK_16X16, BLOCK_1X16, (E4M3, E4M3), torch.bfloat16, True),
        (BLOCK_1X16, BLOCK_1X32, (E4M3, E4M3), torch.bfloat16, False),
        (BLOCK_1X32, TENSOR, (E4M3, E4M3), torch.bfloat16, False),
        (TENSOR, TENSOR, (E4M3, E4M3), torch.bfloat16, False),
    ],
)
def test_what_blackwell_multiplies(a, b, dtypes, out_dtype: torch.dtype, expected: bool) -> None:  # type: ignore[no-untyped-def]
    first, second = (
        ScaledTensor(torch.zeros(32, 32).to(fmt.dtype), torch.ones(granularity.grid(32, 32)), granularity)
        for granularity, fmt in zip((a, b), dtypes)
    )
    assert multiplies(first, second, out_dtype) is expected


def blackwell_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not blackwell_gpu(), reason="needs compute capability 10.0")
@KINDS
@pytest.mark.parametrize("mnk", [(7, 20, 33), (130, 136, 200), (256, 512, 1024)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_products_on_blackwell(kind: str, mnk: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    def there(x: ScaledTensor) -> ScaledTensor:
        scale = x.tensor_scale_inv
        return ScaledTensor(x.data.cuda(), x.scale_inv.cuda(), x.granularity, None if scale is None else scale.cuda())

    a, b = operands(kind, *mnk)
    y: Tensor = block_scaled_mm(there(a), there(b), out_dtype).cpu()
    a64, b64 = a.dequantize(torch.float64), b.dequantize(torch.float64)
    allowed = 2.0**-12 * (a64.abs() @ b64.abs().t()) + torch.finfo(out_dtype).eps * (a64 @ b64.t()).abs()
    assert ((y.double() - a64 @ b64.t()).abs() <= allowed).all()
