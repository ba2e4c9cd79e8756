"""Attention of documents and windows, forward and backward, against a float64 twin that masks a matrix of scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.ops import attention as module
from megafp8.ops.attention import attention, backward, forward
from megafp8.ops.attention_mask import CAUSAL, AttentionMask, causal_mask

B = 2


def twin(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, allowed_bst: Tensor, do_sbad: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exps, and gradients of q, k and v, in float64; a query without keys has the output 0."""
    q, k, v = inputs = [x.detach().double().requires_grad_() for x in (q_sbad, k_tbgd, v_tbgd)]
    outputs, sums = [], []
    for head in range(q.shape[2]):
        group = head * k.shape[2] // q.shape[2]
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, group]) / math.sqrt(q.shape[3])
        weights = torch.where(allowed_bst, scores.exp(), 0.0)
        total = weights.sum(-1)
        sums.append(total.log().T)
        outputs.append(torch.einsum("bst,tbd->sbd", weights / total.clamp(min=1e-300)[..., None], v[:, :, group]))
    o = torch.stack(outputs, dim=2)
    o.backward(do_sbad.double())
    gradients = [x.grad for x in inputs if x.grad is not None]
    return o.detach(), torch.stack(sums, dim=2).detach(), gradients


def allowed(s: int, t: int, mask: AttentionMask) -> Tensor:
    """`[b, s, t]`, pair by pair, as the docstring of AttentionMask says."""
    found = torch.zeros(B, s, t, dtype=torch.bool)
    for sample in range(B):
        ends_q, ends_k = (
            [0, n] if ends is None else ends[sample % len(ends)].tolist()
            for n, ends in ((s, mask.cu_seqlens_q), (t, mask.cu_seqlens_k))
        )
        for (q0, q1), (k0, k1) in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True):
            for query, key in itertools.product(range(q0, q1), range(k0, k1)):
                distance = (q1 - query) - (k1 - key)  # from the latest key to this one; below 0 after it
                behind = -distance
                visible = not mask.causal or behind >= 0
                if mask.window is not None:
                    visible &= behind < mask.window
                found[sample, query, key] = visible
    return found


def offsets(*lengths: list[int]) -> Tensor:
    return torch.tensor([[0, *itertools.accumulate(row)] for row in lengths], dtype=torch.int32)


DOCUMENTS = offsets([5, 1, 30, 0, 4], [1, 1, 18, 20, 0])
PARTS = offsets([3, 1, 10, 0, 2], [0, 1, 6, 9, 0])
"""Of queries: fewer than keys, or none."""
LESS = offsets([7, 0, 9, 0, 0], [0, 0, 6, 9, 1])
KEYS = offsets([0, 3, 10, 20, 7], [9, 0, 11, 20, 0])
"""None for some queries, queries for none."""
QUERIES, MORE_KEYS = offsets([5, 1, 34, 0], [1, 19, 20, 0]), offsets([5, 1, 34, 8], [1, 19, 20, 8])
MASKS = {
    "causal": (40, 40, CAUSAL),
    "whole": (16, 40, AttentionMask(causal=False)),
    "documents": (40, 40, AttentionMask(DOCUMENTS, DOCUMENTS, square=True)),
    "window": (40, 40, causal_mask(None, 7, 40, torch.device("cpu"))),
    "documents window": (40, 40, AttentionMask(DOCUMENTS, DOCUMENTS, window=3, square=True)),
    "parts": (16, 40, AttentionMask(PARTS, DOCUMENTS)),
    "parts window": (16, 40, AttentionMask(PARTS, DOCUMENTS, window=3)),
    "keys without queries": (40, 48, AttentionMask(QUERIES, MORE_KEYS, window=3, square=True)),
    "parts whole": (16, 40, AttentionMask(LESS, KEYS, causal=False)),
}
LARGER = 25
"""On GPUs, where lengths then are odd multiples of no tile."""


def larger(mask: AttentionMask) -> AttentionMask:
    """For GPUs."""
    q, k = (None if x is None else (x * LARGER).cuda() for x in (mask.cu_seqlens_q, mask.cu_seqlens_k))
    same = mask.cu_seqlens_q is mask.cu_seqlens_k
    window = None if mask.window is None else mask.window * LARGER
    return AttentionMask(q, q if same else k, mask.causal, window, mask.square)


def inputs(s: int, t: int, heads: int, groups: int, d: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(s, B, heads, d), (t, B, groups, d), (t, B, groups, d), (s, B, heads, d)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).to(device) for shape in shapes]


