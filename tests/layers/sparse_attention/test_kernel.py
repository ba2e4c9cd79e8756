"""Kernels of sparse attention against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.layers.compressed_attention import op as compressed_attention
from megafp8.layers.context import PlannedGroup
from megafp8.layers.sparse_attention import hopper_kernel as hopper
from megafp8.layers.sparse_attention import kernel, op, reference
from megafp8.layers.sparse_attention.op import IndexLoss
from megafp8.layers.sparse_attention.reference import Index, Keys
from tests.kernels import DEVICE, noise

B, S, T, K = 2, 5, 40, 17
V, R, A = 20, 6, 3
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE == "cuda" else 2e-5


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several of them."""
    monkeypatch.setitem(kernel.SCORES, "M", 16)
    monkeypatch.setitem(kernel.SCORES, "N", 16)
    monkeypatch.setitem(kernel.CHOOSE, "BLOCK", 16)
    for options in (
        kernel.ATTEND, kernel.SCORES_BACKWARD, kernel.QUERIES_BACKWARD, kernel.KEYS_BACKWARD, kernel.INDEX_LOSS,
    ):  # fmt: skip
        monkeypatch.setitem(options, "N", 16)
    for options in (kernel.QUERIES_BACKWARD, kernel.KEYS_BACKWARD):
        monkeypatch.setitem(options, "W", 16)
    monkeypatch.setattr(kernel, "_PAIR_BYTES", 4 * B * K * 30 * 2)  # two queries at a time


def _ranges() -> tuple[Tensor, Tensor]:
    """Of queries at different places of documents, one without keys and one that sees all."""
    first = torch.tensor([[0, 0, 7, 9, 0], [0, 30, 2, 0, 4]], device=DEVICE)
    stop = torch.tensor([[1, 30, 40, 9, 40], [17, 40, 20, 40, 38]], device=DEVICE)
    return first, stop


def _select(functions: Any, index: Index, first: Tensor, stop: Tensor) -> Tensor:
    return functions.choose(functions.index_scores(index, first, stop), first, stop, K)


def _index(heads: int = 5, d: int = 12) -> Index:
    q, k = noise(B, S, heads, d).to(DTYPE), noise(B, T, d, seed=1).to(DTYPE)
    return Index(q, k, noise(B, S, heads, seed=2))


def test_choices_are_exact() -> None:
    """Keys with equal scores among them: those that are the same key, and zeros."""
    index, (first, stop) = _index(2), _ranges()
    index.k[:, 20:] = index.k[:, :20]
    expected = _select(reference, index, first, stop)
    assert torch.equal(_select(kernel, index, first, stop), expected)
    assert (expected >= 0).sum(-1).tolist() == (stop - first).clamp(max=K).tolist()


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_largest_scores_of_blocks(size: int) -> None:
    scores, ranges = noise(B, S, T), _ranges()
    assert torch.equal(kernel.block_maxima(scores, *ranges, size), reference.block_maxima(scores, *ranges, size))


def _close(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert (found.double() - expected.double()).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1), what


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_to_chosen_keys(deterministic: bool) -> None:
    first, stop = _ranges()
    keys = Keys(_select(reference, _index(), first, stop), first, stop)
    q, kv, do = (noise(*shape, seed=i).to(DTYPE) for i, shape in
                 enumerate([(B, S, A, V + R), (B, T, V + R), (B, S, A, V)]))  # fmt: skip
    o, lse = reference.attend(q, kv, keys, V, 0.3)
    found_o, found_lse = kernel.attend(q, kv, keys, V, 0.3)
    _close(found_o, o)
    assert torch.equal(found_lse.isneginf(), lse.isneginf())
    _close(found_lse.masked_fill(lse.isneginf(), 0), lse.masked_fill(lse.isneginf(), 0))
    sums = [torch.ones(B, T, V + R, device=DEVICE) for _ in range(2)]
    expected = *reference.attend_backward(do, q, kv, keys, o, lse, 0.3, sums[0]), sums[0]
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = *kernel.attend_backward(do, q, kv, keys, o, lse, 0.3, sums[1]), sums[1]
    finally:
        torch.use_deterministic_algorithms(False)
    for what, ours, theirs in zip(("dq", "p", "dkv"), found, expected, strict=True):
        _close(ours, theirs, what)


@pytest.mark.parametrize("deterministic", [False, True])
def test_loss_of_the_indexer(deterministic: bool) -> None:
    index, (first, stop) = _index(), _ranges()
    keys = Keys(_select(reference, index, first, stop), first, stop)
    p = noise(B, S, K).exp() * (keys.chosen >= 0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-9)
    factor = torch.tensor(0.7, device=DEVICE)
    sums = [torch.ones(B, T, 12, device=DEVICE) for _ in range(2)]
    expected = *reference.index_loss_backward(index, keys, p, factor, sums[0]), sums[0]
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = *kernel.index_loss_backward(index, keys, p, factor, sums[1]), sums[1]
    finally:
        torch.use_deterministic_algorithms(False)
    for what, ours, theirs in zip(("dq", "dweights", "loss", "dk"), found, expected, strict=True):
        _close(ours, theirs, what)


