"""Shards against lists of positions written out by hand, and the properties that any cut must have."""

from __future__ import annotations

import pytest
import torch

from megafp8.context_parallel.split import by_rank, chunks_of, cut, in_sequence


def test_shards_of_eight_tokens_by_hand() -> None:
    tokens = torch.arange(8)
    assert [cut(tokens, rank, 2, dim=0).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [cut(tokens, rank, 4, dim=0).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert cut(tokens, 0, 1, dim=0).tolist() == tokens.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_out_the_sequence_and_its_causal_work(ranks: int) -> None:
    s = 2 * ranks * 5
    shards = [cut(torch.arange(s), rank, ranks, dim=0).tolist() for rank in range(ranks)]
    assert sorted(position for shard in shards for position in shard) == list(range(s))
    work = {sum(position + 1 for position in shard) for shard in shards}
    assert len(work) == 1, "a rank sees more keys than another"
    assert sorted(i for rank in range(ranks) for i in chunks_of(rank, ranks)) == list(range(2 * ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_shards_come_back_in_order(ranks: int) -> None:
    x = torch.randn(2 * ranks * 3, 2, 5)
    gathered = torch.cat([cut(x, rank, ranks, dim=0) for rank in range(ranks)])
    assert torch.equal(in_sequence(gathered, ranks), x)
    assert torch.equal(by_rank(x, ranks), gathered)
    assert torch.equal(cut(x.transpose(0, 1), ranks - 1, ranks, dim=1), cut(x, ranks - 1, ranks, dim=0).transpose(0, 1))
