"""Batch-invariant attention: against the reference of all attention in float64, and the same bits for a query whatever
it is computed with: in a prompt, in a chunk of one, among documents, or alone over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.layers.attention import invariant_kernel as invariant_attention
from megafp8.layers.attention import (
    invariant_reference as invariant_attention_reference,
)
from megafp8.layers.attention import (
    reference as attention_reference,
)
from megafp8.layers.attention.mask import AttentionMask, causal_mask
from megafp8.layers.attention.scores import Scores
from tests.kernels import DEVICE, noise

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@pytest.fixture(autouse=True)
def rows_of_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's products in fp32, which the interpreter computes, have rows of unlike orders; through float64 all are
    right."""
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        def dot(self: object, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
            data = (a.data.astype(np.float64) @ b.data.astype(np.float64) + d.data).astype(d.data.dtype)
            return interpreter.TensorHandle(data, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@dataclass(frozen=True)
class Case:
    d: int = 16
    w: int = 16
    heads: int = 4
    groups: int = 2
    length: int = 400
    """More than a part of the keys."""
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    bias: bool = False


CASES = {
    "plain": Case(),
    "one group, 24 channels": Case(d=24, w=24, heads=2, groups=1, length=150),
    "narrow values": Case(d=24, w=16, heads=2, groups=2, length=150),
    "window": Case(heads=2, groups=1, window=100),
    "chunks": Case(heads=1, groups=1, chunk=150),
    "soft cap": Case(heads=2, groups=1, softcap=3.0, length=150),
    "bias": Case(heads=2, groups=1, bias=True, length=150),
}


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Scores]:
    shapes = ((case.heads, case.d), (case.groups, case.d), (case.groups, case.w))
    q, k, v = (noise(case.length, 1, *shape, seed=i).to(DTYPE) for i, shape in enumerate(shapes))
    bias = noise(case.heads, 2 * case.length - 1, seed=4) if case.bias else None
    return 3 * q, k, v, Scores(softcap=case.softcap, distance_bias_ar=bias)


@cache
def prompt(name: str, module: Any) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all queries of a case."""
    case = CASES[name]
    q, k, v, scores = tensors(case)
    return module.forward(q, k, v, causal_mask(None, case.window, case.length, q.device, case.chunk), scores)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", [invariant_attention, invariant_attention_reference])
def test_a_query_has_the_same_bits_everywhere(name: str, module: object) -> None:
    case = CASES[name]
    forward = module.forward  # type: ignore[attr-defined]
    q, k, v, scores = tensors(case)
    n, device = case.length, q.device
    mask = causal_mask(None, case.window, n, device, case.chunk)
    o, lse = prompt(name, module)
    wide_scores = Scores(softcap=case.softcap, distance_bias_ar=scores.distance_bias_ar)
    expected = attention_reference.forward(q.double(), k.double(), v.double(), mask, wide_scores)
    tolerance = 2e-6 if torch.float32 == DTYPE else 8e-3
    torch.testing.assert_close(o.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)

    positions = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:70].sort().values.to(device)
    some = AttentionMask(window=case.window, chunk=case.chunk, positions_bs=positions[None])
    found = forward(q[positions], k, v, some, scores)
    assert torch.equal(found[0], o[positions])
    assert torch.equal(found[1], lse[positions])

    if case.bias or case.chunk:
        return
    before, after = (noise(m, *x.shape[1:], seed=9).to(DTYPE) for m, x in ((37, q), (21, q)))
    other_k, other_v = (noise(58, *x.shape[1:], seed=9).to(DTYPE) for x in (k, v))
    packed = [
        torch.cat([before, q, after]), *(torch.cat([y[:37], x, y[37:]]) for x, y in ((k, other_k), (v, other_v)))
    ]  # fmt: skip
    ends = torch.tensor([[0, 37, 37 + n, 58 + n]], dtype=torch.int32, device=device)
    of_documents = forward(*packed, causal_mask(ends, case.window, n + 58, device), scores)
    assert torch.equal(of_documents[0][37:-21], o)


@pytest.mark.parametrize("name", CASES)
def test_single_queries_have_the_bits_of_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    q, k, v, scores = tensors(case)
    n, page, device = case.length, 16, q.device
    o, lse = prompt(name, invariant_attention)
    most = -(-n // page)
    order = torch.randperm(2 * most, generator=torch.Generator().manual_seed(1))[:most].to(device)
    keys, values = (x.new_zeros(2 * most, page, *x.shape[2:]) for x in (k, v))
    slots = order[torch.arange(n, device=device) // page] * page + torch.arange(n, device=device) % page
    for pages, x in ((keys, k), (values, v)):
        pages.flatten(0, 1)[slots] = x[:, 0]
    for programs in (invariant_attention._PROGRAMS, 1):
        monkeypatch.setattr(invariant_attention, "_PROGRAMS", programs)
        for positions in ([0], [n - 1, 5, 63], [64, 1, n // 2, n - 2]):
            table = order.int().expand(len(positions), -1).contiguous()
            found = invariant_attention.attend(
                q[positions, 0], keys, values, table, torch.tensor(positions, device=device), case.window, case.chunk,
                scores,
            )  # fmt: skip
            assert torch.equal(found[0], o[positions, 0])
            assert torch.equal(found[1], lse[positions, 0])
