"""Batch-invariant products: against float64, and the same bits for any number and order of rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megafp8.kernels.grouped_gemm import rows_times_matrices, values_times_matrices
from megafp8.kernels.invariant_gemm import product
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor
from tests.kernels import DEVICE, noise

ROWS = (1, 16, 64, 65, 130)
CASES = {
    # kind, outputs, summands
    "values": ("values", 70, 96),
    "parts": ("values", 64, 2048),
    "uneven parts": ("values", 40, 1100),
    "tensor": ("tensor", 144, 1040),
    "tensor, split sums": ("split", 144, 1040 if DEVICE == "cuda" else 260),  # the interpreter splits no sums
    "row": ("row", 70, 1040),
    "row by tensor": ("row by tensor", 96, 256),
    "blocks": ("blocks", 144, 1040),
    "blocks of rows": ("rows", 70, 1040),
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


@pytest.mark.parametrize("granularity", [None, ROW])
def test_experts(granularity: Granularity | None) -> None:
    """Rows in high precision, and rows with a scale each by matrices with one, do not depend on other rows."""
    n, k, ends = 48, 256, [70, 70, 200]
    x = matrix(ends[-1], k, granularity, 0)
    w = matrix(3 * n, k, granularity and TENSOR, 5)
    if isinstance(w, ScaledTensor):
        w = w._replace(scale_inv=noise(3).abs() + 0.1)
        w_values = w.data.double() * w.scale_inv.double().repeat_interleave(n).unsqueeze(1)
    else:
        w_values = w.double()

    def multiply(x: Tensor | ScaledTensor, ends: list[int]) -> Tensor:
        ends_e = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        if isinstance(x, ScaledTensor):
            assert isinstance(w, ScaledTensor)
            return rows_times_matrices(x, w, ends_e, n, torch.float32, columnwise=False, fast=True)
        assert isinstance(w, Tensor)
        return values_times_matrices(x, w, ends_e, n)

    whole = multiply(x, ends)
    matrices = w_values.view(3, n, k)
    expected = torch.cat([values(x)[:70] @ matrices[0].t(), values(x)[70:] @ matrices[2].t()])
    tolerance = 1e-5 if DEVICE == "cpu" else 2**-8
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    rows = torch.tensor([69, 3, 199, 100, 70], device=DEVICE)
    assert torch.equal(multiply(rows_of(x, rows), [2, 2, 5]), whole[rows])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_for_hopper() -> None:
    """All tiles with one kind of instruction, without contractions, in its shared memory."""
    command = [sys.executable, "-m", "tests.kernels.compile_invariant"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        name, instructions, fused, shared = line.split("; ")
        assert int(shared) <= 227 * 1024, line
        if "fp32" not in name:
            assert "'wgmma" in instructions, line
            assert "'mma" not in instructions, line
            assert int(fused) == 0, line
