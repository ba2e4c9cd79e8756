"""Shards of a sequence against positions written out by hand, and their general properties."""

from __future__ import annotations

import pytest
import torch

from megafp8.context_parallel.split import chunks_of, shard_sequence, to_rank_order, to_sequence_order


def test_shards_of_eight_tokens_by_hand() -> None:
    tokens = torch.arange(8)
    assert [shard_sequence(tokens, rank, 2, dim=0).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [shard_sequence(tokens, rank, 4, dim=0).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert shard_sequence(tokens, 0, 1, dim=0).tolist() == tokens.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_cover_the_sequence_with_equal_causal_work(ranks: int) -> None:
    s = 2 * ranks * 5
    shards = [shard_sequence(torch.arange(s), rank, ranks, dim=0).tolist() for rank in range(ranks)]
    assert sorted(position for shard in shards for position in shard) == list(range(s))
    work = {sum(position + 1 for position in shard) for shard in shards}
    assert len(work) == 1, "unequal work"
    assert sorted(i for rank in range(ranks) for i in chunks_of(rank, ranks)) == list(range(2 * ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_shards_come_back_in_order(ranks: int) -> None:
    x = torch.randn(2 * ranks * 3, 2, 5)
    gathered = torch.cat([shard_sequence(x, rank, ranks, dim=0) for rank in range(ranks)])
    assert torch.equal(to_sequence_order(gathered, ranks), x)
    assert torch.equal(to_rank_order(x, ranks), gathered)
    last = shard_sequence(x, ranks - 1, ranks, dim=0)
    assert torch.equal(shard_sequence(x.transpose(0, 1), ranks - 1, ranks, dim=1), last.transpose(0, 1))
