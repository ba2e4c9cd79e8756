"""The norm kernels against their reference, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megafp8.layers.dropout import reference as dropout_reference
from megafp8.layers.dropout.reference import Dropout
from megafp8.layers.norm import reference
from megafp8.numerics.sources import Normalized, ZeroCenteredNormalized
from tests.kernels import noise
from tests.layers.dropout.test_kernel import some_dropout
from tests.marks import slow_but

kernels = pytest.importorskip("megafp8.layers.norm.kernel")


def check(actual: tuple[torch.Tensor | None, ...], expected: tuple[torch.Tensor | None, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        assert a is None or torch.equal(a, e)


SHAPES = [(5, 64), (7, 100), (1, 1), (9, 257), (3, 4096), (0, 16)]
CASES: list[Any] = [*itertools.product(SHAPES, [torch.float32]), *itertools.product(SHAPES, [torch.float16])]


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *slow_but(CASES, *CASES[2:7]),  # of the first shape in fp16, which the second has in fp32
        *(pytest.param(shape, torch.bfloat16, marks=pytest.mark.gpu) for shape in SHAPES),
    ],
    ids=str,
)
def test_statistics_and_backward(shape: tuple[int, int], dtype: torch.dtype, centered: bool) -> None:
    x, dy, other = (noise(*shape, dtype=dtype, seed=i) for i in range(3))
    weight = noise(shape[1], dtype=dtype)
    cases: list[tuple[torch.Tensor | None, Dropout | None, bool]] = [
        (None, None, True),
        (other, None, False),
        (other, some_dropout(shape), True),
    ]
    for branch, dropout, zero_centered in cases:
        total = x if branch is None else dropout_reference.add(x, branch, dropout) if dropout else x + branch
        statistics = reference.statistics(total, 1e-5, centered=centered)
        check(kernels.statistics(x, branch, 1e-5, centered=centered, dropout=dropout), (total, *statistics))
        bias = noise(shape[1], dtype=dtype, seed=4) if centered else None
        mean_r, rstd_r = statistics
        source = ZeroCenteredNormalized if zero_centered else Normalized
        y = source(total, rstd_r, weight, mean_r, bias).values().to(dtype)
        form = {"zero_centered": zero_centered}
        check(kernels.normalize(x, branch, weight, bias, 1e-5, dropout, **form), (total, *statistics, y))
        arguments = (dy, total, *statistics, weight, branch)
        dx, dbranch, *partials = kernels.backward(*arguments, dropout, **form)
        expected_dx, *expected = reference.backward(*arguments, **form)
        check((dx, *(x if x is None else x.sum(dim=0).float() for x in partials)), (expected_dx, *expected))
        check((dbranch,), (dropout_reference.add(None, dx, dropout) if dropout else dx,))


# Triton's interpreter does not round to bf16 as a GPU does.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (4, 100), (264, 33), (0, 16)], ids=str)
def test_partial_sums_are_added_to_a_gradient(shape: tuple[int, int], dtype: torch.dtype) -> None:
    partials_pc, total_c = noise(*shape).double() + 1e-9, noise(shape[1], seed=5)
    expected_c = total_c + partials_pc.sum(dim=0).float().to(dtype)
    kernels.add_sums_(total_c, partials_pc, total_c.to(dtype))
    assert torch.equal(total_c, expected_c)
