"""Formats of FP8 moments, written out, and what Adam requires of them: no bias and no zeros."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.numerics.moments import BLOCK, FIRST, SECOND, MomentFormat, decode, encode
from tests.marks import slow_but

FORMATS = {"first": FIRST, "second": SECOND}


def random_bits(n: int, seed: int) -> Tensor:
    """Return noise in [0, 1) with 16 bits."""
    return torch.randint(1 << 16, (n,), generator=torch.Generator().manual_seed(seed)) / 2**16


def once(x: Tensor, fmt: MomentFormat, seed: int) -> Tensor:
    """Return x after encoding and decoding."""
    return decode(*encode(x, fmt, random_bits(len(x), seed)), fmt)


def grid(fmt: MomentFormat) -> np.ndarray:
    """All magnitudes of a format with three mantissa bits, in order."""
    exponents, bias = (15, 7) if fmt is FIRST else (31, 15)
    subnormal = [m * 2.0 ** (-2 - bias) for m in range(8)]
    normal = [(8 + m) * 2.0 ** (e - bias - 3) for e in range(1, exponents + 1) for m in range(8)]
    values = np.array(subnormal + normal)
    return values[:-1] if fmt is FIRST else values[:-8]  # NaN is the last byte; infinity and NaNs the last eight


def sample(fmt: MomentFormat, n: int) -> Tensor:
    """Numbers over some twelve orders of magnitude in each block, and blocks of other magnitudes."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=n) * 10.0 ** rng.uniform(-12, 0, size=n) * 10.0 ** (np.arange(n) // BLOCK % 7)
    return torch.from_numpy(x**2 if fmt is SECOND else x).float()


def rounded(x: np.ndarray, fmt: MomentFormat, noise: np.ndarray) -> np.ndarray:
    """Round one block to the grid: up if the noise and the fraction of the step add up to 1 or more."""
    values = grid(fmt)
    scale_inv = 2.0 ** max(-100, math.ceil(math.log2(np.abs(x).max() / values[-1])))
    below = np.searchsorted(values, np.abs(x) / scale_inv, side="right") - 1
    above = np.minimum(below + 1, len(values) - 1)
    step = np.where(above > below, values[above] - values[below], 1.0)
    # In fp32: the sum of the whole steps below, the fraction, and the noise.
    steps = (np.abs(x) / scale_inv / step + noise).astype(np.float32)
    up = steps >= values[below] / step + 1
    found = np.where(up, values[above], values[below])
    if fmt is SECOND:
        found = np.where((x > 0) & (found == 0), values[1], found)
    return np.copysign(found * scale_inv, x)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 127, 128, 1000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_the_format_written_out(name: str, n: int, device: str) -> None:
    fmt = FORMATS[name]
    x = sample(fmt, n)
    noise_n = random_bits(n, seed=5)
    data, exponents = encode(x.to(device), fmt, noise_n.to(device))
    assert (data.dtype, len(data), exponents.dtype, len(exponents)) == (torch.uint8, n, torch.int8, -(-n // BLOCK))
    found = decode(data, exponents, fmt).cpu()
    for i in range(0, n, BLOCK):
        part, noise = x[i : i + BLOCK].double().numpy(), noise_n[i : i + BLOCK].numpy()
        np.testing.assert_array_equal(found[i : i + BLOCK].double().numpy(), rounded(part, fmt, noise))


@pytest.mark.parametrize("name", FORMATS)
def test_representable_values_are_stored_unchanged_and_exact_in_bf16(name: str) -> None:
    """Also where their block has a smaller scale: what is saved in bf16 is restored exactly, with any noise."""
    fmt = FORMATS[name]
    values = torch.from_numpy(grid(fmt)).float()
    for largest in range(8, len(values), 5):
        x = torch.cat([values[: largest + 1], -values[: largest + 1] if fmt is FIRST else values[:1]])
        for scale in (1.0, 2.0**-60):
            for step in range(3):
                assert torch.equal(once((x * scale).bfloat16().float(), fmt, step), x * scale)


@pytest.mark.parametrize("name", slow_but(FORMATS, "second"))
def test_the_mean_is_right(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.linspace(2, 3.99, 128) * (1.0 if fmt is SECOND else -1.0)
    error = torch.stack([once(x, fmt, i) for i in range(1000)]).double() - x
    spread = 0.25 / 2  # at most: half a step
    assert error.mean(dim=0).abs().max() < 5 * spread / 1000**0.5
    assert error.mean().abs() < 5 * spread / error.numel() ** 0.5
    assert error.square().mean() == pytest.approx(0.25**2 / 6, rel=0.05)


def test_a_second_moment_never_becomes_zero() -> None:
    x = torch.tensor([1.0, 1e-20, 1e-45, 0.0, 1e-9])
    for step in range(20):
        found = once(x, SECOND, step)
        assert (found > 0).tolist() == [True, True, True, False, True]
    tiny = once(x[2:3], SECOND, seed=5)
    assert 0 < tiny.item() < 1e-30
    assert tiny.bfloat16().float().equal(tiny)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_values_become_nan(name: str, bad: float) -> None:
    found = once(torch.tensor([1.0, bad, 0.0]), FORMATS[name], seed=5)
    assert not found[1].isfinite()
    assert found[0].isfinite()
