"""Kernels of hyper-connections against PyTorch's operations, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megafp8.layers.hyper_connections import kernel, reference
from megafp8.layers.hyper_connections.reference import HyperConnectionRule, Weights
from tests.kernels import DEVICE, noise

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE == "cuda" else 2e-5
R, H = 18, 20


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several of them."""
    for options in (kernel.PROJECT, kernel.WEIGHTS, kernel.STREAMS_BACKWARD):
        monkeypatch.setitem(options, "T", 16)
    for options in (kernel.PROJECT, kernel.STREAMS, kernel.STREAMS_BACKWARD):
        monkeypatch.setitem(options, "C", 16)


def _same(found: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item() + 1e-6
    torch.testing.assert_close(found.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE * scale)


@pytest.mark.parametrize(("n", "iterations", "mixes"), [(3, 3, True), (2, 1, False)])
def test_reading_streams_and_gradients(n: int, iterations: int, mixes: bool) -> None:
    rule, m = HyperConnectionRule(n, iterations, 1e-3, 1e-5), n * (n + 2) if mixes else n
    x, fn = noise(R, n * H, dtype=DTYPE), noise(m, n * H, scale=0.3, seed=1, dtype=DTYPE)
    base, scale = noise(m, seed=2, dtype=DTYPE), noise(3 if mixes else 1, seed=3, dtype=DTYPE)
    y, w, products, inverse = kernel.project_and_read(x, fn, base, scale, rule)
    expected_products, expected_inverse = reference.project(x, fn, rule.norm_eps)
    expected = reference.weights(expected_products, base, scale, rule)
    for one, other in zip((*w, products, inverse, y), (
        *expected, expected_products, expected_inverse, reference.read(x, expected.pre)
    ), strict=True):  # fmt: skip
        assert one.shape == other.shape
        if len(one.flatten()):
            _same(one, other)

    passed = noise(R, n * H, seed=4, dtype=DTYPE) if mixes else None
    dy, dpost, dcomb = noise(R, H, seed=5, dtype=DTYPE), noise(*w.post.shape, seed=6), noise(*w.comb.shape, seed=7)
    dx, dfn, grad = kernel.project_and_read_backward(
        x, passed, dy, dpost, dcomb, fn, base, scale, products, inverse, rule
    )
    dpre = reference.read_backward(x, dy, n)
    pre, of_weights = reference.weights_backward(products, base, scale, rule, Weights(dpre, dpost, dcomb))
    expected_dx, expected_dfn = reference.streams_backward(
        x, passed, dy, pre, fn, products, inverse, of_weights.products
    )
    for one, other in zip((dx, dfn, grad.base, grad.scale), (
        expected_dx, expected_dfn, of_weights.base, of_weights.scale
    ), strict=True):  # fmt: skip
        assert one.shape == other.shape
        _same(one, other)


def test_mixing_streams_and_gradients() -> None:
    n = 3
    x, y = noise(R, n * H, dtype=DTYPE), noise(R, H, seed=1, dtype=DTYPE)
    post, comb, d = noise(R, n, seed=2), noise(R, n, n, seed=3), noise(R, n * H, seed=4, dtype=DTYPE)
    _same(kernel.mixed(x, y, post, comb), reference.mixed(x, y, post, comb))
    found = kernel.mixed_backward(d, x, y, post, comb)
    for one, other in zip(found, reference.mixed_backward(d, x, y, post, comb), strict=True):
        assert one.shape == other.shape
        _same(one, other)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_for_hopper() -> None:
    """With four streams, in no more shared memory than there is."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.layers.hyper_connections.compile_kernel"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(int(line.split()[1]) for line in done.stdout.splitlines()) <= 227 * 1024, done.stdout
