"""Casts and products of many experts in one launch, against one expert after the other."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from megafp8.kernels import grouped_cast as kernels
from megafp8.kernels.transpose import transpose
from megafp8.numerics import groups as reference
from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.groups import ALIGNMENT, RowGroups
from megafp8.numerics.recipes.blockwise import cast_1x128
from megafp8.numerics.recipes.rowwise import cast_rows
from megafp8.numerics.sources import Gathered, MatrixSource, Plain, SwiGLU, SwiGLUGrad
from tests.marks import slow_but

EVERY_SIZES = [[3, 0, 130, 16], [0, 0, 9], [257]]


def _source(kind: str, rows: int) -> MatrixSource:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 72, generator=generator) * 3
    if kind == "plain":
        return Plain(x)
    if kind == "swiglu":
        return SwiGLU(x)
    if kind == "gathered":
        of_tokens = torch.randint(rows, (rows,), generator=generator)
        return Gathered(x, of_tokens, torch.rand(rows, generator=generator))
    return SwiGLUGrad(x, torch.randn(rows, 36, generator=generator))


@pytest.mark.parametrize("sizes", slow_but([*EVERY_SIZES, [3, 0, 20, 16]], [3, 0, 20, 16], [0, 0, 9]), ids=str)
@pytest.mark.parametrize("kind", slow_but(["plain", "gathered", "swiglu", "swiglu_grad"], "gathered", "swiglu"))
def test_casts_and_amaxes(kind: str, sizes: list[int]) -> None:
    experts = len(sizes)
    source, groups = (
        _source(kind, sum(sizes)),
        RowGroups.from_ends(torch.tensor(sizes).cumsum(0, dtype=torch.int32), sum(sizes)),
    )
    assert groups.padded_ends_e[-1] <= groups.capacity
    amax_e = reference.amax_of_groups(source, groups)
    assert torch.equal(kernels.amax_of_groups(source, groups), amax_e)
    scale_e = (torch.rand(experts, 3) * 40 + 1)[:, 1]  # of any stride, as delayed scaling's
    for fmt, recorded in ((E4M3, True), (E5M2, False)):
        found = []
        for module in (reference, kernels):
            newest_e = torch.zeros(experts, 2)[:, 0] + 0.5 if recorded else None
            cast = module.cast_groups(
                source, scale_e, 1 / scale_e, fmt, groups, rowwise=True, columnwise=True, newest_amax_e=newest_e
            )
            used = cast.required_columnwise.data.view(torch.uint8)[:, : int(groups.padded_ends_e[-1])]
            found.append((cast.required_rowwise.data.view(torch.uint8), used, newest_e))
        for expected, actual in zip(*found, strict=True):
            assert (expected is None) == (actual is None)
            if expected is not None and actual is not None:
                assert torch.equal(actual, expected)


@pytest.mark.parametrize("n", [128, 40])
def test_stored_data_is_laid_out_as_casts_are(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, scale_e = 3, torch.rand(3) * 40 + 1
    w, groups = torch.randn(experts * n, 16), RowGroups.equal(experts, n, torch.device("cpu"))
    both: dict[str, Any] = {"rowwise": True, "columnwise": True}
    cast = kernels.cast_groups(Plain(w), scale_e, 1 / scale_e, E4M3, groups, **both, newest_amax_e=None)
    monkeypatch.setattr(reference, "transposed", transpose)  # as on CUDA
    stored = reference.stored_groups(cast.required_rowwise, experts, **both)
    assert stored.rowwise is cast.rowwise
    assert torch.equal(stored.required_columnwise.scale_inv, cast.required_columnwise.scale_inv)
    found, expected = (x.required_columnwise.data.view(torch.uint8) for x in (stored, cast))
    assert torch.equal(found, expected)


CASTS = [(E4M3, True), (E5M2, False)]
CASES = pytest.mark.parametrize(
    ("sizes", "fmt", "power_of_two", "module"),
    slow_but(
        [(sizes, *cast, by) for sizes in EVERY_SIZES for cast in CASTS for by in (reference, kernels)],
        *((sizes, *cast, reference) for sizes in EVERY_SIZES[:2] for cast in CASTS),
        *((sizes, *cast, kernels) for sizes, cast in zip(EVERY_SIZES[:2], CASTS)),
    ),
    ids=str,
)


@CASES
def test_casts_by_blocks(sizes: list[int], fmt: Format, power_of_two: bool, module: ModuleType) -> None:
    """Data and scales are those of each expert's rows alone."""
    x = torch.randn(sum(sizes), 200, generator=torch.Generator().manual_seed(5)) * 3
    groups = RowGroups.from_ends(torch.tensor(sizes).cumsum(0, dtype=torch.int32), len(x))
    options: dict[str, Any] = {"power_of_two": power_of_two, "eps": 1e-4, "rowwise": True, "columnwise": True}
    rowwise, columnwise = module.cast_groups_1x128(Plain(x), fmt, groups, **options)
    assert rowwise.scale_inv.stride(0) == columnwise.scale_inv.stride(0) == 1
    start = place = 0
    for size, end in zip(sizes, groups.padded_ends_e.tolist(), strict=True):
        expected = cast_1x128(Plain(x[start : start + size]), fmt, **options)
        for whole, alone in (
            ((rowwise.data[start : start + size], rowwise.scale_inv[place : place + size]), expected.required_rowwise),
            (
                (columnwise.data[:, place : place + size], columnwise.scale_inv[:, place // 128 : end // 128]),
                expected.required_columnwise,
            ),
        ):
            assert torch.equal(whole[0].view(torch.uint8), alone.data.view(torch.uint8))
            assert torch.equal(whole[1], alone.scale_inv)
        assert not columnwise.data[:, place + size : end].view(torch.uint8).any()
        start, place = start + size, end


@pytest.mark.parametrize("kind", ["swiglu", "swiglu_grad"])
def test_an_activation_casts_by_blocks(kind: str) -> None:
    """The same bits as of the values; a gated gradient has two parts in a row."""
    x, grad = torch.randn(12, 256, generator=torch.Generator().manual_seed(6)).bfloat16() * 3, torch.ones(12, 128)
    source = SwiGLU(x) if kind == "swiglu" else SwiGLUGrad(x, grad)
    groups = RowGroups.from_ends(torch.tensor([3, 3, 12], dtype=torch.int32), len(x))
    options: dict[str, Any] = {"power_of_two": True, "eps": 1e-4, "rowwise": True, "columnwise": True}
    found, expected = (module.cast_groups_1x128(source, E4M3, groups, **options) for module in (kernels, reference))
    for (data, scale_inv, *_), (expected_data, expected_scale_inv, *_) in zip(found, expected, strict=True):
        used = slice(None) if len(data) == len(x) else slice(int(groups.padded_ends_e[-1]))
        assert torch.equal(data[:, used].view(torch.uint8), expected_data[:, used].view(torch.uint8))
        assert scale_inv.shape == expected_scale_inv.shape
    for start, stop, place in ((0, 3, 0), (3, 12, 128)):
        rows = slice(place, place + stop - start)
        assert torch.equal(found.required_rowwise.scale_inv[rows], expected.required_rowwise.scale_inv[rows])
    assert torch.equal(found.required_columnwise.scale_inv[:, :2], expected.required_columnwise.scale_inv[:, :2])


@CASES
def test_casts_by_rows(sizes: list[int], fmt: Format, power_of_two: bool, module: ModuleType) -> None:
    """Data and scales are those of each expert's rows alone."""
    x = torch.randn(sum(sizes), 72, generator=torch.Generator().manual_seed(5)) * 3
    groups = RowGroups.from_ends(torch.tensor(sizes).cumsum(0, dtype=torch.int32), len(x))
    options: dict[str, Any] = {"power_of_two": power_of_two, "eps": 1e-4, "rowwise": True, "columnwise": True}
    rowwise, columnwise = module.cast_groups_rows(Plain(x), fmt, groups, **options, token_group=None)
    start = place = 0
    for expert, (size, end) in enumerate(zip(sizes, groups.padded_ends_e.tolist(), strict=True)):
        alone = cast_rows(Plain(x[start : start + size]), fmt, **options)
        for data, scale_inv, expected in (
            (rowwise.data[start : start + size], rowwise.scale_inv[start : start + size], alone.required_rowwise),
            (
                columnwise.data[:, place : place + size],
                columnwise.scale_inv.view(-1, 72, 1)[expert],
                alone.required_columnwise,
            ),
        ):
            assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(scale_inv, expected.scale_inv) or not size
        assert columnwise.scale_inv.isfinite().all()
        assert not columnwise.data[:, place + size : end].view(torch.uint8).any()
        start, place = start + size, end


def test_padded_rows_of_weights() -> None:
    groups = RowGroups.equal(3, 130, torch.device("cpu"))
    assert groups.ends_e.tolist() == [130, 260, 390]
    assert groups.padded_ends_e.tolist() == [2 * ALIGNMENT, 4 * ALIGNMENT, 6 * ALIGNMENT]
    assert groups.capacity == 6 * ALIGNMENT
