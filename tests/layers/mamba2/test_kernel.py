"""Kernels of Mamba-2's recurrence against the recurrence token by token, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from megafp8.layers.mamba2 import kernel
from megafp8.layers.mamba2.op import StateSpace, missing_kernel
from megafp8.layers.mamba2.reference import recurrence
from tests.kernels import DEVICE
from tests.marks import slow_but

CASES = [
    (20, 2, 4, 2, 24, 16, True), (37, 1, 4, 1, 16, 8, False), (16, 2, 2, 2, 16, 16, True), (5, 1, 2, 1, 8, 20, False),
]  # fmt: skip


@pytest.mark.parametrize(("s", "b", "a", "g", "d", "w", "documents"), slow_but(CASES, CASES[1], CASES[2]))
def test_equals_the_recurrence(
    s: int, b: int, a: int, g: int, d: int, w: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, states and gradients of everything; four heads of a group are two programs'."""
    monkeypatch.setattr(kernel, "CHUNK", 16)
    monkeypatch.setattr(kernel, "_STATE_TILE", 16)
    monkeypatch.setattr(kernel, "_HEADS", 2)
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE)

    x, keys, queries, state = random(s, b, a, w), random(s, b, g, d), random(s, b, g, d), random(b, a, d, w)
    step, rate, skip = random(s, b, a).sigmoid(), -random(a).exp(), random(a)
    starts = torch.rand(s, b, device=DEVICE) < 0.15 if documents else None
    dy, dlast = random(s, b, a, w), random(b, a, d, w)
    if b > 1 and documents:  # as a convolution's kernel writes them
        x, keys, queries = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, keys, queries))
    if DEVICE == "cuda":  # values that are exact in both
        x, keys, queries, dy = (t.half().double() for t in (x, keys, queries, dy))
    results = []
    for compute, dtype in ((recurrence, torch.float64), (StateSpace.apply, torch.float32)):
        narrow = torch.float16 if DEVICE == "cuda" and dtype == torch.float32 else dtype
        dtypes = (narrow, dtype, dtype, narrow, narrow, dtype, dtype)
        inputs = [
            t.to(kind).requires_grad_()
            for t, kind in zip((x, step, rate, keys, queries, skip, state), dtypes, strict=True)
        ]
        y, last = compute(*inputs, starts)
        grads = torch.autograd.grad((y, last), inputs, (dy.to(y.dtype), dlast.to(last.dtype)))
        results.append((y, last, *grads))
    names = ("y", "state", "dx", "dstep", "drate", "db", "dc", "dskip", "dstate")
    tolerance = 1e-2 if DEVICE == "cuda" else 1e-5
    for name, expected, found in zip(names, *results, strict=True):
        assert (found.double() - expected).abs().max() < tolerance * expected.abs().max(), name


def test_states_that_do_not_fit() -> None:
    cuda = torch.device("cuda")
    assert missing_kernel(cuda, torch.bfloat16, 256, 128) is None
    for d, w in ((256, 129), (200, 160), (512, 16)):
        assert f"a state has {d} × {w} numbers per head" in str(missing_kernel(cuda, torch.bfloat16, d, w))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "w"),
    [(16, 64), (32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (256, 128), (128, 256)],
)
def test_widths_of_states(d: int, w: int) -> None:
    """With the tiles of models; root mean square errors are those of rounding to bf16. The gradient of a rate is a sum
    over tokens of which little is left."""
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cuda")

    s, a, g = 300, 4, 2
    x, keys, queries, dy = (t.bfloat16() for t in (random(s, 1, a, w), random(s, 1, g, d), random(s, 1, g, d),
                                                   random(s, 1, a, w)))  # fmt: skip
    step, rate, skip = (random(s, 1, a) - 2).sigmoid().float(), -random(a).exp().float(), random(a).float()
    state, dlast = random(1, a, d, w).float(), random(1, a, d, w)
    results = []
    for compute, wide in ((recurrence, True), (StateSpace.apply, False)):
        inputs = [(t.double() if wide else t).requires_grad_() for t in (x, step, rate, keys, queries, skip, state)]
        y, last = compute(*inputs, None)
        grads = torch.autograd.grad((y, last), inputs, (dy.to(y.dtype), dlast.to(last.dtype)))
        results.append((y, last, *grads))
    names = ("y", "state", "dx", "dstep", "drate", "db", "dc", "dskip", "dstate")
    errors = {name: ((x - y).norm() / y.norm()).item() for name, y, x in zip(names, *results, strict=True)}
    assert errors.pop("drate") < 0.05
    assert max(errors.values()) < 5e-3, errors
