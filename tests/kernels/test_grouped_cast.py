"""Casts and products of many experts in one launch, against one expert after the other."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8 import groups as reference
from megafp8.fp8.formats import E4M3, E5M2
from megafp8.fp8.groups import PLACES, RowGroups
from megafp8.fp8.sources import Plain, Source, SwiGLU, SwiGLUGrad
from megafp8.kernels import grouped_cast as kernels

SIZES = [[3, 0, 130, 16], [0, 0, 9], [257]]


def _source(kind: str, rows: int) -> Source:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 72, generator=generator) * 3
    if kind == "plain":
        return Plain(x)
    if kind == "swiglu":
        return SwiGLU(x)
    return SwiGLUGrad(x, torch.randn(rows, 36, generator=generator))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "swiglu", "swiglu_grad"])
def test_casts_and_amaxes(kind: str, sizes: list[int]) -> None:
    experts = len(sizes)
    source, groups = (
        _source(kind, sum(sizes)),
        RowGroups.of(torch.tensor(sizes).cumsum(0, dtype=torch.int32), sum(sizes)),
    )
    assert groups.places_e[-1] <= groups.capacity
    amax_e = reference.amax_of_groups(source, groups)
    assert torch.equal(kernels.amax_of_groups(source, groups), amax_e)
    scale_e = (torch.rand(experts, 3) * 40 + 1)[:, 1]  # of any stride, as delayed scaling's
    for fmt, recorded in ((E4M3, True), (E5M2, False)):
        found = []
        for module in (reference, kernels):
            newest_e = torch.zeros(experts, 2)[:, 0] + 0.5 if recorded else None
            data, transposed = module.cast_groups(
                source, scale_e, fmt, groups, rowwise=True, columnwise=True, newest_amax_e=newest_e
            )
            assert data is not None
            assert transposed is not None
            used = transposed.view(torch.uint8)[:, : int(groups.places_e[-1])]
            found.append((data.view(torch.uint8), used, newest_e))
        for expected, actual in zip(*found, strict=True):
            assert (expected is None) == (actual is None)
            if expected is not None and actual is not None:
                assert torch.equal(actual, expected)


def test_places_of_weights() -> None:
    groups = RowGroups.equal(3, 130, torch.device("cpu"))
    assert groups.ends_e.tolist() == [130, 260, 390]
    assert groups.places_e.tolist() == [2 * PLACES, 4 * PLACES, 6 * PLACES]
    assert groups.capacity == 6 * PLACES
