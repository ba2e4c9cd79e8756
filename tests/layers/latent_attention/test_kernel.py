"""Heads of latent attention and their gradients by kernels, against the reference, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megafp8.layers.latent_attention import op as ops
from megafp8.layers.latent_attention.kernel import backward, forward
from tests.kernels import DEVICE, every_bf16, noise
from tests.layers.rotary.test_kernel import bits
from tests.marks import slow_but

Shape = tuple[int, int, int, int, int, int, str]
SHAPES: list[Shape] = [  # s, b, a, n, r, v, positions of samples
    (5, 2, 3, 24, 8, 16, "own"),
    (5, 2, 3, 24, 8, 16, "none"),
    (3, 1, 19, 128, 64, 128, "shared"),
    (9, 2, 16, 128, 64, 128, "own"),
    (4, 3, 2, 5, 6, 7, "shared"),
    (7, 1, 1, 4, 2, 3, "shared"),
    (6, 2, 5, 3, 5, 9, "none"),
    (2, 2, 33, 16, 32, 48, "own"),
    (0, 2, 4, 16, 8, 16, "shared"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def some_tensors(shape: Shape, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], ops.Rotary | None]:
    """Random outputs of the projections, gradients of q, k and v, and the rotary tables of a case."""
    s, b, a, n, r, v, positions = shape
    inputs = [noise(s, b, c, dtype=dtype, seed=i) for i, c in enumerate((a * (n + r), a * (n + v), r))]
    gradients = [noise(s, b, a, d, dtype=dtype, seed=7 + i) for i, d in enumerate((n + r, n + r, v))]
    if positions == "none":
        return inputs, gradients, None
    angles = 100 * noise(s, b if positions == "own" else 1, 1, r // 2, seed=5)
    return inputs, gradients, (angles.cos(), angles.sin())


@pytest.mark.parametrize(
    ("shape", "dtype", "factor"),
    slow_but(
        [(shape, dtype, factor) for shape in SHAPES for dtype in DTYPES for factor in (1.0, 1.3)],
        *((shape, torch.bfloat16, 1.0) for shape in SHAPES),
        *((shape, torch.bfloat16, 1.3) for shape in SHAPES[:2]),
        *((SHAPES[0], dtype, 1.3) for dtype in DTYPES),
    ),
    ids=str,
)
def test_bits_of_the_reference(shape: Shape, dtype: torch.dtype, factor: float) -> None:
    (inputs, gradients, rotary), a, r = some_tensors(shape, dtype), shape[2], shape[4]
    before = [x.clone() for x in inputs]
    found, expected = forward(*inputs, rotary, a, factor), ops.forward_reference(*inputs, rotary, a, factor)
    for x, y in zip(found, expected, strict=True):
        assert x.is_contiguous()
        assert torch.equal(bits(x), bits(y))
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y), "an input was overwritten"
    expected = ops.backward_reference(*gradients, rotary, r, factor)
    for layout in ("as forward's", "sample first", "a slice", "channels apart"):
        found = backward(*(laid_out(x, layout) for x in gradients), rotary, r, factor)
        for x, y in zip(found, expected, strict=True):
            assert x.is_contiguous()
            assert torch.equal(bits(x), bits(y)), layout


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of `x` with other strides."""
    if layout == "sample first":
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    if layout == "a slice":
        return torch.cat([x, x + 1], dim=-1)[..., : x.shape[-1]]
    if layout == "channels apart":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of infinities
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_every_bf16_value() -> None:
    """Subnormals, infinities and NaNs in all channels, forward and backward, rotated or not."""
    every = every_bf16().flatten()
    mixed = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(DEVICE)]
    s, a, n, r, v = 256, 2, 16, 112, 112
    q, kv, k_rotary = every.view(s, 1, a * (n + r)), mixed.view(s, 1, a * (n + v)), every[: s * r].view(s, 1, r)
    angles = noise(s, 1, 1, r // 2)
    for rotary in (None, (angles.cos(), angles.sin())):
        found, expected = forward(q, kv, k_rotary, rotary, a, 1.0), ops.forward_reference(q, kv, k_rotary, rotary, a, 1)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(bits(x), bits(y))
        gradients = q.view(s, 1, a, n + r), kv.view(s, 1, a, n + v), kv.view(s, 1, a, n + v)[..., n:]
        expected = ops.backward_reference(*gradients, rotary, r, 1.0)
        for x, y in zip(backward(*gradients, rotary, r, 1.0), expected, strict=True):
            assert torch.equal(bits(x), bits(y))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_autograd_by_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function with kernels gives the values and the gradients of the function without."""
    (inputs, gradients, rotary), a = some_tensors(SHAPES[0], dtype), SHAPES[0][2]
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(ops, "_has_kernel", lambda x, rotary, there=by_kernels: there)
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = ops.latent_heads(*leaves, rotary, a, 0.7)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, gradients)])
    for by_reference, by_kernel in zip(*found, strict=True):
        assert torch.equal(by_kernel, by_reference)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_for_hopper() -> None:
    """In no more shared memory than a program of sixteen on a multiprocessor has."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.layers.latent_attention.compile_kernel"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(int(line.split()[-1]) for line in done.stdout.splitlines()) <= 227 * 1024 // 16, done.stdout
