"""Moments encoded by the kernel, bit for bit as by the reference."""

from __future__ import annotations

import pytest
import torch

from megafp8.kernels.moments import encode_blocks
from megafp8.numerics.stochastic_rounding import noise_key
from megafp8.optimizer.fp8_moments import FIRST, LOWEST, SECOND, MomentFormat, encode
from tests.kernels import DEVICE

FORMATS = pytest.mark.parametrize("fmt", [FIRST, SECOND], ids=["first", "second"])


def check(x_n: torch.Tensor, fmt: MomentFormat, key: tuple[int, int]) -> None:
    data = torch.full((len(x_n),), 77, dtype=torch.uint8, device=DEVICE)
    exponents = torch.full((-(-len(x_n) // 128),), 77, dtype=torch.int8, device=DEVICE)
    encode_blocks(
        x_n.to(DEVICE), data, exponents, key, largest=fmt.largest, min_exponent=fmt.min_exponent,
        positive=fmt.positive, nan=fmt.nan, lowest=LOWEST,
    )  # fmt: skip
    for found, expected in zip((data, exponents), encode(x_n, fmt, key), strict=True):
        assert torch.equal(found.cpu(), expected)


@FORMATS
@pytest.mark.parametrize("n", [0, 1, 128, 300, 5000])
@pytest.mark.parametrize("step", [0, 1])
def test_equals_its_reference(fmt: MomentFormat, n: int, step: int) -> None:
    generator = torch.Generator().manual_seed(n)
    spread = torch.rand(n, generator=generator) * 14 - 12 + torch.arange(n) // 128 % 30 - 15
    x = torch.randn(n, generator=generator) * 10.0**spread
    x = x.square() if fmt.positive else x
    x[::50] = 0
    x[7::500] = 1e-42
    check(x, fmt, noise_key(11, step, "weight"))


@FORMATS
def test_edges(fmt: MomentFormat) -> None:
    """Blocks of zeros, of subnormal numbers, with the largest number, and with what is not finite; both signs."""
    x = torch.zeros(6, 128)
    x[1, :9], x[2, 3] = 1e-45, 3.4e38
    x[3, 5], x[4, 5], x[5, 6] = torch.inf, torch.nan, 1.0
    x[3, 6] = 1e-3
    if not fmt.positive:
        x[:, ::2] *= -1
    check(x.view(-1), fmt, (2**32 - 1, 0))
