"""FP8 moments against the formats written out, and what Adam requires: no bias, no zeros, and decay."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.numerics.philox import Key
from megafp8.numerics.stochastic_rounding import noise_key, words
from megafp8.optimizer import fp8_moments
from megafp8.optimizer.fp8_moments import BLOCK, FIRST, SECOND, Fp8MomentStorage, MomentFormat, decode, encode
from tests.marks import slow_but
from tests.tiny_model import flat_shard

FORMATS = {"first": FIRST, "second": SECOND}
KEY: Key = (5, 6)


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
    """One block, rounded to the grid: up where the noise and the fraction of the step add up to 1 or more."""
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
    data, exponents = encode(x.to(device), fmt, KEY)
    assert (data.dtype, len(data), exponents.dtype, len(exponents)) == (torch.uint8, n, torch.int8, -(-n // BLOCK))
    found = decode(data, exponents, fmt).cpu()
    blocks = -(-n // BLOCK)
    noise = (words(blocks * BLOCK // 4, KEY, torch.device("cpu")).numpy().ravel() >> 12) / 2**20
    for i in range(0, n, BLOCK):
        part = x[i : i + BLOCK].double().numpy()
        np.testing.assert_array_equal(found[i : i + BLOCK].double().numpy(), rounded(part, fmt, noise[i:][: len(part)]))


@pytest.mark.parametrize("name", FORMATS)
def test_representable_values_are_stored_unchanged_and_exact_in_bf16(name: str) -> None:
    """Also where their block has a smaller scale: what is saved in bf16 is restored exactly, with any noise."""
    fmt = FORMATS[name]
    values = torch.from_numpy(grid(fmt)).float()
    for largest in range(8, len(values), 5):
        x = torch.cat([values[: largest + 1], -values[: largest + 1] if fmt is FIRST else values[:1]])
        for scale in (1.0, 2.0**-60):
            for step in range(3):
                found = decode(*encode((x * scale).bfloat16().float(), fmt, noise_key(0, step, "")), fmt)
                assert torch.equal(found, x * scale)


@pytest.mark.parametrize("name", slow_but(FORMATS, "second"))
def test_the_mean_is_right(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.linspace(2, 3.99, 128) * (1.0 if fmt is SECOND else -1.0)
    error = torch.stack([decode(*encode(x, fmt, noise_key(0, i, "")), fmt) for i in range(1000)]).double() - x
    spread = 0.25 / 2  # at most: half a step
    assert error.mean(dim=0).abs().max() < 5 * spread / 1000**0.5
    assert error.mean().abs() < 5 * spread / error.numel() ** 0.5
    assert error.square().mean() == pytest.approx(0.25**2 / 6, rel=0.05)


def test_a_second_moment_never_becomes_zero() -> None:
    x = torch.tensor([1.0, 1e-20, 1e-45, 0.0, 1e-9])
    for step in range(20):
        found = decode(*encode(x, SECOND, noise_key(0, step, "")), SECOND)
        assert (found > 0).tolist() == [True, True, True, False, True]
    tiny = decode(*encode(x[2:3], SECOND, KEY), SECOND)
    assert 0 < tiny.item() < 1e-30
    assert tiny.bfloat16().float().equal(tiny)


@pytest.mark.parametrize(("name", "beta"), [("first", 0.9), ("second", 0.95)])
def test_a_moment_without_gradients_decays(name: str, beta: float) -> None:
    """At the right rate from any value; rounded to nearest, 1.25 would never decay at 0.95."""
    moment = Fp8MomentStorage(flat_shard("weight", 4096), name, FORMATS[name], seed=0)
    start = torch.linspace(1, 4, 4096)
    moment.store(start, step=0)
    for step in range(1, 101):
        moment.store(moment.load() * beta, step)
        if step in (10, 50, 100):
            ratio = moment.load().double() / (start.double() * beta**step)
            spread = (0.0014 / (1 - beta**2)) ** 0.5
            assert abs(ratio.mean() - 1) < 5 * max(ratio.std(), 0.01) / 64
            assert ratio.std() < 1.5 * spread * (step * (1 - beta**2)) ** 0.5


def test_noise_depends_on_tensor_position_seed_and_step() -> None:
    def stored(name: str, start: int = 0, seed: int = 0, step: int = 0, moment: str = "exp_avg") -> Tensor:
        found = Fp8MomentStorage(flat_shard(name, 1000, start, start + 500), moment, FIRST, seed)
        found.store(torch.linspace(-1, 1, 500), step)
        return found.load()

    plain = stored("weight")
    assert torch.equal(plain, stored("weight"))
    for other in (stored("norm"), stored("weight", 500), stored("weight", seed=1), stored("weight", step=1),
                  stored("weight", moment="exp_avg_sq")):  # fmt: skip
        assert 100 < (other != plain).sum() < 400


def test_long_shards_are_encoded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_moments, "_CHUNK", 256)
    moment = Fp8MomentStorage(flat_shard("weight", 1000), "exp_avg", FIRST, seed=0)
    x = sample(FIRST, 1000)
    moment.store(x, step=3)
    names = [f"weight[0]\x000\x00exp_avg\x00{i}" for i in range(4)]
    parts = [decode(*encode(part, FIRST, noise_key(0, 3, name)), FIRST) for part, name in zip(x.split(256), names)]
    assert torch.equal(moment.load(), torch.cat(parts))
    assert moment.nbytes == 1000 + 8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_values_become_nan(name: str, bad: float) -> None:
    found = decode(*encode(torch.tensor([1.0, bad, 0.0]), FORMATS[name], KEY), FORMATS[name])
    assert not found[1].isfinite()
    assert found[0].isfinite()
