"""Kernels of sinks against PyTorch's operations; test_op.py compares these with one more key."""

from __future__ import annotations

import pytest
import torch

from megafp8.layers.attention import sink_op
from tests.kernels import DEVICE, noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("s", "b", "a", "d"), [(90, 2, 3, 64), (64, 1, 2, 24), (0, 1, 2, 8)])
def test_kernels(s: int, b: int, a: int, d: int, dtype: torch.dtype) -> None:
    """Outputs have the samples first in memory, gradients are a slice, and log-sum-exps have the queries last."""
    from megafp8.layers.attention import sink_kernel  # once Triton knows where its kernels run

    o = noise(b, s, a * d, dtype=dtype).unflatten(2, (a, d)).transpose(0, 1)
    do = noise(s, b, a * 2 * d, dtype=dtype, seed=1).unflatten(2, (a, 2 * d))[..., d:]
    lse = 3 * noise(b, a * s, seed=2).unflatten(1, (a, s)).permute(2, 0, 1)
    sink = torch.tensor([-3.0, 40.0, 0.5], device=DEVICE)[:a]
    expected, lse = o.clone(), torch.logaddexp(lse, sink)
    sink_op.multiply_by_share(expected, lse, sink)
    sink_kernel.multiply_by_share(o, lse, sink)
    torch.testing.assert_close(o, expected, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-7)
    found = sink_kernel.sum_gradients(do, o, lse, sink)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, sink_op.sum_gradients(do, o, lse, sink), rtol=1e-5, atol=1e-5)
