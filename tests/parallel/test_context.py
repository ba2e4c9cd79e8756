"""Shards of sequences against positions written out by hand, and their general properties."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megafp8.parallel.context import (
    chunk_lengths,
    first,
    place_tokens,
    rank_order,
    rank_rows,
    shard_positions,
    slots_of,
)

CPU = torch.device("cpu")


def cu_seqlens(*lengths: list[int]) -> Tensor:
    """Of samples with documents of these lengths."""
    return torch.tensor([[0, *itertools.accumulate(row)] for row in lengths], dtype=torch.int32)


def test_eight_tokens_by_hand() -> None:
    assert [shard_positions(None, 8, rank, 2, CPU).tolist() for rank in range(2)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    shards = [shard_positions(None, 8, rank, 4, CPU).tolist() for rank in range(4)]
    assert shards == [[[0, 7]], [[1, 6]], [[2, 5]], [[3, 4]]]
    assert shard_positions(None, 8, 0, 1, CPU).tolist() == [list(range(8))]


def test_two_documents_by_hand() -> None:
    """Of 5 and 7 tokens, and of 12, in four slots of 3: those left over go to slot 0 first, then to 1, 2 and 3."""
    ends = cu_seqlens([5, 7], [0, 12])
    assert chunk_lengths(ends, 4).tolist() == [[[2, 1, 1, 1], [1, 2, 2, 2]], [[0, 0, 0, 0], [3, 3, 3, 3]]]
    assert place_tokens(ends, 4, 12).slot_bs[0].tolist() == [0, 0, 1, 2, 3, 0, 1, 1, 2, 2, 3, 3]
    assert shard_positions(ends, 12, 0, 2, CPU).tolist() == [[0, 1, 5, 4, 10, 11], [0, 1, 2, 9, 10, 11]]
    assert shard_positions(ends, 12, 1, 2, CPU).tolist() == [[2, 6, 7, 3, 8, 9], [3, 4, 5, 6, 7, 8]]


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12), ranks=st.sampled_from([1, 2, 3, 4]))
def test_every_token_once_and_equal_work(lengths: list[int], ranks: int) -> None:
    slots = 2 * ranks
    lengths = [*lengths, -sum(lengths) % slots or slots]
    s, ends = sum(lengths), cu_seqlens(lengths)
    shards = [shard_positions(ends, s, rank, ranks, CPU)[0].tolist() for rank in range(ranks)]
    assert sorted(position for shard in shards for position in shard) == list(range(s))
    chunks = chunk_lengths(ends, slots)[0]
    assert chunks.sum(0).tolist() == [s // slots] * slots
    assert chunks.sum(1).tolist() == lengths
    assert all(max(row) - min(row) <= 1 for row in chunks.tolist())
    for length, row in zip(lengths, chunks.tolist(), strict=True):  # a document's pairs of tokens, by rank
        before = [0, *itertools.accumulate(row)]
        work = [sum(before[i] * row[i] + row[i] * (row[i] + 1) / 2 for i in slots_of(r, ranks)) for r in range(ranks)]
        assert max(work) - min(work) <= 2 * length + 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_gathered_shards(ranks: int) -> None:
    """What all ranks hold, one after the other, has the tokens of earlier slots at these rows, in order."""
    ends, s = cu_seqlens([3, 20, 1], [24, 0, 0]), 24
    slot = place_tokens(ends, 2 * ranks, s).slot_bs
    gathered = torch.cat([shard_positions(ends, s, rank, ranks, CPU) for rank in range(ranks)], dim=1)
    assert torch.equal(gathered, rank_order(slot, ranks))
    for end in range(2 * ranks + 1):
        found = gathered.gather(
            1, rank_rows(slot, ranks).gather(1, first((slot >= end).byte(), end * (s // (2 * ranks))))
        )
        assert found.tolist() == [[i for i in range(s) if slot[row, i] < end] for row in range(2)]
