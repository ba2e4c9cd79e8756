"""The largest values of rows against a stable sort."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import DEVICE


@pytest.mark.parametrize(
    ("n", "e", "count"), [(0, 8, 2), (1, 1, 1), (70, 8, 4), (33, 128, 8), (5, 257, 6), (3, 1000, 22)]
)
def test_as_a_stable_sort_does(n: int, e: int, count: int) -> None:
    """With ties, zeros of both signs, infinities and NaN."""
    from megafp8.layers.experts.largest_kernel import largest  # once Triton knows where its kernels run

    generator = torch.Generator().manual_seed(n * e)
    values = torch.tensor([-math.inf, -1e30, -1.5, -0.0, 0.0, 1e-45, 0.25, 3.0, math.inf, math.nan])
    x = values[torch.randint(len(values), (n, e), generator=generator)]
    x[n // 2 :] = torch.rand(n - n // 2, e, generator=generator)
    expected = x.sort(dim=1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(largest(x.to(DEVICE), count).cpu(), expected)
