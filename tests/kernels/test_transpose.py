"""FP8 data transposed by words against torch's transpose of bytes."""

from __future__ import annotations

import pytest
import torch

from megafp8.kernels.transpose import transpose
from megafp8.numerics.tensor import ScaledTensor
from tests.kernels import DEVICE


def data(r: int, c: int) -> torch.Tensor:
    return torch.randint(256, (r, c), dtype=torch.uint8, generator=torch.Generator().manual_seed(r * c)).to(DEVICE)


@pytest.mark.parametrize(("r", "c"), [(4, 4), (128, 128), (132, 124), (8, 520), (516, 12), (0, 8), (8, 0)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_every_byte(r: int, c: int, dtype: torch.dtype) -> None:
    x_rc = data(r, c)
    y_cr = transpose(x_rc.view(dtype))
    assert y_cr.dtype == dtype
    assert torch.equal(y_cr.view(torch.uint8), x_rc.t().contiguous())


@pytest.mark.parametrize(("experts", "n", "c"), [(3, 40, 16), (2, 128, 140), (4, 4, 8)])
def test_rows_of_experts_are_padded_with_zeros(experts: int, n: int, c: int) -> None:
    x_rc = data(experts * n, c)
    expected = torch.zeros(c, experts, 128, dtype=torch.uint8, device=DEVICE)
    expected[:, :, :n] = x_rc.t().unflatten(1, (experts, n))
    assert torch.equal(transpose(x_rc, experts, 128), expected.flatten(1))


def test_rows_that_begin_anywhere() -> None:
    """A part of a larger matrix begins at a multiple of four, no more."""
    part = data(64, 36)[12:52]
    assert torch.equal(transpose(part), part.t().contiguous())


@pytest.mark.parametrize(("r", "c"), [(64, 96), (6, 8), (8, 6)])
def test_scaled_tensor_of_any_shape(r: int, c: int) -> None:
    x = ScaledTensor(data(r, c).view(torch.float8_e4m3fn), torch.tensor(2.0, device=DEVICE))
    assert torch.equal(x.t().data.view(torch.uint8), data(r, c).t().contiguous())
    assert x.t().scale_inv is x.scale_inv
