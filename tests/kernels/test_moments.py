"""Moments encoded by the kernel, bit for bit as by its plain twin."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import DEVICE  # first: it chooses the interpreter

from megafp8.kernels.moments import encode_blocks  # isort: skip
from megafp8.fp8.stochastic_rounding import noise_key
from megafp8.optimizer.fp8_moments import FIRST, LOWEST, SECOND, MomentFormat, encode


def by_kernel(x_n: torch.Tensor, fmt: MomentFormat, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((len(x_n),), 77, dtype=torch.uint8, device=DEVICE)
    exponents = torch.full((-(-len(x_n) // 128),), 77, dtype=torch.int8, device=DEVICE)
    encode_blocks(
        x_n.to(DEVICE), codes, exponents, key, largest=fmt.largest, min_exponent=fmt.min_exponent,
        positive=fmt.positive, nan=fmt.nan, lowest=LOWEST,
    )  # fmt: skip
    return codes.cpu(), exponents.cpu()


@pytest.mark.parametrize("fmt", [FIRST, SECOND], ids=["first", "second"])
@pytest.mark.parametrize("n", [0, 1, 128, 300, 5000])
@pytest.mark.parametrize("step", [0, 1])
def test_equals_its_twin(fmt: MomentFormat, n: int, step: int) -> None:
    generator = torch.Generator().manual_seed(n)
    spread = torch.rand(n, generator=generator) * 14 - 12 + torch.arange(n) // 128 % 30 - 15
    x = torch.randn(n, generator=generator) * 10.0**spread
    x = x.square() if fmt.positive else x
    x[::50] = 0
    x[7::500] = 1e-42
    key = noise_key(11, step, "weight")
    for found, expected in zip(by_kernel(x, fmt, key), encode(x, fmt, key), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("fmt", [FIRST, SECOND], ids=["first", "second"])
def test_edges(fmt: MomentFormat) -> None:
    """Blocks of zeros, of subnormal numbers, with the largest number, and with what is not finite; both signs."""
    x = torch.zeros(6, 128)
    x[1, :9], x[2, 3] = 1e-45, 3.4e38
    x[3, 5], x[4, 5], x[5, 6] = torch.inf, torch.nan, 1.0
    x[3, 6] = 1e-3
    if not fmt.positive:
        x[:, ::2] *= -1
    for found, expected in zip(by_kernel(x.view(-1), fmt, (2**32 - 1, 0)), encode(x.view(-1), fmt, (2**32 - 1, 0))):
        assert torch.equal(found, expected)
