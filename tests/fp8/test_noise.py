"""Noise: Philox in Python integers, and what it depends on."""

from __future__ import annotations

import math

import pytest
import torch

from megafp8.fp8.stochastic_rounding import noise_key, uniform
from megafp8.philox import Key
from tests.test_philox import philox_by_hand

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def uniform_by_hand(r: int, c: int, key: Key) -> list[list[float]]:
    flat = [(philox_by_hand(i // 4, key)[i % 4] >> 8) / 2**24 for i in range(r * c)]
    return [flat[i * c : (i + 1) * c] for i in range(r)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", [(0, 0), (0xFFFFFFFF, 0xFFFFFFFF), noise_key(1234, 7, "layers.0.mlp.down")])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 8), (0, 4), (4, 0)])
def test_equals_python_integers(shape: tuple[int, int], key: Key, device: str) -> None:
    noise = uniform(*shape, key, torch.device(device))
    assert noise.dtype == torch.float32
    assert noise.shape == shape
    assert noise.tolist() == uniform_by_hand(*shape, key)


def test_depends_on_seed_step_and_name() -> None:
    keys = {noise_key(seed, step, name) for seed in (0, 1) for step in (0, 1, 10) for name in ("a", "b")}
    assert len(keys) == 12
    assert noise_key(1, 1, "a") == noise_key(1, 1, "a")


def test_is_uniform() -> None:
    noise = uniform(100, 1000, noise_key(0, 0, "x"), torch.device("cpu")).double()
    assert noise.min() >= 0
    assert noise.max() < 1
    n = noise.numel()
    counts = torch.histc(noise.flatten(), bins=50, min=0, max=1)
    chi_squared = ((counts - n / 50) ** 2 / (n / 50)).sum().item()
    assert abs(chi_squared - 49) < 5 * math.sqrt(2 * 49)
    for a, b in [(noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[:, 4:], noise[:, :-4])]:
        correlation = 12 * ((a - 0.5) * (b - 0.5)).mean().item()
        assert abs(correlation) < 5 / math.sqrt(a.numel())
