"""The blocks of all ranks against the causal square, pair by pair."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megafp8.context_parallel.blocks import STEP, plan, visible
from megafp8.context_parallel.split import cut

CPU = torch.device("cpu")


def seen(s: int, rank: int, ranks: int, window: int | None, ids_bs: torch.Tensor | None, most: int) -> Counter:
    """How often each pair (sample, query, key) is in the blocks of a rank."""
    pairs: Counter = Counter()
    shard = cut(torch.arange(s), rank, ranks, dim=0).tolist()
    for block in plan(s, rank, ranks, window=window, documents=ids_bs is not None, most=most):
        assert [shard[row] for row in block.rows] == list(block.queries)
        if block.kind == "masked":
            mask = visible(block.queries, block.keys, window, ids_bs, CPU)
            assert mask.shape[2:] == (len(block.queries), len(block.keys))
            assert mask.any(-1).all(), "a row that sees nothing"
        elif block.kind == "causal":
            assert block.keys == block.queries
            mask = torch.ones(len(block.queries), len(block.keys), dtype=torch.bool).tril()[None, None]
        else:
            mask = torch.ones(1, 1, len(block.queries), len(block.keys), dtype=torch.bool)
        for sample, _, i, j in mask.nonzero().tolist():
            pairs[sample, block.queries[i], block.keys[j]] += 1
    return pairs


def expected(s: int, rank: int, ranks: int, window: int | None, ids_bs: torch.Tensor | None) -> Counter:
    pairs: Counter = Counter()
    for sample in range(1 if ids_bs is None else len(ids_bs)):
        for q in cut(torch.arange(s), rank, ranks, dim=0).tolist():
            for k in range(q + 1):
                near = window is None or q - k < window
                if near and (ids_bs is None or ids_bs[sample, q] == ids_bs[sample, k]):
                    pairs[sample, q, k] += 1
    return pairs


IDS = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 23 + [1]])


@pytest.mark.parametrize("most", [1, 30, 10**6])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_visible_pair_once(ranks: int, window: int | None, documents: bool, most: int) -> None:
    ids = IDS if documents else None
    for rank in range(ranks):
        assert seen(24, rank, ranks, window, ids, most) == expected(24, rank, ranks, window, ids)


def test_without_a_mask_two_calls_a_chunk() -> None:
    kinds = [[block.kind for block in plan(32, r, 2, window=None, documents=False, most=1)] for r in range(2)]
    assert kinds == [["causal", "causal", "whole"], ["causal", "causal", "whole", "whole"]]


def test_masks_are_small_and_far_keys_left_out() -> None:
    s, ranks, most = 131_072, 8, 2**26
    for rank in range(ranks):
        blocks = plan(s, rank, ranks, window=None, documents=True, most=most)
        assert max(len(block.rows) * len(block.keys) for block in blocks) <= most
        assert all(len(block.rows) % STEP == 0 for block in blocks)
        near = plan(s, rank, ranks, window=4096, documents=False, most=most)
        assert max(len(block.keys) for block in near) <= 4096 + s // (2 * ranks) + STEP
