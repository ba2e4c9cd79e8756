"""Linear layers of many experts, against one multiplication for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.data_parallel.grad_buffer import GradBuffer, main_grad_of
from megafp8.distributed.sharding import Init, ParamSpec, set_spec, unsharded
from megafp8.ops.deferred_wgrad import WgradStore, run
from megafp8.ops.grouped_linear import grouped_linear

SIZES = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [4]]
K, N = 6, 8


def _problem(sizes: list[int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = nn.Parameter(random(len(sizes) * N, K))
    set_spec(weight, ParamSpec(unsharded("w", tuple(weight.shape)), Init("zeros"), replicated_over_tp=False))
    ends = torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
    return random(sum(sizes), K).requires_grad_(), weight, ends, random(sum(sizes), N)


def _expected(x: Tensor, weight: Tensor, sizes: list[int], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw in float64."""
    x, w, dy = x.detach().double(), weight.detach().double().view(len(sizes), N, K), dy.double()
    y, dx, dw = torch.zeros(len(x), N).double(), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        for i in range(start, start + size):
            y[i], dx[i] = w[e] @ x[i], dy[i] @ w[e]
            dw[e] += torch.outer(dy[i], x[i])
        start += size
    return y, dx, dw.view(-1, K)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sink", ["none", "now", "later"])
def test_output_and_gradients(sizes: list[int], dtype: torch.dtype, rtol: float, sink: str) -> None:
    x, weight, ends, dy = _problem(sizes, dtype)
    store = WgradStore()
    if sink != "none":
        options: Any = {"data_parallel_group": None, "bucket_elements": 1000, "device": torch.device("cpu")}
        buffer = GradBuffer([weight], **options, wgrads=store)
        buffer.zero()
    y = grouped_linear(x, weight, ends)
    if sink == "later":
        with store.collect() as wgrads:
            y.backward(dy)
        assert main_grad_of(weight).count_nonzero() == 0
        run(wgrads)
    else:
        y.backward(dy)
    dw = weight.grad if sink == "none" else main_grad_of(weight)
    assert x.grad is not None
    assert dw is not None
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    for actual, expected in zip((y, x.grad, dw), _expected(x, weight, sizes, dy), strict=True):
        least = 1e-5 if sink != "none" and dtype == torch.float64 else 0.0  # the sum of gradients is fp32
        torch.testing.assert_close(actual.double(), expected, rtol=max(rtol, least), atol=max(rtol, least))
    assert (weight.grad is None) == (sink != "none")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_on_a_gpu_the_host_does_not_wait(sizes: list[int]) -> None:
    x, weight, ends, dy = _problem(sizes, torch.bfloat16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = grouped_linear(x, weight, ends)
        y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None
    assert weight.grad is not None
    expected = _expected(x.cpu(), weight.cpu(), sizes, dy.cpu())
    for actual, of_loop in zip((y, x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(actual.cpu().double(), of_loop, rtol=2e-2, atol=2e-2)
