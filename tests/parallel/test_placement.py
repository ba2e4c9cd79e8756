"""Placements of documents: what every one must keep, and the choice between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.parallel import placement
from megafp8.parallel.context import shard_positions, slots_of
from megafp8.parallel.placement import place_documents

CPU = torch.device("cpu")


def cu_seqlens(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([[0, *itertools.accumulate(lengths)]], dtype=torch.int32)


@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=20), ranks=st.sampled_from([1, 2, 3, 4, 8]))
def test_every_token_once_and_rooms_within_bounds(lengths: list[int], ranks: int) -> None:
    lengths = [*lengths, -sum(lengths) % (2 * ranks) or 2 * ranks]
    s, ends = sum(lengths), cu_seqlens(lengths)
    chunks_bml, gathered = place_documents(ends, ranks)
    chunks = chunks_bml[0]
    assert (chunks >= 0).all()
    assert chunks.sum(1).tolist() == lengths
    shards = [shard_positions(ends, s, rank, ranks, CPU, chunks_bml)[0].tolist() for rank in range(ranks)]
    assert sorted(position for shard in shards for position in shard) == list(range(s))
    assert {len(shard) for shard in shards} == {s // ranks}
    whole = chunks[:, 2 * ranks :]
    assert ((whole > 0).sum(1) <= 1).all()
    assert ((whole.sum(1) == 0) | (chunks[:, : 2 * ranks].sum(1) == 0)).all()  # cut or whole
    for rank, shard in enumerate(shards):
        low, high = slots_of(rank, ranks)
        assert max(chunks[:, low].sum(), chunks[:, high].sum()) * 2 <= gathered <= s // ranks
        own = [range(sum(lengths[:i]), sum(lengths[: i + 1])) for i in whole[:, rank].nonzero().flatten()]
        expected = [position for document in own for position in document]
        assert shard[: len(expected)] == expected  # whole documents come first, so that the others are gathered


@pytest.mark.parametrize(
    ("lengths", "whole", "gathered"),
    [
        ([4096] * 8, 8, 0),  # all fit
        ([32768], 0, 8192),  # one document is cut, as without placement
        ([8192, *[1024] * 24], 24, 2048),  # the long one is cut, and a quarter of the tokens is gathered
        ([9000, 8000, *[1024] * 15, 408], 13, 8192),  # one rank has a long document and few others
    ],
)
def test_choice(lengths: list[int], whole: int, gathered: int) -> None:
    """On four ranks."""
    placed = place_documents(cu_seqlens(lengths), 4)
    assert int((placed.chunks_bml[0, :, 8:].sum(1) > 0).sum()) == whole
    assert placed.gathered == gathered


def test_the_chosen_placement_is_balanced() -> None:
    """Place 20 samples of 131,072 tokens, with log-normal lengths of mean 4,096, on four ranks.

    In most samples the slowest rank has at most 1.05 times the mean pairs of a query and a key. On average less than
    half of the tokens are cut.
    """
    rng, excess, cut = np.random.default_rng(0), [], []
    for _ in range(20):
        lengths: list[int] = []
        while sum(lengths) < 131_072:
            lengths.append(min(131_072 - sum(lengths), max(16, int(rng.lognormal(np.log(4096) - 0.5, 1.0)))))
        chunks = place_documents(cu_seqlens(lengths), 4).chunks_bml[0].double()
        before = chunks[:, :8].cumsum(1) - chunks[:, :8]
        pairs = chunks * (chunks + 1) / 2
        pairs[:, :8] += chunks[:, :8] * before
        work = [sum(pairs[:, slot].sum() for slot in (8 + rank, *slots_of(rank, 4))) for rank in range(4)]
        excess.append(float(max(work) / (sum(work) / 4)))
        cut.append(float(chunks[:, :8].sum()) / 131_072)
    assert np.median(excess) < 1.05
    assert np.mean(cut) < 0.5


def test_rounded_parts_of_a_rank() -> None:
    assert [placement._gathered([room], 100) for room in (0, 1, 13, 14, 15, 50, 51, 100)] == [
        0, 14, 14, 14, 26, 50, 100, 100,
    ]  # fmt: skip