@pytest.mark.gpu
@pytest.mark.parametrize(("v", "r", "heads"), [(512, 64, 128), (512, 0, 64), (256, 32, 64)])
def test_kernels_for_hopper(v: int, r: int, heads: int) -> None:
    """Widths of DeepSeek-V3.2 and V4; numbers of keys that fill tiles, do not, and none."""
    t, most = 700, 200
    stop = torch.tensor([[0, 1, 63, 64, 65, 128, 199, 200, 700]], device="cuda")
    first = torch.zeros_like(stop)
    scores = noise(1, stop.shape[1], t, seed=9)
    keys = Keys(kernel.choose(scores, first, stop, most), first, stop)
    q, kv, do = (noise(*shape, seed=i).bfloat16() for i, shape in
                 enumerate([(1, 9, heads, v + r), (1, t, v + r), (1, 9, heads, v)]))  # fmt: skip
    assert hopper.takes(q, v)
    wide = [x.double() for x in (q, kv, do)]
    scale = (v + r) ** -0.5
    o, lse = reference.attend(*wide[:2], keys, v, scale)
    found_o, found_lse = kernel.attend(q, kv, keys, v, scale)
    _close(found_o, o)
    assert torch.equal(found_lse.isneginf(), lse.isneginf())
    _close(found_lse.masked_fill(lse.isneginf(), 0), lse.masked_fill(lse.isneginf(), 0))
    sums = [torch.zeros(1, t, v + r, device="cuda", dtype=dtype) for dtype in (torch.float64, torch.float32)]
    expected = *reference.attend_backward(wide[2], *wide[:2], keys, o, lse, scale, sums[0]), sums[0]
    found = *kernel.attend_backward(do, q, kv, keys, found_o, found_lse, scale, sums[1]), sums[1]
    for what, ours, theirs in zip(("dq", "p", "dkv"), found, expected, strict=True):
        _close(ours, theirs, what)


@pytest.mark.parametrize("top_k", [None, 3])
def test_compressed_attention_by_kernels(monkeypatch: pytest.MonkeyPatch, top_k: int | None) -> None:
    """Windows of tokens, entries and sinks: values as wide as keys, which the kernels have from lists."""
    s, d, rate = 9, 20, 2
    stop = torch.arange(1, s + 1, device=DEVICE).expand(B, -1)
    first = torch.tensor([[0] * s, [0] * 4 + [4] * 5], device=DEVICE)
    shapes = [(s, B, A, d), (s, B, d), (-(-s // rate), B, d), (s, B, 2, 12), (-(-s // rate), B, 12)]
    tensors = [noise(*shape, seed=i).to(DTYPE) for i, shape in enumerate(shapes)]
    tensors += [noise(s, B, 2, seed=5), noise(A, seed=6).to(DTYPE)]
    found = []
    for functions in (reference, kernel):
        monkeypatch.setattr(compressed_attention, "functions_for", lambda q, functions=functions: functions)
        total = torch.zeros(1, dtype=torch.float64, device=DEVICE)
        loss = None if top_k is None else IndexLoss(0.3, None, total)
        group: Any = PlannedGroup()
        attend = compressed_attention.CompressedCoreAttention(4, rate, top_k, 0.3, group, loss)
        q, kv, entries, index_q, index_k, weights, sink = own = [x.clone().requires_grad_() for x in tensors]
        index = None if top_k is None else Index(index_q, index_k, weights)
        y = attend(q, kv, entries, index, sink, first, stop)
        (y * noise(*y.shape, seed=7).to(DTYPE)).sum().backward()
        found.append([y.detach(), total, *(x.grad for x in own if x.grad is not None)])
    assert len(found[0]) == (6 if top_k is None else 9)
    for i, (expected, ours) in enumerate(zip(*found, strict=True)):
        _close(ours, expected, str(i))


def _blocks(shape: tuple[int, int, int, int], dtype: torch.dtype, functions: Any) -> list[Tensor]:
    """Outputs, loss and gradients of attention to chosen blocks of keys in two documents.

    The `shape` is s queries, a heads of d channels and blocks of `size` keys; values and keys are separate.
    """
    s, a, d, size = shape
    stop = torch.arange(1, s + 1, device=DEVICE).expand(B, -1)
    first = torch.where(stop > s // 2, s // 2, 0)
    shapes = [(s, B, a, d), (s, B, 2 * d), (s, B, 2, d), (s, B, d)]
    own = [noise(*x, seed=i).bfloat16().to(dtype).requires_grad_() for i, x in enumerate(shapes)]
    q, kv, index_q, index_k = own
    weights = torch.ones(s, B, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=DEVICE)
    total = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    attend = op.SparseAttention(3, d**-0.5, None, IndexLoss(0.3, None, total), size, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "functions_for", lambda q: functions)
        identity = torch.eye(d, dtype=dtype, device=DEVICE).repeat(a, 1)
        y, _ = attend(q, kv, Index(index_q, index_k, weights * d**-0.5), None, identity, first, stop)
        (y * noise(*y.shape, seed=7).to(dtype)).sum().backward()
    return [y.detach(), total, *(x.grad for x in own if x.grad is not None)]


def test_attention_to_blocks_by_kernels() -> None:
    found = [_blocks((11, A, 20, 2), DTYPE, functions) for functions in (reference, kernel)]
    assert len(found[0]) == 6
    for i, (expected, ours) in enumerate(zip(*found, strict=True)):
        _close(ours, expected, str(i))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_to_blocks_on_a_gpu(deterministic: bool) -> None:
    """Groups of 16 heads as in MiniMax-M3, in bf16 against float64."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = _blocks((700, 16, 128, 64), torch.bfloat16, kernel)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = _blocks((700, 16, 128, 64), torch.float64, reference)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.double() - theirs).norm() <= 2e-2 * theirs.norm(), str(i)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "block_maxima",
        "scores",
        "choose",
        "index_loss",
        "attend",
        "scores_backward",
        "queries_backward",
        "keys_backward",
        "hopper_attend",
        "hopper_queries_backward",
    ],
)
def test_compiles_for_hopper(name: str) -> None:
    """With the widths of DeepSeek-V3.2, in no more shared memory than there is."""
    command = [sys.executable, "-m", "tests.layers.sparse_attention.compile_kernel", name]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[1]) <= 227 * 1024, done.stdout
