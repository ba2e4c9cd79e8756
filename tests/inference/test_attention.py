"""Attention to pages against that of whole sequences, whatever the chunks, the pages and the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.inference.attention import PackedStep, PagedAttention
from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk, GrowingSequence
from megafp8.models.alibi import alibi_slopes
from megafp8.ops.attention import attention
from megafp8.ops.attention_mask import causal_mask
from megafp8.ops.attention_scores import Scores

HEADS, GROUPS, D, PAGE, LAYER = 4, 2, 8, 3, 5
CHUNKS = [[[0, 1, 2, 3, 4], [5], [6], [7, 8]], [[0], [1], [2, 3, 4, 5, 6, 7], [8]], [[0, 1], [2, 3, 4], [5, 6, 7], [8]]]
"""For each sequence its positions in each step."""
PAGES = [[7, 0, 3], [2, 8, 1], [4, 6, 5]]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "sinks": {"sink": True},
    "soft cap": {"softcap": 1.5, "window": 2},
    "alibi": {"alibi": True},
    "narrow values": {"value_width": 5},
    "padding": {"multiple": 8},
}


def _alibi(t: int) -> Tensor:
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)
    return slopes[:, None] * torch.arange(1 - t, t)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_sequences(kind: str) -> None:
    given = KINDS[kind]
    window, width, multiple = given.get("window"), given.get("value_width", D), given.get("multiple", 1)
    sink = torch.randn(HEADS, dtype=torch.float64) if "sink" in given else None
    n = len(PAGES[0]) * PAGE
    q, k, v = (torch.randn(n, len(PAGES), heads, D, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS))
    v[..., width:] = 0.0
    of_all = Scores(softcap=given.get("softcap"), distance_bias_ar=_alibi(n) if "alibi" in given else None)
    expected = attention(q, k, v, causal_mask(None, window, n, q.device), sink, of_all)
    cache = PagedCache(
        [LAYER], num_pages=9, page_size=PAGE, groups=GROUPS, width=D, value_width=width, dtype=torch.float64,
        device=q.device,
    )  # fmt: skip
    for step in range(len(CHUNKS[0])):
        own = sorted(((positions[step], i) for i, positions in enumerate(CHUNKS)), key=lambda x: len(x[0]) > 1)
        batch = [Chunk(GrowingSequence([], 9), at, at[0], PAGES[i][: at[-1] // PAGE + 1], last=True) for at, i in own]
        packed = PackedStep.pack(batch, cache, q.device, multiple)
        where = [(position, i) for at, i in own for position in at]
        where += where[-1:] * packed.padding
        assert len(where) % multiple == 0
        scores = Scores(softcap=of_all.softcap, distance_bias_ar=_alibi(packed.keys) if "alibi" in given else None)
        rows, columns = map(list, zip(*where))
        q_n1ad, k_n1gd, v_n1gd = (x[rows, columns].unsqueeze(1) for x in (q, k, v))
        found = PagedAttention(packed, cache, LAYER, window)(q_n1ad, k_n1gd, v_n1gd, sink, scores)
        torch.testing.assert_close(found, expected[rows, columns].unsqueeze(1), rtol=1e-12, atol=1e-12)
        assert packed.positions_1n[0].tolist() == rows
        assert [where[row] for row in packed.rows_r.tolist()] == [(at[-1], i) for at, i in own]
