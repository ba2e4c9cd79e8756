"""Attention in inference mode on a CPU against the reference, in float64 and in bf16."""

from __future__ import annotations

import pytest
import torch

from megafp8.ops import attention_reference, cpu_attention
from megafp8.ops.attention import attention
from megafp8.ops.attention_mask import AttentionMask
from megafp8.ops.attention_scores import PLAIN, Scores

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
    calls = []
    own = cpu_attention.attention
    monkeypatch.setattr(cpu_attention, "attention", lambda *given: calls.append(1) or own(*given))
    with torch.inference_mode():
        found = attention(q, k, v, mask, None, scores)
    assert calls, "another kernel ran"
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.02)


def test_what_it_does_not_compute() -> None:
    mask = AttentionMask(positions_bs=torch.zeros(1, 1, dtype=torch.int64))
    assert cpu_attention.computes(mask, PLAIN, None)
    assert not cpu_attention.computes(mask, PLAIN, torch.zeros(4))
    assert not cpu_attention.computes(mask, Scores(softcap=2.0), None)
    assert not cpu_attention.computes(AttentionMask(), PLAIN, None)
