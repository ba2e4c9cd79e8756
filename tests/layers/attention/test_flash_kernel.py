"""Calls of FlashAttention-4 with a stand-in for its kernels, which computes each segment in float64.

The kernels themselves run on GPUs only, in `test_op`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.layers.attention import flash_kernel, reference
from megafp8.layers.attention.scores import Scores
from tests.layers.attention.test_op import MASKS, B, inputs

COMPUTED = [name for name, (_, _, mask) in MASKS.items() if mask.prefix_b is mask.visible is mask.positions_bs is None]
HEADS, GROUPS, D = 4, 2, 6


def _visible(q: int, k: int, options: dict[str, Any]) -> Tensor:
    """Return which keys the queries of a segment see; the last query is aligned with the last key, `[q, k]`."""
    distance = torch.arange(q)[:, None] + k - q - torch.arange(k)
    left, right = options.get("window_size_left"), options.get("window_size_right")
    found = torch.ones(q, k, dtype=torch.bool)
    found &= torch.tensor(not options["causal"]) | (distance >= 0)
    found &= torch.tensor(left is None) | (distance <= (left or 0))
    return found & (torch.tensor(right is None) | (distance >= -(right or 0)))


def _attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps `[q, a]` of one segment, differentiable."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qad,kad->aqk", q, k) * (options["softmax_scale"] or D**-0.5)
    scores = scores.masked_fill(~_visible(len(q), len(k), options), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=-1e300)[..., None]).exp()
    return torch.einsum("aqk,kad->qad", weights, v), lse.T


def _segments(q: Tensor, k: Tensor, options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the index of the queries and of the keys of each segment that has both; the kernel may skip others."""
    if "cu_seqlens_q" not in options:
        return [(i, i) for i in range(len(q))]
    assert options["max_seqlen_q"] * B == len(q)
    assert options["max_seqlen_k"] * B == len(k)
    ends = (itertools.pairwise(options[name].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    pairs = [(slice(*of_q), slice(*of_k)) for of_q, of_k in zip(*ends, strict=True)]
    return [(of_q, of_k) for of_q, of_k in pairs if of_q.start < of_q.stop and of_k.start < of_k.stop]


def _forward(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **options: Any) -> None:
    for of_q, of_k in _segments(q, k, options):
        found, sums = _attend(q[of_q], k[of_k], v[of_k], options)
        out[of_q] = found
        (lse[of_q] if lse.dim() == 3 else lse[:, of_q]).copy_(sums.T)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Leave rows outside of all segments as they are, which are NaN unless the caller gives the results' tensors."""
    given = [torch.full_like(x, torch.nan) if y is None else y for x, y in ((q, dq), (k, dk), (v, dv))]
    assert options["deterministic"] == torch.are_deterministic_algorithms_enabled()
    for of_q, of_k in _segments(q, k, options):
        leaves = [x.detach().requires_grad_() for x in (q[of_q], k[of_k], v[of_k])]
        with torch.enable_grad():
            found, sums = _attend(*leaves, options)
        torch.testing.assert_close(found.detach(), out[of_q])
        torch.testing.assert_close(sums.detach().float(), (lse[of_q] if lse.dim() == 3 else lse[:, of_q]).T)
        gradients = torch.autograd.grad(found, leaves, dout[of_q])
        for into, index, gradient in zip(given, (of_q, of_k, of_k), gradients, strict=True):
            into[index] = gradient.nan_to_num()  # of queries without keys
    return tuple(given)


@pytest.fixture(autouse=True)
def interface(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the package's module."""
    for kernel in (_forward, _backward):
        monkeypatch.setattr(kernel, "compile_cache", SimpleNamespace(cache={}), raising=False)
    found = SimpleNamespace(_flash_attn_fwd=_forward, _flash_attn_bwd=_backward)
    monkeypatch.setattr(flash_kernel, "_flash_attention_4", lambda: found)
    return found


@pytest.mark.parametrize("name", COMPUTED)
def test_calls_equal_the_reference(name: str) -> None:
    """Also of heads that are views, and with a scale."""
    s, t, mask = MASKS[name]
    q, k, v, do = inputs(s, t, HEADS, GROUPS, D, torch.float64, "cpu")
    q, k = (torch.cat([x, x], dim=2)[:, :, : x.shape[2]] for x in (q, k))
    scores = Scores(scale=None if name == "causal" else 0.3)
    o, lse = reference.forward(q.contiguous(), k.contiguous(), v, mask, scores)
    found, sums = flash_kernel.forward(q, k, v, mask, scores.scale)
    torch.testing.assert_close(found, o)
    torch.testing.assert_close(sums, lse.float())
    assert found.is_contiguous()
    gradients = reference.backward(do, q.contiguous(), k.contiguous(), v, o, lse, mask, scores, False)
    for ours, theirs in zip(
        flash_kernel.backward(do, q, k, v, found, sums, mask, scores.scale), gradients[:3], strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_garbage_of_a_compilation_holds_no_graph(interface: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that leaves a cycle with its caller's frames."""

    def compiling(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        if not compiling.compile_cache.cache:  # type: ignore[attr-defined]
            compiling.compile_cache.cache["kernel"] = True  # type: ignore[attr-defined]
            cycle: list[Any] = [sys._getframe()]
            cycle.append(cycle)
        return _backward(*tensors, **options)

    compiling.compile_cache = SimpleNamespace(cache={})  # type: ignore[attr-defined]
    monkeypatch.setattr(interface, "_flash_attn_bwd", compiling)
    s, t, mask = MASKS["causal"]
    q, k, v, do = inputs(s, t, HEADS, GROUPS, D, torch.float64, "cpu")
    gc.disable()
    try:
        o, lse = flash_kernel.forward(q, k, v, mask, None)
        flash_kernel.backward(do, q, k, v, o, lse, mask, None)
        held = weakref.ref(o)
        del o
        assert held() is None
    finally:
        gc.enable()
