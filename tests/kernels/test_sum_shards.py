"""Partial products summed by the kernel against additions one after the other."""

from __future__ import annotations

import pytest
import torch

from megafp8.parallel.tp_overlap import sum_partials
from tests.kernels import DEVICE


@pytest.mark.parametrize("shape", [(2, 4, 8), (4, 33, 129), (3, 1, 1), (8, 128, 64), (2, 0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_the_order_of_ranks_and_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from megafp8.kernels import sum_shards  # once Triton knows where its kernels run

    partial = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    expected = partial[0].float()
    for x in partial[1:]:
        expected = expected + x.float()
    # Triton's interpreter does not round to bf16 as a GPU does: there torch rounds.
    found = (
        sum_shards.sum_partials(partial.to(DEVICE))
        if DEVICE == "cuda"
        else sum_shards.sum_partials(partial.float()).to(dtype)
    )
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected.to(dtype))
    assert torch.equal(sum_partials(partial), expected.to(dtype))


def test_two_wide_ones_stay_wide() -> None:
    from megafp8.kernels import sum_shards

    shares = torch.tensor([[1.0], [1e-12]], dtype=torch.float64)
    assert sum_partials(shares).item() == sum_shards.sum_partials(shares).item() == 1.0 + 1e-12
