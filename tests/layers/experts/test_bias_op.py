"""Biases of experts against sums of each expert's rows, by PyTorch and by the kernels."""

from __future__ import annotations

import pytest
import torch

from megafp8.layers.experts import bias_op
from tests.kernels import DEVICE, noise

ENDS = [0, 5, 5, 90, 91]  # the first and third of five experts have no rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_each_row_gets_its_experts_bias(dtype: torch.dtype) -> None:
    """And the gradient of a bias is the sum over its expert's rows. The content of other rows is arbitrary."""
    x, biases, dy = noise(93, 24, dtype=dtype), noise(5, 24, dtype=dtype, seed=1), noise(93, 24, dtype=dtype, seed=2)
    dy[ENDS[-1] :] = torch.nan
    bias, weight = biases.flatten().requires_grad_(), torch.ones((), dtype=dtype, device=DEVICE).requires_grad_()
    y = bias_op.with_biases(x * weight, bias, torch.tensor(ENDS, dtype=torch.int32, device=DEVICE))
    y.backward(dy)
    wide = torch.promote_types(dtype, torch.float32)
    for expert, (start, end) in enumerate(zip([0, *ENDS], ENDS)):
        expected = (x[start:end].to(wide) + biases[expert].to(wide)).to(dtype)
        assert torch.equal(y[start:end], expected)
        sums = dy[start:end].double().sum(dim=0)
        assert bias.grad is not None
        found = bias.grad.view(5, 24)[expert].double()
        torch.testing.assert_close(found, sums, rtol=torch.finfo(dtype).eps, atol=1e-5 * (dtype != torch.float64))
    assert torch.equal(bias_op.with_biases(y, None, y), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "ends"), [(93, 24, ENDS), (200, 300, [200]), (0, 8, [0, 0]), (130, 1, [64, 130])])
def test_kernels(m: int, n: int, ends: list[int], dtype: torch.dtype) -> None:
    from megafp8.layers.experts import bias_kernel  # once Triton knows where its kernels run

    y, bias, dy = noise(m, n, dtype=dtype), noise(len(ends), n, dtype=dtype, seed=1), noise(m, n, dtype=dtype, seed=2)
    dy[ends[-1] :] = torch.nan
    expected, ends_e = y.clone(), torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    bias_op.add_biases(expected, bias, ends_e)
    bias_kernel.add_biases(y, bias, ends_e)
    assert torch.equal(y, expected)
    sums = bias_kernel.sum_by_expert(dy, ends_e)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, bias_op.sum_by_expert(dy, ends_e), rtol=1e-5, atol=1e-5)
