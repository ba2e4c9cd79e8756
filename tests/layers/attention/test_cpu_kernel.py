"""Attention in inference mode on a CPU against the reference, in float64 and in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.layers.attention import cpu_kernel as cpu_attention
from megafp8.layers.attention import reference as attention_reference
from megafp8.layers.attention.mask import CAUSAL, AttentionMask
from megafp8.layers.attention.op import attention
from megafp8.layers.attention.scores import PLAIN, Scores

T, B, D = 37, 3, 16


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("s", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_at_positions(
    dtype: torch.dtype, s: int, window: int | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences of other lengths, with keys behind their ends that nobody may read."""
    q, k, v = (torch.randn(n, B, heads, D, dtype=dtype) for n, heads in ((s, 4), (T, groups), (T, groups)))
    positions = torch.tensor([[3], [20], [T - s]]) + torch.arange(s)
    mask = AttentionMask(window=window, positions_bs=positions)
    scores = Scores(0.3)
    expected, _ = attention_reference.forward(*(x.double() for x in (q, k, v)), mask, scores)
    for sample, last in enumerate(positions[:, -1].tolist()):
        k[last + 1 :, sample], v[last + 1 :, sample] = 1e4, -1e4
    _check(q, k, v, mask, scores, expected, monkeypatch)


@pytest.mark.parametrize("segments", ["one", "equal", "fewer queries"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_segments(
    dtype: torch.dtype, groups: int, window: int | None, segments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With empty ones, of lengths that differ between samples, and tokens behind the last."""
    keys = torch.tensor([[0, 9, 9, 30], [0, 1, 20, 21], [0, 12, 24, T]], dtype=torch.int32)
    queries = keys if segments != "fewer queries" else torch.tensor([[0, 4, 4, 20], [0, 1, 3, 3], [0, 9, 10, 22]])
    s = T if segments != "fewer queries" else 24
    mask = AttentionMask(window=window)
    if segments != "one":
        mask = AttentionMask(queries.int(), keys, window=window)
    q, k, v = (torch.randn(n, B, heads, D, dtype=dtype) for n, heads in ((s, 4), (T, groups), (T, groups)))
    scores = Scores(0.3)
    expected, _ = attention_reference.forward(*(x.double() for x in (q, k, v)), mask, scores)
    is_plain = segments == "one" and window is None
    _check(q, k, v, mask, scores, expected, monkeypatch, called=not is_plain)


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scores: Scores, expected: Tensor,
    monkeypatch: pytest.MonkeyPatch, *, called: bool = True,
) -> None:  # fmt: skip
    calls: list[int] = []
    own = cpu_attention.attention
    monkeypatch.setattr(cpu_attention, "attention", lambda *given: calls.append(1) or own(*given))
    with torch.inference_mode():
        found = attention(q, k, v, mask, None, scores)
    assert bool(calls) == called, "another kernel ran"
    assert found.dtype == q.dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-12 if q.dtype == torch.float64 else 0.02)


@pytest.mark.parametrize("positions", [False, True])
def test_values_narrower_than_keys(positions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed by the flash kernel, padded; with one mask for sequences of several lengths."""
    for t, b in ((9, 1), (T, B), (T - 1, 2)):
        s = 4 if positions else t
        mask = AttentionMask(positions_bs=torch.arange(t - s, t)[None]) if positions else CAUSAL
        q, k, v = (torch.randn(n, b, 4, d, dtype=torch.float64) for n, d in ((s, D), (t, D), (t, 5)))
        expected, _ = attention_reference.forward(q, k, v, mask, Scores(0.3))
        assert expected.shape[-1] == 5
        _check(q, k, v, mask, Scores(0.3), expected, monkeypatch)


def test_what_it_does_not_compute() -> None:
    mask = AttentionMask(positions_bs=torch.zeros(1, 1, dtype=torch.int64))
    assert cpu_attention.computes(mask, PLAIN, None)
    assert not cpu_attention.computes(mask, PLAIN, torch.zeros(4))
    assert not cpu_attention.computes(mask, Scores(softcap=2.0), None)
    assert cpu_attention.computes(AttentionMask(window=5), PLAIN, None)
    assert not cpu_attention.computes(AttentionMask(causal=False), PLAIN, None)
    assert not cpu_attention.computes(AttentionMask(prefix_b=torch.ones(1, dtype=torch.int64)), PLAIN, None)