@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("rows", [512, 5])
@pytest.mark.parametrize("name", MASKS)
def test_the_reference(name: str, rows: int, heads: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", rows)
    s, t, mask = MASKS[name]
    q, k, v, do = inputs(s, t, heads, groups, 6, torch.float64, "cpu")
    o, lse, gradients = twin(q, k, v, allowed(s, t, mask), do)
    found, found_lse = forward(q, k, v, mask)
    torch.testing.assert_close(found, o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_lse, lse, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(backward(do, q, k, v, found, found_lse, mask), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_autograd(name: str) -> None:
    s, t, mask = MASKS[name]
    *qkv, do = inputs(s, t, 4, 2, 6, torch.float64, "cpu")
    o, _, gradients = twin(*qkv, allowed(s, t, mask), do)
    packed = torch.cat(qkv, dim=2).requires_grad_()  # views of one tensor, as the model's are
    found = attention(*packed.split([4, 2, 2], dim=2), mask)
    torch.testing.assert_close(found, o, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(found, packed, do)
    torch.testing.assert_close(gradient, torch.cat(gradients, dim=2), rtol=1e-11, atol=1e-12)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sink_a: Tensor, allowed_bst: Tensor, do: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v and the sinks, which are a column of the matrix of scores, in float64."""
    leaves = [x.detach().double().cpu().requires_grad_() for x in (q, k, v, sink_a)]
    q, k, v, sink_a = leaves
    repeat = q.shape[2] // k.shape[2]
    scores = torch.einsum("sbad,tbad->bast", q, k.repeat_interleave(repeat, 2)) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~allowed_bst[:, None], -math.inf)
    sinks = sink_a[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    o = torch.einsum("bast,tbad->sbad", weights, v.repeat_interleave(repeat, 2))
    return [o.detach(), *torch.autograd.grad(o, leaves, do.double().cpu())]


@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_sinks(name: str) -> None:
    s, t, mask = MASKS[name]
    *qkv, do = inputs(s, t, 4, 2, 6, torch.float64, "cpu")
    leaves = [x.requires_grad_() for x in (*qkv, torch.tensor([-3.0, 0.0, 1.0, 40.0], dtype=torch.float64))]
    found = attention(*leaves[:3], mask, leaves[3])
    gradients = torch.autograd.grad(found, leaves, do)
    for ours, theirs in zip((found, *gradients), with_sinks(*leaves, allowed(s, t, mask), do), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_sinks_on_a_gpu(name: str, deterministic: bool) -> None:
    s, t, mask = MASKS[name]
    s, t, mask = s * LARGER, t * LARGER, larger(mask)
    *qkv, do = inputs(s, t, 4, 2, 64, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in (*qkv, torch.tensor([-3.0, 0.0, 1.0, 40.0], device="cuda"))]
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = attention(*leaves[:3], mask, leaves[3])
        gradients = torch.autograd.grad(found, leaves, do)
    finally:
        torch.use_deterministic_algorithms(False)
    on_cpu = AttentionMask(*(x if x is None else x.cpu() for x in mask.tensors[:2]), window=mask.window)
    expected = with_sinks(*leaves, allowed(s, t, on_cpu), do)
    for ours, theirs in zip((found, *gradients), expected, strict=True):
        difference = (ours.double().cpu() - theirs).norm() / theirs.norm()
        assert difference < 0.01, "bf16's rounding, of some 0.004"


def test_a_window_of_the_whole_sequence_is_none() -> None:
    assert causal_mask(None, 40, 40, torch.device("cpu")) is CAUSAL
    assert causal_mask(DOCUMENTS, 40, 40, torch.device("cpu")).window is None


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("name", ["documents", "window"])
def test_no_matrix_of_scores(name: str) -> None:
    """A window of 100 in 4,096 tokens, and documents of 128."""
    s = 4096
    ends = torch.arange(0, s + 1, 128, dtype=torch.int32)[None]
    mask = AttentionMask(ends, ends) if name == "documents" else causal_mask(None, 100, s, torch.device("cpu"))
    q, k, v, do = inputs(s, s, 1, 1, 4, torch.float32, "cpu")
    with _Largest() as largest:
        o, lse = forward(q, k, v, mask)
        backward(do, q, k, v, o, lse, mask)
    assert largest.elements < s * 128


def test_a_line_says_which_kernel_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert module.describe(cpu).endswith("the reference in PyTorch")
    monkeypatch.setattr(module.cudnn_attention, "is_available", lambda: True)
    assert module.describe(cuda).endswith("cuDNN's variable-length kernel")
    monkeypatch.setattr(module.cudnn_attention, "is_available", lambda: False)
    assert "needs nvidia-cudnn-frontend" in module.describe(cuda)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert module.describe(cuda).endswith("since deterministic is true")


# --- kernels of GPUs --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["default", "deterministic"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.use_deterministic_algorithms(request.param == "deterministic")
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "groups", "d"), [(4, 4, 64), (8, 2, 128)])
@pytest.mark.parametrize("name", MASKS)
def test_kernels(name: str, heads: int, groups: int, d: int, mode: str) -> None:
    s, t, small = MASKS[name]
    mask = larger(small)
    s, t = s * LARGER, t * LARGER
    q, k, v, do = inputs(s, t, heads, groups, d, torch.bfloat16, "cuda")
    exact = [x.double() for x in (q, k, v, do)]
    o, lse = module._reference_forward(*exact[:3], mask)
    gradients = module._reference_backward(exact[3], *exact[:3], o, lse, mask)
    found, found_lse = forward(q, k, v, mask)
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-3, atol=1e-3)
    all_found = [found, *backward(do, q, k, v, found, found_lse, mask)]
    for what, ours, theirs in zip(("o", "dq", "dk", "dv"), all_found, (o, *gradients), strict=True):
        assert torch.isfinite(ours).all(), what
        error = ((ours.double() - theirs).norm() / theirs.norm()).item()
        assert error < 0.01, f"{what}: {error}"
    if mode == "deterministic":
        again = backward(do, q, k, v, found, found_lse, mask)
        assert all(torch.equal(a, b) for a, b in zip(again, all_found[1:], strict=True))
