"""Batch-invariant products: against float64, and the same bits for any number and order of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.kernels.invariant_gemm import product
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor
from tests.kernels import DEVICE, noise

ROWS = (1, 3, 16, 64, 65, 130)
CASES = {
    # kind, outputs, summands
    "values": ("values", 70, 96),
    "parts": ("values", 64, 2048),
    "uneven parts": ("values", 40, 1100),
    "tensor": ("tensor", 144, 1040),
    "tensor, split sums": ("split", 144, 1040),
    "row": ("row", 144, 1040),
    "row by tensor": ("row by tensor", 96, 256),
    "blocks": ("blocks", 144, 1040),
    "blocks of rows": ("rows", 144, 1040),
}


def matrix(r: int, c: int, granularity: Granularity | None, seed: int) -> Tensor | ScaledTensor:
    """Noise in bf16 or FP8 with random scales; in the interpreter integers, as NumPy's sums have an order of theirs."""
    x = noise(r, c, seed=seed) * torch.linspace(1, 3, r, device=DEVICE).unsqueeze(1)
    x = x.round() if DEVICE == "cpu" else x
    if granularity is None:
        return x if DEVICE == "cpu" else x.bfloat16()
    scale_inv = noise(*granularity.grid(r, c), seed=seed + 1).abs() + 0.1
    scale_inv = scale_inv.t().contiguous().t() if granularity is BLOCK_1X128 else scale_inv
    return ScaledTensor(x.clamp(-16, 16).to(torch.float8_e4m3fn), scale_inv, granularity)


def operands(kind: str, n: int, k: int) -> tuple[Tensor | ScaledTensor, Tensor | ScaledTensor]:
    pairs: dict[str, tuple[Granularity | None, Granularity | None]] = {
        "values": (None, None), "tensor": (TENSOR, TENSOR), "split": (TENSOR, TENSOR), "row": (ROW, ROW),
        "row by tensor": (ROW, TENSOR), "blocks": (BLOCK_1X128, BLOCK_128X128), "rows": (BLOCK_1X128, BLOCK_1X128),
    }  # fmt: skip
    of_x, of_w = pairs[kind]
    return matrix(max(ROWS), k, of_x, 0), matrix(n, k, of_w, 5)


def rows_of(x: Tensor | ScaledTensor, rows: Tensor) -> Tensor | ScaledTensor:
    if isinstance(x, Tensor):
        return x[rows]
    data = x.data.view(torch.uint8)[rows].view(x.data.dtype)
    scale_inv = x.scale_inv if x.granularity is TENSOR else x.scale_inv[rows]
    return x._replace(data=data, scale_inv=scale_inv)


def values(x: Tensor | ScaledTensor) -> Tensor:
    return x.double() if isinstance(x, Tensor) else x.dequantize(torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_products(name: str) -> None:
    kind, n, k = CASES[name]
    x, w = operands(kind, n, k)
    expected = values(x) @ values(w).t()
    whole = product(x, w, torch.float32, fast=kind != "split")
    tolerance = 2e-6 if DEVICE == "cpu" or kind == "values" else 2e-4  # FP8 sums have 14 bits on Hopper
    bound = values(x).abs() @ values(w).abs().t()
    assert ((whole.double() - expected).abs() <= tolerance * bound).all()
    for m in ROWS:
        rows = torch.randperm(max(ROWS), generator=torch.Generator().manual_seed(m))[:m].to(whole.device)
        out = torch.empty(m, n, device=whole.device)
        assert product(rows_of(x, rows), w, torch.float32, fast=kind != "split", out=out) is out
        assert torch.equal(out, whole[rows])
