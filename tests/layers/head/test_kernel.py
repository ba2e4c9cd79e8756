"""The two cross-entropy kernels on one shard of a vocabulary, against float64 and, backward, torch's fp32.

Sums are held to a worst case in units of fp32's rounding, u = 2^-24, relative to the sum:
    an exponential of d             4u (the GPU's exp2) and 2u·|d| (the product with log2 e, that constant); weighted
                                    with the softmax the mean of |d| is its entropy less log Σ, so at most log v
    a lane over v / BLOCK steps     an addition each, and perhaps a scaling by an exponential: u + 4u + u
    the lanes                       one scaling more, log2(BLOCK) additions
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megafp8.layers.head import kernel as kernels
from tests.kernels import DEVICE
from tests.marks import slow_but

U = 2.0**-24
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FIRST = 1000  # column of the vocabulary at which the shard begins


def error_of_sum(v: int) -> float:
    """The most that a sum of v exponentials may be off, relative to itself."""
    return U * (6 * math.ceil(v / kernels.BLOCK) + 4 * math.log(max(v, 1)) + math.log2(kernels.BLOCK) + 16)


def logits_shard(n: int, v: int, dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    return (torch.randn(n, v, generator=torch.Generator().manual_seed(v)) * spread).to(dtype).to(DEVICE)


def check_sums(x_nv: Tensor, valid: int) -> None:
    labels_n = torch.full((len(x_nv),), FIRST, device=DEVICE)
    maximum_n, total_n, _ = kernels.statistics(x_nv, labels_n, first=FIRST, valid=valid)
    x = x_nv[:, :valid].double()
    assert torch.equal(maximum_n.double(), x.amax(dim=1))
    expected = (x - x.amax(dim=1, keepdim=True)).exp().sum(dim=1)
    torch.testing.assert_close(total_n.double(), expected, rtol=error_of_sum(valid), atol=0)


def test_statistics_of_capped_logits() -> None:
    x_nv, labels_n = logits_shard(3, 500, torch.float32, 20.0), torch.tensor([FIRST, FIRST + 30, 0], device=DEVICE)
    maximum_n, total_n, label_logit_n = kernels.statistics(x_nv, labels_n, first=FIRST, valid=490, softcap=30.0)
    x = 30 * (x_nv[:, :490].double() / 30).tanh()
    close = {"rtol": 0, "atol": 30 * 2.0**-22}  # that of tanh
    torch.testing.assert_close(maximum_n.double(), x.amax(dim=1), **close)
    expected = torch.stack([x[0, 0], x[1, 30], torch.zeros_like(x[0, 0])])
    torch.testing.assert_close(label_logit_n.double(), expected, **close)
    torch.testing.assert_close(total_n.double().log() + maximum_n, x.logsumexp(dim=1), rtol=0, atol=1e-5)


WIDTHS = [(1, 1), (33, 33), (64, 7), (9000, 9000), (8192, 4099)]


@pytest.mark.parametrize(
    ("v", "valid", "spread", "dtype"),
    slow_but(
        [(*width, spread, dtype) for width in WIDTHS for spread in (0.0, 2.0, 300.0) for dtype in DTYPES],
        *((*width, spread, torch.bfloat16) for width in WIDTHS for spread in (0.0, 2.0, 300.0)),
        *((*WIDTHS[2], 2.0, dtype) for dtype in DTYPES),
    ),
    ids=str,
)
def test_maximum_and_sum(v: int, valid: int, spread: float, dtype: torch.dtype) -> None:
    check_sums(logits_shard(4, v, dtype, spread), valid)


def test_rising_logits_scale_the_sum_at_every_step() -> None:
    rising = torch.linspace(-4, 4, 5 * kernels.BLOCK, device=DEVICE)
    without = rising.masked_fill(torch.arange(len(rising), device=DEVICE) % 3 == 0, -torch.inf)
    check_sums(torch.stack([rising, rising.flip(0), rising * 20, without]), len(rising))


def test_labels_of_other_ranks_and_padding() -> None:
    x_nv = logits_shard(6, 64, torch.bfloat16)
    labels_n = torch.tensor([FIRST, FIRST + 49, FIRST + 50, FIRST - 1, 0, 10**12], device=DEVICE)
    _, _, label_logit_n = kernels.statistics(x_nv, labels_n, first=FIRST, valid=50)
    assert label_logit_n.tolist() == [x_nv[0, 0].item(), x_nv[1, 49].item(), 0, 0, 0, 0]


def test_a_shard_of_padding_alone() -> None:
    labels_n = torch.full((2,), FIRST, device=DEVICE)
    maximum_n, total_n, label_logit_n = kernels.statistics(
        logits_shard(2, 64, torch.float32), labels_n, first=FIRST, valid=0
    )
    assert total_n.tolist() == label_logit_n.tolist() == [0, 0]
    assert maximum_n.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of inf - inf
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_stays(bad: float) -> None:
    x_nv = logits_shard(4, 2 * kernels.BLOCK, torch.float32)
    for i, column in enumerate([0, 77, kernels.BLOCK + 5]):
        x_nv[i, column] = bad
    labels_n = torch.full((4,), FIRST, device=DEVICE)
    _, total_n, _ = kernels.statistics(x_nv, labels_n, first=FIRST, valid=2 * kernels.BLOCK)
    assert total_n.isfinite().tolist() == [False, False, False, True]


def ordered(x: Tensor) -> Tensor:
    """16 bits as integers in the order of the values: neighbours differ by 1."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("v", "valid", "softcap"),
    [(1, 1, None), (64, 7, 3.0), (5000, 4500, None), (5000, 4500, 30.0), (8192, 8192, None), (64, 0, 3.0)],
)
def test_gradient_in_place(v: int, valid: int, softcap: float | None, dtype: torch.dtype) -> None:
    x_nv = logits_shard(5, v, dtype)
    labels_n = torch.tensor([FIRST, FIRST + valid - 1, FIRST + valid // 2, 0, 10**12], device=DEVICE)
    if not valid:
        labels_n[:3] = 0
    maximum_n = torch.tensor([6.0, 7.0, 8.0, 9.0, 10.0], device=DEVICE)  # over all ranks: larger than here
    weight_n = torch.tensor([1e-3, 1.5e-4, 2.0, 1e-5, 0.1], device=DEVICE)
    dloss_n = torch.tensor([1.0, 1 / 3, -2e-4, 0.5, 0.0], device=DEVICE)
    capped = x_nv.float() if softcap is None else softcap * (x_nv.float() / softcap).tanh()
    expected = (capped - maximum_n[:, None]).exp() * (weight_n * dloss_n)[:, None]
    expected[:, valid:] = 0.0
    for i, label in enumerate(labels_n.tolist()):
        if 0 <= label - FIRST < v:
            expected[i, label - FIRST] -= dloss_n[i]
    if softcap is not None:
        expected *= 1 - (x_nv.float() / softcap).tanh().square()
    kernels.gradient_(x_nv, labels_n, maximum_n, weight_n, dloss_n, first=FIRST, valid=valid, softcap=softcap)
    assert x_nv[:, valid:].count_nonzero() == 0
    assert x_nv[4].count_nonzero() == 0
    if dtype.itemsize == 2:  # exponentials may round differently in fp32, so the result to a neighbour
        apart = (ordered(x_nv) - ordered(expected.to(dtype))).abs()
        assert apart.max() <= 1
        assert (apart > 0).sum() <= 0.01 * apart.numel()
    else:
        torch.testing.assert_close(x_nv, expected, rtol=U * (2 * 20 + 12), atol=U)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_no_tokens_and_no_columns(shape: tuple[int, int]) -> None:
    x_nv = torch.zeros(shape, device=DEVICE)
    per_token = torch.zeros(shape[0], device=DEVICE)
    labels_n = torch.zeros(shape[0], dtype=torch.int64, device=DEVICE)
    _, total_n, _ = kernels.statistics(x_nv, labels_n, first=0, valid=0)
    assert total_n.tolist() == [0] * shape[0]
    kernels.gradient_(x_nv, labels_n, per_token, per_token, per_token, first=0, valid=0)
