"""Rows added to a sum by the kernels and by the reference: the same bits as a loop in the documented order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megafp8.layers.embedding import op as reference
from tests.kernels import DEVICE  # before the kernels: it chooses the interpreter where there is no GPU
from tests.marks import slow_but

kernels = pytest.importorskip("megafp8.layers.embedding.kernel")

AddRows = Callable[..., None]
BOTH = pytest.mark.parametrize("add_rows_", [reference.add_rows_, kernels.add_rows_], ids=["reference", "kernels"])
V, CHUNK = 12, 8


def in_order(sum_vh: Tensor, dy_nh: Tensor, rows_n: Tensor, chunk: int) -> Tensor:
    result_vh = sum_vh.clone()
    for row in range(len(sum_vh)):
        gradients = [dy.to(sum_vh.dtype) for dy, its_row in zip(dy_nh, rows_n.tolist()) if its_row == row]
        for first in range(0, len(gradients), chunk):
            total = torch.zeros_like(sum_vh[0])
            for dy in gradients[first : first + chunk]:
                total = total + dy
            result_vh[row] = result_vh[row] + total
    return result_vh


def tensors(n: int, h: int, dtype: torch.dtype = torch.float32, v: int = V) -> tuple[Tensor, Tensor]:
    """A sum and gradients of many sizes, whose order matters therefore, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(n + h)
    size = torch.float64 if dtype == torch.float64 else torch.float32
    sum_vh, dy_nh = (torch.randn(k, h, generator=generator, dtype=torch.float64) for k in (v, n))
    dy_nh = dy_nh * 10.0 ** torch.randint(-3, 3, (n, 1), generator=generator)
    dy_nh[::3, 0] = -0.0
    sum_vh[::2, 0] = -0.0
    return sum_vh.to(size), dy_nh.to(dtype)


def check(add_rows_: AddRows, rows_n: Tensor, h: int, dtype: torch.dtype = torch.float32, chunk: int = CHUNK) -> None:
    sum_vh, dy_nh = tensors(len(rows_n), h, dtype)
    expected_vh = in_order(sum_vh, dy_nh, rows_n, chunk)
    device = "cpu" if add_rows_ is reference.add_rows_ else DEVICE
    found_vh = sum_vh.to(device, copy=True)
    add_rows_(found_vh, dy_nh.to(device), rows_n.to(device), chunk=chunk)
    bits = torch.int64 if sum_vh.dtype == torch.float64 else torch.int32
    assert torch.equal(found_vh.cpu().view(bits), expected_vh.view(bits))


@BOTH
@pytest.mark.parametrize(
    "dtype", slow_but([torch.bfloat16, torch.float32, torch.float64], torch.bfloat16, torch.float64), ids=str
)
@pytest.mark.parametrize(("n", "h"), [(1, 4), (70, 24), (40, 1100)])
def test_rows_of_this_rank_and_of_others(add_rows_: AddRows, n: int, h: int, dtype: torch.dtype) -> None:
    check(add_rows_, torch.randint(-V, 2 * V, (n,), generator=torch.Generator().manual_seed(n)), h, dtype)


@BOTH
@pytest.mark.parametrize("runs", [[8], [9], [7, 10, 9], [17, 9, 33], [1, 16, 24, 17], [3, 65], [100]], ids=str)
def test_runs_of_any_length(add_rows_: AddRows, runs: list[int]) -> None:
    """Next to each other, so that the last chunk of one and the first of another share a window of positions."""
    rows_n = torch.cat([torch.full((length,), row) for row, length in enumerate(runs)])
    check(add_rows_, rows_n[torch.randperm(len(rows_n), generator=torch.Generator().manual_seed(1))], 16)


@BOTH
@pytest.mark.parametrize("row", slow_but([-1, 0, V - 1, V], 0, V))
@pytest.mark.parametrize("tokens", [150, 0])
def test_all_tokens_equal(add_rows_: AddRows, row: int, tokens: int) -> None:
    check(add_rows_, torch.full((tokens,), row), 16)


@BOTH
def test_the_chunk_of_training(add_rows_: AddRows) -> None:
    rows_n = torch.tensor([3] * 130 + [7] * 65 + [5]).roll(50)
    check(add_rows_, rows_n, 16, torch.bfloat16, chunk=reference.CHUNK)


@pytest.mark.gpu
@pytest.mark.parametrize("distinct", [1, 40, 100_000])
def test_a_micro_batch_on_a_gpu(distinct: int) -> None:
    """The reference's bits, each time, without synchronizing, and where torch requires determinism."""
    v, n, h = 2048, 8192, 4096
    rows_n = (torch.rand(n, generator=torch.Generator().manual_seed(2)) ** 3 * distinct).long()
    sum_vh, dy_nh = tensors(n, h, torch.bfloat16, v)
    on_device = [sum_vh.to(DEVICE) for _ in range(3)]
    dy, rows = dy_nh.to(DEVICE), rows_n.to(DEVICE)
    kernels.add_rows_(on_device[0], dy, rows, chunk=reference.CHUNK)
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)
    try:
        for found_vh in on_device[1:]:
            kernels.add_rows_(found_vh, dy, rows, chunk=reference.CHUNK)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
    reference.add_rows_(sum_vh, dy_nh, rows_n, chunk=reference.CHUNK)
    for found_vh in on_device:
        assert torch.equal(found_vh.cpu(), sum_vh)
