"""Weighted sums of rows and their gradients by the kernels and by the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megafp8.layers.experts import permute_op as reference
from tests.kernels import DEVICE, noise
from tests.marks import slow_but

kernels = pytest.importorskip("megafp8.layers.experts.permute_kernel")


def check(n: int, k: int, h: int, dtype: torch.dtype) -> None:
    """The same bits, but for the weights' gradients: those are sums over h, here against float64."""
    rows_mh, dy_nh = noise(n * k, h, dtype=dtype), noise(n, h, dtype=dtype, seed=1)
    rows_mh[::3] *= 1000  # so that the order of additions matters
    weights_nk = noise(n, k, seed=2)
    inverse_nk = torch.randperm(n * k, generator=torch.Generator().manual_seed(3)).view(n, k).to(DEVICE)
    own = n * k // 2  # rows of a rank that has some experts
    num_rows = torch.tensor([own], dtype=torch.int32, device=DEVICE)
    for weights, counted in itertools.product((None, weights_nk), (None, num_rows)):
        rows = rows_mh if counted is None else torch.cat([rows_mh[:own], torch.full_like(rows_mh[:1], torch.nan)])
        found_nh = kernels.sum_choices(rows, inverse_nk, weights, counted)
        expected_nh = reference.sum_choices(rows, inverse_nk, weights, counted)
        torch.testing.assert_close(found_nh, expected_nh, rtol=0, atol=0)
        assert not found_nh.isnan().any()
    of_own = kernels.combine_backward(dy_nh, rows_mh, weights_nk, inverse_nk, num_rows)
    drows_mh, dweights_nk = kernels.combine_backward(dy_nh, rows_mh, weights_nk, inverse_nk)
    expected_mh, _ = reference.combine_backward(dy_nh, rows_mh, weights_nk, inverse_nk)
    torch.testing.assert_close(drows_mh, expected_mh, rtol=0, atol=0)
    assert torch.equal(of_own[0][:own], drows_mh[:own])
    assert torch.equal(of_own[1], dweights_nk.where(inverse_nk < own, 0))
    alone = kernels.combine_backward(dy_nh, rows_mh, weights_nk, inverse_nk, needs_rows=False)
    assert alone[0] is None
    assert torch.equal(alone[1], dweights_nk)
    products_nkh = rows_mh.double()[inverse_nk] * dy_nh.double().unsqueeze(1)
    error_nk = (dweights_nk.double() - products_nkh.sum(dim=-1)).abs()
    assert dweights_nk.dtype == torch.float32
    assert torch.all(error_nk <= 4 * torch.finfo(torch.float32).eps * products_nkh.abs().sum(dim=-1))


SIZES = [(5, 1, 8), (4, 2, 96), (2, 8, 1030), (3, 3, 1), (0, 2, 8)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("n", "k", "h", "dtype"),
    slow_but(
        [(*size, dtype) for size in SIZES for dtype in DTYPES],
        *((*size, torch.bfloat16) for size in SIZES),
        (*SIZES[1], torch.float16),
        (*SIZES[3], torch.float32),
    ),
    ids=str,
)
def test_against_the_reference(n: int, k: int, h: int, dtype: torch.dtype) -> None:
    check(n, k, h, dtype)


@pytest.mark.parametrize("sum_choices", [reference.sum_choices, kernels.sum_choices], ids=["reference", "kernel"])
@pytest.mark.parametrize("weighted", [False, True])
def test_in_the_order_of_choices_and_rounded_once(sum_choices: Callable[..., Tensor], weighted: bool) -> None:
    """256 + 1 + 1, of which each bf16 sum alone would be 256; 2^24 + 1 - 2^24, which is 0 in this order in fp32."""
    rows_mh = torch.tensor([[1.0, 1.0], [1.0, -(2.0**24)], [256.0, 2.0**24]], dtype=torch.bfloat16, device=DEVICE)
    inverse_nk = torch.tensor([[2, 0, 1]], device=DEVICE)
    weights_nk = torch.ones(1, 3, device=DEVICE) if weighted else None
    assert sum_choices(rows_mh, inverse_nk, weights_nk).tolist() == [[258.0, 0.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("k", "h"), [(1, 2048), (8, 2048), (16, 8192), (4, 7168), (8, 2050)])
def test_on_a_gpu(k: int, h: int, dtype: torch.dtype) -> None:
    """There and back through autograd: the reference's bits, each time, and without synchronizing."""
    n, experts = 300, 64
    check(n, k, h, dtype)
    x_nh, dy_nh = (noise(n, h, dtype=dtype, seed=i) for i in range(2))
    experts_nk = noise(n, experts, seed=2).topk(k, dim=1).indices
    weights_nk = noise(n, k, seed=3)

    def found() -> tuple[Tensor, ...]:
        permutation, _ = reference.by_expert(experts_nk, experts)
        x, weights = x_nh.clone().requires_grad_(), weights_nk.clone().requires_grad_()
        y_nh = reference.combine(reference.permute(x, permutation), weights, permutation)
        return y_nh.detach(), *torch.autograd.grad(y_nh, (x, weights), dy_nh)

    first = found()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = found()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    permutation, _ = reference.by_expert(experts_nk, experts)
    rows_mh, inverse_nk = x_nh[permutation.tokens], permutation.inverse_nk
    drows_mh, _ = reference.combine_backward(dy_nh, rows_mh, weights_nk, inverse_nk)
    assert torch.equal(first[0], reference.sum_choices(rows_mh, inverse_nk, weights_nk))
    assert torch.equal(first[1], reference.sum_choices(drows_mh, inverse_nk))
