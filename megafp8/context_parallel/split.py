"""How a sequence is cut over context-parallel ranks: in 2n chunks, of which rank r has the r-th and the r-th last.

A causal query attends to all keys before it, so the last n-th of a sequence costs 2n - 1 times what the first does.
A chunk and its mirror image cost the same together whichever they are, so every rank has as much to do as the others
(Megatron-LM's and Llama 3's cut: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).

A rank holds its two chunks one after the other; its *shard* is that, along whichever dim the sequence is. What an
all-gather over the ranks gives is shard after shard: `in_sequence` puts it in order, `by_rank` is the inverse.

Shapes: s sequence, n ranks, c = s / 2n tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks, counted along the sequence, that `rank` has. Pure."""
    return rank, 2 * ranks - 1 - rank


def cut(x: Tensor, rank: int, ranks: int, *, dim: int) -> Tensor:
    """The shard of `rank`: of `x`, whose sequence s is `dim`, its s/n tokens. Pure."""
    assert x.shape[dim] % (2 * ranks) == 0, f"{x.shape[dim]} tokens cannot be cut over {ranks} ranks"
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, ranks)], dim)


def in_sequence(shards: Tensor, ranks: int) -> Tensor:
    """`[s, ...]`, shard after shard, in the order of the sequence. A copy. Pure."""
    chunks = shards.chunk(2 * ranks)
    heads, tails = chunks[0::2], chunks[1::2]
    return torch.cat([*heads, *reversed(tails)])


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """`[s, ...]` in the order of the sequence as shard after shard. A copy. Pure."""
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[i] for rank in range(ranks) for i in chunks_of(rank, ranks)])
