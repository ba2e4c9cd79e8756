"""The blocks of all ranks against the causal matrix, pair by pair."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from megafp8.context_parallel.blocks import STEP, plan, visible
from megafp8.context_parallel.split import shard_sequence

IDS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 23 + [1]])


def is_visible(query: int, key: int, window: int | None, ids_bs: Tensor | None, sample: int) -> bool:
    """Whether a query attends to a key, by definition."""
    near = query - key >= 0 and (window is None or query - key < window)
    return near and (ids_bs is None or bool(ids_bs[sample, query] == ids_bs[sample, key]))


def pairs_of_blocks(s: int, rank: int, ranks: int, window: int | None, ids_bs: Tensor | None, max_mask: int) -> Counter:
    """How often each pair (sample, query, key) is in the blocks of a rank."""
    pairs: Counter = Counter()
    shard = shard_sequence(torch.arange(s), rank, ranks, dim=0).tolist()
    for block in plan(s, rank, ranks, window=window, documents=ids_bs is not None, max_mask=max_mask):
        assert [shard[row] for row in block.rows] == list(block.queries)
        mask = torch.ones(1, 1, len(block.queries), len(block.keys), dtype=torch.bool)
        if block.kind == "masked":
            mask = visible(block.queries, block.keys, window, ids_bs, torch.device("cpu"))
            assert mask.shape[2:] == (len(block.queries), len(block.keys))
            assert mask.any(-1).all(), "a query without a key"
        elif block.kind == "causal":
            assert block.keys == block.queries
            mask = mask.tril()
        pairs.update((n, block.queries[i], block.keys[j]) for n, _, i, j in mask.nonzero().tolist())
    return pairs


@pytest.mark.parametrize("max_mask", [1, 30, 10**6])
@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_visible_pair_once(ranks: int, window: int | None, ids: Tensor | None, max_mask: int) -> None:
    samples = range(1 if ids is None else len(ids))
    for rank in range(ranks):
        queries = shard_sequence(torch.arange(24), rank, ranks, dim=0).tolist()
        expected = ((n, q, k) for n in samples for q in queries for k in range(24) if is_visible(q, k, window, ids, n))
        assert pairs_of_blocks(24, rank, ranks, window, ids, max_mask) == Counter(expected)


def test_without_a_mask_two_calls_a_chunk() -> None:
    kinds = [[block.kind for block in plan(32, r, 2, window=None, documents=False, max_mask=1)] for r in range(2)]
    assert kinds == [["causal", "causal", "whole"], ["causal", "causal", "whole", "whole"]]


def test_masks_are_small_and_far_keys_left_out() -> None:
    s, ranks, max_mask = 131_072, 8, 2**26
    for rank in range(ranks):
        blocks = plan(s, rank, ranks, window=None, documents=True, max_mask=max_mask)
        assert max(len(block.rows) * len(block.keys) for block in blocks) <= max_mask
        assert all(len(block.rows) % STEP == 0 for block in blocks)
        near = plan(s, rank, ranks, window=4096, documents=False, max_mask=max_mask)
        assert max(len(block.keys) for block in near) <= 4096 + s // (2 * ranks) + STEP
