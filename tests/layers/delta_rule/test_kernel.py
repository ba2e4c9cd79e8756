"""Kernels of the gated delta rule against the rule token by token, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megafp8.layers.delta_rule.op import InKernels, delta_rule, in_chunks, recurrence
from tests.kernels import DEVICE
from tests.marks import slow_but

CASES = [
    (66, 1, 1, 8, 8, 1.0),
    (70, 1, 1, 16, 16, 1.0),
    (37, 2, 2, 24, 40, 0.1),
    (64, 1, 1, 8, 16, 40.0),
    (130, 1, 1, 16, 8, 1.0),
]


@pytest.mark.parametrize(("s", "b", "a", "d", "w", "rate"), slow_but(CASES, CASES[0]))
def test_equals_the_recurrence(s: int, b: int, a: int, d: int, w: int, rate: float) -> None:
    """Outputs, states and gradients of everything; decays of `rate` forget nearly all, or nothing, in a few tokens."""
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE)

    q, k, v, state = random(s, b, a, d), F.normalize(random(s, b, a, d), dim=-1), random(s, b, a, w), random(b, a, d, w)
    decay, beta = -rate * F.softplus(random(s, b, a, d)), random(s, b, a).sigmoid()
    dy, dlast = random(s, b, a, w), random(b, a, d, w)
    narrow = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, dy = (x.to(narrow).double() for x in (q, k, v, dy))
    results = []
    for compute, dtype in ((recurrence, torch.float64), (InKernels.apply, torch.float32)):
        of_tokens = torch.float64 if dtype == torch.float64 else narrow
        dtypes = (of_tokens, of_tokens, of_tokens, dtype, dtype, dtype)
        inputs = [x.to(kind).requires_grad_() for x, kind in zip((q, k, v, decay, beta, state), dtypes, strict=True)]
        scaled = inputs[0] * d**-0.5 if compute is recurrence else inputs[0]
        y, last = compute(scaled, *inputs[1:])
        grads = torch.autograd.grad((y, last), inputs, (dy.to(y.dtype), dlast.to(last.dtype)))
        results.append((y, last, *grads))
    # The gradient of a decay is a difference of sums.
    tolerance = (1e-4 if rate > 1 else 2e-5) if DEVICE == "cpu" else 2e-2
    for name, expected, found in zip(
        ("y", "state", "dq", "dk", "dv", "ddecay", "dbeta", "dstate"), *results, strict=True
    ):
        assert (found.double() - expected).abs().max() < tolerance * expected.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "w"), [(16, 16), (32, 32), (64, 64), (64, 128), (96, 48), (128, 64), (128, 128), (128, 32)]
)
def test_widths_of_heads(d: int, w: int) -> None:
    """Root mean square errors are those of rounding to bf16: what a compiler does with one width only shows."""
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    s, a = 500, 3
    q, k = (F.normalize(random(s, 1, a, d), dim=-1).bfloat16() for _ in range(2))
    decay, beta = -F.softplus(random(s, 1, a, d) - 2), random(s, 1, a).sigmoid()
    v, dy, state, dlast = random(s, 1, a, w).bfloat16(), random(s, 1, a, w), random(1, a, d, w), random(1, a, d, w)
    results = []
    for compute, wide in ((in_chunks, True), (InKernels.apply, False)):
        inputs = [(x.double() if wide else x).requires_grad_() for x in (q, k, v, decay, beta, state)]
        y, last = compute(inputs[0] * d**-0.5 if wide else inputs[0], *inputs[1:])
        grads = torch.autograd.grad((y, last), inputs, (dy.bfloat16().to(y.dtype), dlast.to(last.dtype)))
        results.append((y, last, *grads))
    names = ("y", "state", "dq", "dk", "dv", "ddecay", "dbeta", "dstate")
    errors = {name: ((x - y).norm() / y.norm()).item() for name, y, x in zip(names, *results, strict=True)}
    assert max(errors.values()) < 8e-3, errors


@pytest.mark.gpu
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(("s", "b", "groups", "d"), [(500, 1, 1, 64), (500, 2, 2, 128), (2, 1, 1, 128)])
def test_steps_on_a_gpu(s: int, b: int, groups: int, d: int, by_channel: bool) -> None:
    """Tokens of two steps with documents, by FlashQLA where it fits and by the kernels elsewhere."""
    torch.manual_seed(0)
    n, a = 2, 4 if not by_channel else groups

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    q, k = (F.normalize(random(tokens, b, groups, d), dim=-1).bfloat16() for tokens in (s, n * s))
    decay = -F.softplus(random(s, b, a, *((d,) if by_channel else ())) - 2)
    v, beta, state = random(n * s, b, a, d).bfloat16(), 2 * random(n * s, b, a).sigmoid(), random(b, a, d, d)
    dy, starts = random(s, b, a, d).bfloat16(), torch.rand(s, b, device="cuda") < 0.01
    results = []
    for compute, wide in ((in_chunks, True), (delta_rule, False)):
        inputs = [(x.double() if wide else x).requires_grad_() for x in (q, k, v, decay, beta, state)]
        heads = [x.repeat_interleave(a // groups, dim=2) for x in inputs[:2]] if wide else inputs[:2]
        y, last = compute(heads[0] * d**-0.5 if wide else heads[0], heads[1], *inputs[2:], starts)
        grads = torch.autograd.grad((y, last), inputs, (dy.to(y.dtype), torch.ones_like(last)))
        results.append((y, last, *grads))
    names = ("y", "state", "dq", "dk", "dv", "ddecay", "dbeta", "dstate")
    errors = {name: ((x - y).norm() / y.norm()).item() for name, y, x in zip(names, *results, strict=True)}
    assert max(errors.values()) < 1.5e-2, errors
