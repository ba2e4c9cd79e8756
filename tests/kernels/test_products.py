"""Products of matrices and Muon's polynomials of Gram matrices, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.optimizer import muon
from tests.kernels import DEVICE, noise

DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
"""Triton's interpreter does not round to bf16 as a GPU does."""


def _close(found: Tensor, expected: Tensor) -> None:
    assert ((found.double() - expected).norm() / expected.norm()).item() < {4: 1e-6, 2: 3e-3}[found.itemsize]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("side", "k"), [(264, 72), (8, 24)])
@pytest.mark.parametrize("columns", [False, True])
def test_symmetric_products(dtype: torch.dtype, side: int, k: int, columns: bool) -> None:
    """More tiles than one, partial ones, and of the next matrix what a tile reads beyond its own."""
    from megafp8.kernels.products import product  # once Triton knows where its kernels run

    x = noise(2, *((k, side) if columns else (side, k))).to(dtype)
    scale = torch.tensor([0.5, 3.0], device=DEVICE)
    rows = x.double().mT if columns else x.double()
    gram = product(x, x, dtype, a_columns=columns, b_columns=columns, symmetric=True, scale_b=scale)
    _close(gram, rows @ rows.mT * scale[:, None, None])
    assert torch.equal(gram[:, :128, 128:], gram[:, 128:, :128].mT)
    gram /= side
    exact = gram.double()
    found = product(gram, gram, dtype, symmetric=True, alpha=2.0, addend=gram, beta=-3.0, gamma=1.5)
    _close(found, 2 * exact @ exact - 3 * exact + 1.5 * torch.eye(side, device=DEVICE))
    alone = product(gram[1:], gram[1:], dtype, symmetric=True, alpha=2.0, addend=gram[1:], beta=-3.0, gamma=1.5)
    assert torch.equal(alone[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_with_a_symmetric_matrix(dtype: torch.dtype) -> None:
    from megafp8.kernels.products import product

    x, z = noise(2, 136, 264).to(dtype), noise(2, 136, 136).to(dtype)
    z = z + z.mT
    _close(product(z, x, dtype, b_columns=True), z.double() @ x.double())
    tall = x.mT.contiguous()
    _close(product(tall, z, dtype), tall.double() @ z.double())


@pytest.mark.parametrize("shape", [(48, 136), (136, 48), (24, 24)])
def test_gram_newton_schulz(shape: tuple[int, int]) -> None:
    """In the interpreter in fp32; on a GPU in bf16, with errors about those of iterations one by one."""
    x = noise(2, *shape) * torch.exp(noise(2, 1, shape[1], seed=1))
    x[1, :, : shape[1] // 2] *= 1e-3
    if DEVICE == "cuda":
        x = x.bfloat16()
    expected = torch.stack([muon.newton_schulz(matrix.double()) for matrix in x])
    found = muon.gram_newton_schulz(x)
    assert found.dtype == x.dtype

    def error(y: Tensor) -> float:
        return ((y.double() - expected).norm() / expected.norm()).item()

    assert error(found) < (1e-4 if DEVICE == "cpu" else 3 * error(torch.stack([muon.newton_schulz(y) for y in x])))


def test_a_matrix_of_zeros_stays_finite() -> None:
    x = torch.zeros(1, 8, 16, device=DEVICE, dtype=DTYPES[0])
    assert not muon.gram_newton_schulz(x).any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024), (1024, 1024)])
@pytest.mark.parametrize("spectrum", ["random", "exponential", "harmonic", "few large"])
def test_errors_are_about_those_of_iterations_in_bf16(shape: tuple[int, int], spectrum: str) -> None:
    """Also for spectra with many small singular values, which rounding of a Gram matrix could make negative."""
    if DEVICE != "cuda":
        pytest.skip("no CUDA")
    short, i = min(shape), torch.arange(min(shape), device=DEVICE)
    if spectrum == "random":
        x = noise(*shape)
    else:
        u, v = (torch.linalg.qr(noise(side, short))[0] for side in shape)
        singular = {
            "exponential": 10 ** (-4.0 * i / short),
            "harmonic": 1 / (1.0 + i),
            "few large": torch.where(i < 4, 1.0, 0.01),
        }
        x = u * singular[spectrum] @ v.mT
    x = x.bfloat16()
    expected = muon.newton_schulz(x.double())
    found, direct = muon.gram_newton_schulz(x[None])[0], muon.newton_schulz(x)
    assert (found.double() - expected).norm() < 1.25 * (direct.double() - expected).norm()
    assert torch.linalg.svdvals(found.double())[0] < 1.3
