"""Sharding of a sequence over context-parallel ranks: of 2n chunks, rank r has the r-th and the r-th from the end.

A causal query attends to all keys before it, so the last n-th of a sequence costs 2n - 1 times as much as the first. A
chunk and its mirror image together always cost the same, so all ranks have the same work (as in Megatron-LM and
Llama 3: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).

A rank's *shard* is its two chunks one after the other. An all-gather gives the shards in the order of ranks ("rank
order"), which is not that of the sequence.

Shapes: s sequence, n ranks, c = s / 2n tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of `rank`, counted along the sequence."""
    return rank, 2 * ranks - 1 - rank


def shard_sequence(x: Tensor, rank: int, ranks: int, *, dim: int) -> Tensor:
    """The s/n tokens of `rank`, of `x` whose sequence is `dim`."""
    assert x.shape[dim] % (2 * ranks) == 0, f"{x.shape[dim]} tokens cannot be sharded over {ranks} ranks"
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim)


def to_sequence_order(shards: Tensor, ranks: int) -> Tensor:
    """A copy of `[s, ...]` from rank order in the order of the sequence."""
    chunks = shards.chunk(2 * ranks)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])])


def to_rank_order(x: Tensor, ranks: int) -> Tensor:
    """A copy of `[s, ...]` from the order of the sequence in rank order."""
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[i] for rank in range(ranks) for i in chunks_of(rank, ranks)])
