"""Convolutions before recurrences: the kernels against PyTorch's operations, and those against torch's conv1d."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.short_convolution.op import ChannelGroup, _Convolved, convolve, convolve_parts, last_inputs
from tests.kernels import DEVICE


def test_parts_of_a_sequence_continue_from_the_last_inputs() -> None:
    """As in generation, whatever the parts are."""
    torch.manual_seed(1)
    x, weight = torch.randn(23, 2, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    whole = convolve(x, weight, x.new_zeros(2, 3, 6), None)
    parts, last = [], x.new_zeros(2, 3, 6)
    for part in x.split([1, 1, 2, 19]):
        parts.append(convolve(part, weight, last, None))
        last = last_inputs(part, 3, last, None)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-13, atol=1e-13)
    expected = F.conv1d(x.permute(1, 2, 0), weight[:, None], padding=3, groups=6)[..., :23]
    torch.testing.assert_close(whole, expected.permute(2, 0, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("starts", [[0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]])
def test_last_inputs_are_of_the_last_document(starts: list[int]) -> None:
    """After them a token sees what it would see in the whole sequence."""
    torch.manual_seed(2)
    s = len(starts)
    x, weight = torch.randn(s + 1, 1, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    before, flags = torch.randn(1, 3, 5, dtype=torch.float64), torch.tensor([*starts, 0], dtype=torch.bool)[:, None]
    whole = convolve(x, weight, before, flags)
    alone = convolve(x[s:], weight, last_inputs(x[:s], 3, before, flags[:s]), None)
    torch.testing.assert_close(alone, whole[s:], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("s", "b", "parts", "k", "documents", "bias"),
    [
        pytest.param(
            80, 2, [ChannelGroup(2, 72, norm=True), ChannelGroup(3, 4)], 4, True, False, marks=pytest.mark.slow
        ),
        (150, 1, [ChannelGroup(2, 48)], 3, False, True),
        pytest.param(2, 2, [ChannelGroup(1, 4, norm=True)], 4, True, True, marks=pytest.mark.slow),
        pytest.param(5, 1, [ChannelGroup(1, 72, norm=True)], 8, False, False, marks=pytest.mark.slow),
        (33, 1, [ChannelGroup(1, 6), ChannelGroup(2, 3, norm=True)], 2, True, True),
    ],
)
def test_kernels(s: int, b: int, parts: list[ChannelGroup], k: int, documents: bool, bias: bool) -> None:
    """Values and all gradients, in fp32; the inputs are a slice of a wider tensor."""
    torch.manual_seed(0)
    n = sum(part.heads * part.width for part in parts)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, requires_grad=True)

    wide, weight, last, bias_n = random(s, b, n + 5), random(n, k), random(b, k - 1, n), random(n)
    starts = torch.rand(s, b, device=DEVICE) < 0.2 if documents else None
    inputs = [wide, weight, last, *([bias_n] if bias else [])]
    gradients = [torch.randn(s, b, part.heads, part.width, device=DEVICE) for part in parts]
    results = []
    for exact in (True, False):
        x, w, before, added = (t.double() if exact else t for t in (wide, weight, last, bias_n))
        arguments = (x[..., 2 : 2 + n], w, before, starts, added if bias else None, tuple(parts))
        found = convolve_parts(*arguments[:4], parts, arguments[4]) if exact else _Convolved.apply(*arguments)
        of_inputs = torch.autograd.grad(found, inputs, [y.to(x.dtype) for y in gradients])
        results.append([*found, *of_inputs])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)
