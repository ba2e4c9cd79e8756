"""The dropout kernel against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megafp8.layers.dropout import reference
from megafp8.layers.dropout.reference import Dropout, DropoutStream, TokenPlaces
from tests.kernels import DEVICE, noise

kernels = pytest.importorskip("megafp8.layers.dropout.kernel")


def some_dropout(shape: tuple[int, int]) -> Dropout:
    """Of `[n, c]`, at positions and of samples that need all their bits."""
    n = torch.arange(shape[0], device=DEVICE)
    dropout = DropoutStream.from_seed(0.3, 1234, "layers.0.mlp").at(TokenPlaces(2**32 - 1 - 97 * n, n * 10**12 + 3))
    assert dropout is not None
    return dropout


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("shape", [(5, 64), (7, 102), (3, 1), (0, 16)], ids=str)
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, dropout = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1), some_dropout(shape)
    for other in (None, residual):
        assert torch.equal(kernels.add(other, x, dropout), reference.add(other, x, dropout))
