"""Attention's kernels against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megafp8.layers.attention import kernel, reference
from megafp8.layers.attention.mask import AttentionMask
from megafp8.layers.attention.scores import AttentionDropout, Scores, kept
from tests.kernels import DEVICE
from tests.layers.attention.test_op import MASKS, B, inputs, scores_of
from tests.marks import slow_but

KINDS = ("plain", "softcap", "bias", "dropout", "all")
SMALL = kernel._Tiles(*[kernel._Tile(16, 16, 4, 1)] * 4)
UNEQUAL = kernel._Tiles(*[kernel._Tile(16, 32, 4, 1)] * 2, kernel._Tile(32, 16, 4, 1), kernel._Tile(16, 16, 4, 1))


def on_device(mask: AttentionMask, scores: Scores) -> tuple[AttentionMask, Scores]:
    tensors = {name: x.to(DEVICE) for name, x in vars(mask).items() if isinstance(x, torch.Tensor)}
    if mask.cu_seqlens_q is mask.cu_seqlens_k and mask.cu_seqlens_q is not None:
        tensors["cu_seqlens_k"] = tensors["cu_seqlens_q"]
    bias, dropout = scores.distance_bias_ar, scores.dropout
    return replace(mask, **tensors, derived={}), replace(
        scores,
        distance_bias_ar=None if bias is None else bias.to(DEVICE),
        dropout=None if dropout is None else dropout._replace(sample_b=dropout.sample_b.to(DEVICE)),
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_but(
        [(name, kind) for name in MASKS for kind in KINDS],
        ("documents window", "all"), ("parts whole", "dropout"),
    ),
)  # fmt: skip
def test_equals_the_reference(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, and, in the interpreter, in fp32: there all products are exact."""
    d, groups, tiles = (24, 1, SMALL) if len(name + kind) % 2 else (16, 2, UNEQUAL)
    monkeypatch.setattr(kernel, "_tiles", lambda *_: tiles)
    s, t, small = MASKS[name]
    total = s if small.positions_bs is None else t
    if small.visible is not None:
        small = replace(small, visible=small.visible[:, :2])
    mask, scores = on_device(small, scores_of(kind, total, t, 2, torch.float32))
    q, k, v, do = (
        x.to(torch.float16 if DEVICE == "cuda" else torch.float32)
        for x in inputs(s, t, 2, groups, d, torch.float64, DEVICE)
    )
    o, lse = reference.forward(q, k, v, mask, scores)
    found, found_lse = kernel.forward(q, k, v, mask, scores)
    tolerance = 3e-3 if DEVICE == "cuda" else 2e-5
    torch.testing.assert_close(found_lse, lse, rtol=tolerance, atol=tolerance)
    bias_grad = scores.distance_bias_ar is not None
    expected = o, *reference.backward(do, q, k, v, o, lse, mask, scores, bias_grad)
    all_found = found, *kernel.backward(do, q, k, v, o, lse, mask, scores, bias_grad)
    for what, ours, theirs in zip(("o", "dq", "dk", "dv", "dbias"), all_found, expected, strict=True):
        assert (ours is None) == (theirs is None) == (what == "dbias" and not bias_grad)
        if ours is not None and theirs is not None:
            assert (ours - theirs).abs().max() < 4 * tolerance * theirs.abs().max(), what


@pytest.mark.parametrize("name", slow_but(MASKS, "documents window", "parts whole", "visible"))
def test_the_largest_score_equals_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    d, groups, tiles = (24, 1, SMALL) if len(name) % 2 else (16, 2, UNEQUAL)
    monkeypatch.setattr(kernel, "_tiles", lambda *_: tiles)
    s, t, small = MASKS[name]
    if small.visible is not None:
        small = replace(small, visible=small.visible[:, :2])
    mask, scores = on_device(small, Scores(scale=0.3))
    q, k, _, _ = (x.half() for x in inputs(s, t, 2, groups, d, torch.float64, DEVICE))
    expected = reference.largest(q, k, mask, scores)
    torch.testing.assert_close(kernel.largest(q, k, mask, scores), expected, rtol=1e-6, atol=1e-6)


def test_dropped_probabilities_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 0, and values that are unit vectors: the output has the probabilities of 16 keys."""
    monkeypatch.setattr(kernel, "_tiles", lambda *_: SMALL)
    s, t = 24, 20
    sample_b = torch.tensor([2**33 + 2**32 - 1, 3], device=DEVICE)
    dropout = AttentionDropout(0.6, (2**31 + 1, 77), sample_b, first_head=1000)
    scores = Scores(dropout=dropout)
    mask = AttentionMask(causal=False)
    zeros = torch.zeros(t, B, 2, 16, dtype=torch.float16, device=DEVICE)
    for first in range(0, t, 16):
        v = zeros.clone()
        for key in range(first, min(first + 16, t)):
            v[key, :, :, key - first] = 1
        o, _ = kernel.forward(zeros.new_zeros(s, B, 2, 16), zeros, v, mask, scores)
        for sample in range(B):
            keys = slice(first, min(first + 16, t))
            keep = kept(dropout, dropout.sample_b[sample], 2, torch.arange(s, device=DEVICE), keys)
            assert torch.equal(o[:, sample, :, : keys.stop - first].transpose(0, 1) > 0, keep)
            assert 0.3 < keep.double().mean() < 0.5


def test_bf16_and_a_width_that_is_no_power_of_two() -> None:
    q, k, v, do = inputs(70, 70, 2, 1, 40, torch.bfloat16, DEVICE)
    mask, scores = AttentionMask(), Scores(softcap=3.0)
    exact = [x.double() for x in (q, k, v)]
    o, lse = reference.forward(*exact, mask, scores)
    expected = o, *reference.backward(do.double(), *exact, o, lse, mask, scores, False)[:3]
    found, found_lse = kernel.forward(q, k, v, mask, scores)
    gradients = kernel.backward(do, q, k, v, found, found_lse, mask, scores, False)
    for ours, theirs in zip((found, *gradients[:3]), expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() / theirs.norm() < 2**-7


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("d", "kind"), [(64, "plain"), (128, "all"), (256, "all")])
def test_compiles_for_hopper(d: int, kind: str) -> None:
    """And needs no more shared memory than it has. The interpreter accepts what the compiler refuses."""
    command = [sys.executable, "-m", "tests.layers.attention.compile_kernel", str(d), kind]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(int(line.split()[-1]) <= 227 * 1024 for line in lines), lines


@pytest.mark.parametrize(
    ("mask", "first", "to"),
    [
        (AttentionMask(), [0, 1, 2], [3, 3, 3]),
        (AttentionMask(window=7), [0, 1, 2], [2, 3, 3]),
        (AttentionMask(causal=False, window=2), [0, 0, 1], [2, 3, 3]),
        (AttentionMask(prefix_b=torch.tensor([17, 0])), [[0, 0, 2], [0, 1, 2]], [[3, 3, 3], [3, 3, 3]]),
        (AttentionMask(*[torch.tensor([[0, 16, 16, 32]])] * 2), [0, 1, 0], [1, 2, 0]),
    ],
)
def test_blocks_of_keys_skip_queries(mask: AttentionMask, first: list[int], to: list[int]) -> None:
    """Of 16 queries and 16 keys each, of 40."""
    read = kernel._read(mask, 40, 40, torch.device("cpu"))
    found = kernel._query_blocks(mask, read, 40, 40, kernel._Tile(16, 16, 4, 1))
    assert [x.tolist() for x in found] == [x if isinstance(x[0], list) else [x] for x in (first, to)]
