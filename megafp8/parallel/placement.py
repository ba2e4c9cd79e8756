"""Choice of the documents of a sample that stay whole on one context-parallel rank.

If every document is cut over all ranks (`parallel.context`), all ranks have the same work. But the chunks of short
documents waste much of a kernel's tiles, and every key travels to every rank. A whole document needs no keys of other
ranks. So only the longest documents are cut, and each of the others goes to the rank with the least work that has room.
The cut documents fill the ranks' remaining tokens. A count of pairs and gathered tokens decides which are the longest.

Megatron-LM's dynamic context parallelism has the same aim: groups of 1, 2, 4, ... ranks process samples of different
lengths (developer.nvidia.com/blog/speeding-up-variable-length-training-with-dynamic-context-parallelism-and-nvidia-
megatron-core). Here every rank has s / n tokens of each micro-batch, so that only attention differs.

The placement is a pure function of the documents' lengths: all ranks of a group compute the same one.

Shapes: s sequence, n ranks; b micro-batch, m documents of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.parallel.context import slots_of, whole_slot_of

_TILE = 128
"""Queries and keys of a kernel's tile. A chunk's last tile has on average half as many."""
_GATHER_PAIRS = 300
"""Pairs of a query and a key that take as long as one gathered token on a rank.

Counted for Llama-3-8B on H200: 4 kB of keys and values move three times at 340 GB/s, 40 kB are copied and summed, and
pairs take 500 TFLOP/s.
"""
_PARTS = (8, 4, 2, 1)
"""A rank gathers nothing or one of these parts of its tokens, because CUDA graphs need few different shapes."""


class Placement(NamedTuple):
    """Placement of the documents of a micro-batch.

    Attributes:
        chunks_bml: Tokens of each document in each slot (`parallel.context`), int32 `[b, m, 3n]`.
        gathered: Tokens of each rank, the last of its shard, whose keys and values all ranks need. No slot of cut
            documents has more than half of them.
    """

    chunks_bml: Tensor
    gathered: int


def place_documents(cu_seqlens_bm: Tensor, ranks: int) -> Placement:
    """Return the placement of documents that `cu_seqlens_bm` (int32 `[b, m + 1]`, in host memory) delimits."""
    samples = [_place_sample(np.diff(ends).astype(np.int64), ranks) for ends in cu_seqlens_bm.numpy()]
    chunks_bml = torch.from_numpy(np.stack([chunks for chunks, _ in samples]))
    return Placement(chunks_bml, max(gathered for _, gathered in samples))


def _place_sample(lengths_m: NDArray[np.int64], ranks: int) -> tuple[NDArray[np.int32], int]:
    """Return the fastest of several placements: the tokens `[m, 3n]` of each slot, and a rank's gathered tokens."""
    tokens = int(lengths_m.sum()) // ranks
    owners = [_owners(lengths_m, ranks, tokens // part) for part in (1, 2, 4, 8, 16)]
    owners.append(np.full(len(lengths_m), -1))
    best = min(owners, key=lambda owner_m: _cost(lengths_m, owner_m, ranks))
    return _chunks(lengths_m, best, ranks), _gathered(_rooms(lengths_m, best, ranks), tokens)


def _owners(lengths_m: NDArray[np.int64], ranks: int, longest: int) -> NDArray[np.int64]:
    """Return the rank that has each document, -1 if it is cut, as are all with more than `longest` tokens."""
    tokens = int(lengths_m.sum()) // ranks
    owner_m = np.full(len(lengths_m), -1)
    rooms = [tokens - int(lengths_m[lengths_m > longest].sum()) // ranks] * ranks
    work = [0.0] * ranks
    for document in np.argsort(-lengths_m, kind="stable").tolist():
        length = int(lengths_m[document])
        with_room = [rank for rank in range(ranks) if rooms[rank] >= length]
        if not 0 < length <= longest or not with_room:
            continue
        rank = min(with_room, key=work.__getitem__)
        owner_m[document] = rank
        rooms[rank] -= length
        work[rank] += _whole_pairs(length)
    return owner_m


def _rooms(lengths_m: NDArray[np.int64], owner_m: NDArray[np.int64], ranks: int) -> list[int]:
    """Return the tokens of cut documents that each rank has."""
    tokens = int(lengths_m.sum()) // ranks
    return [tokens - int(lengths_m[owner_m == rank].sum()) for rank in range(ranks)]


def _gathered(rooms: Sequence[int], tokens: int) -> int:
    """Return the smallest number of gathered tokens of a rank, of those that may occur, that includes all rooms."""
    sizes = [0, *(2 * -(-tokens // (2 * part)) for part in _PARTS)]
    return min(size for size in sizes if size >= max(rooms))


def _whole_pairs(length: float) -> float:
    """Return the pairs of a query and a key that tiles of a whole document contain."""
    return length * (length + 2 * _TILE) / 2


def _cost(lengths_m: NDArray[np.int64], owner_m: NDArray[np.int64], ranks: int) -> float:
    """Return the pairs of the slowest rank, and those that gathering takes as long as."""
    rooms = _rooms(lengths_m, owner_m, ranks)
    cut = lengths_m[owner_m < 0].astype(np.float64)
    # Each rank has two chunks of a cut document: together ℓ / n queries, before which there are ℓ keys.
    cut_pairs = float((cut * cut / (2 * ranks) + cut * _TILE * (1 / ranks + 0.5)).sum())
    share = ranks / max(1, sum(rooms))
    slowest = max(
        sum(map(_whole_pairs, lengths_m[owner_m == rank].tolist())) + cut_pairs * share * room
        for rank, room in enumerate(rooms)
    )
    return slowest + _GATHER_PAIRS * ranks * _gathered(rooms, int(lengths_m.sum()) // ranks)


def _chunks(lengths_m: NDArray[np.int64], owner_m: NDArray[np.int64], ranks: int) -> NDArray[np.int32]:
    """Return the tokens of each document in each slot. Slots share cut documents in proportion to their room."""
    chunks = np.zeros((len(lengths_m), 3 * ranks), dtype=np.int32)
    left = np.zeros(2 * ranks, dtype=np.int64)
    for rank, room in enumerate(_rooms(lengths_m, owner_m, ranks)):
        low, high = slots_of(rank, ranks)
        left[low], left[high] = room - room // 2, room // 2
    for document, owner in enumerate(owner_m.tolist()):
        length = int(lengths_m[document])
        if owner >= 0:
            chunks[document, whole_slot_of(owner, ranks)] = length
        elif length:
            whole, rest = np.divmod(length * left, left.sum())
            whole[np.argsort(-rest, kind="stable")[: length - int(whole.sum())]] += 1
            chunks[document, : 2 * ranks] = whole
            left -= whole
    return chunks
