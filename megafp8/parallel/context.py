"""Sharding of sequences over context-parallel ranks, such that causal attention costs every rank the same.

A causal query attends to all keys before it in its document, so the last n-th of a document costs 2n - 1 times as much
as the first. Each document is therefore split into 2n chunks of equal length. Rank r gets the r-th chunk and the r-th
chunk from the end; together, their cost is the same for all ranks. For a single document this is the scheme of
Megatron-LM and Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2); for packed documents, the scheme of
Transformer Engine without its padding.

*Slot* i holds the i-th chunks of all documents of a sample. Tokens that are left over when a document is split go to
one slot after the other, from document to document, so that all slots have s / 2n tokens. A rank's *shard* is slot r
followed by slot 2n - 1 - r. An all-gather concatenates the shards in the order of ranks ("rank order").

Documents may also stay whole on one rank (`parallel.placement`). The whole documents of rank r are in slot 2n + r, with
which its shard then begins. Slots may have different numbers of tokens in this case, but all shards have s / n.

For a model that passes states from token to token, the whole sample is split into 2n slots, not each document: every
slot then has one initial state. The costs of the ranks differ if a few documents are long.

Shapes: s sequence, n ranks, c = s / 2n tokens of a slot; b micro-batch, m documents of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def one_segment(s: int, device: torch.device) -> Tensor:
    """Return `cu_seqlens` `[1, 2]` of sequences with one segment of s tokens, made on the device for CUDA graphs."""
    return torch.arange(0, s + 1, s, dtype=torch.int32, device=device)[None]


def slots_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two slots of `rank` that have chunks of documents."""
    return rank, 2 * ranks - 1 - rank


def whole_slot_of(rank: int, ranks: int) -> int:
    """Return the slot of the documents that are whole on `rank`."""
    return 2 * ranks + rank


def chunk_lengths(cu_seqlens_bm: Tensor, slots: int) -> Tensor:
    """Return the number of tokens of each document in each slot, `[b, m, slots]`.

    `cu_seqlens_bm`, int32 `[b, m + 1]`, holds the first token of each document and s, which must be a multiple of
    `slots`.
    """
    lengths_bm = cu_seqlens_bm.diff(dim=1)
    rest_bm = lengths_bm % slots
    first_bm = rest_bm.cumsum(1) - rest_bm  # slot (modulo slots) that gets the first leftover token
    slot = torch.arange(slots, device=cu_seqlens_bm.device)
    gets_one = (slot - first_bm[..., None]) % slots < rest_bm[..., None]
    return (lengths_bm // slots)[..., None] + gets_one


class DocumentPlacement(NamedTuple):
    """Document, place in the document and slot of each token, `[b, s]` int64; `lengths_bml` are `chunk_lengths`."""

    lengths_bml: Tensor
    document_bs: Tensor
    offset_bs: Tensor
    slot_bs: Tensor


def place_tokens(
    cu_seqlens_bm: Tensor, slots: int, s: int, *, cuts_documents: bool = True, chunks_bml: Tensor | None = None
) -> DocumentPlacement:
    """Return the document and the slot of each token of a sample.

    If `cuts_documents` is True, each document is split into chunks; otherwise the whole sample is split. `chunks_bml`
    has the number of tokens of each document in each slot; by default they are equal, and no document is whole.
    """
    position = torch.arange(s, device=cu_seqlens_bm.device)
    position_bs = position.expand(cu_seqlens_bm.shape[0], s).contiguous()
    starts, ends = cu_seqlens_bm[:, :-1].long(), cu_seqlens_bm[:, 1:].contiguous()
    document_bs = torch.searchsorted(ends, position_bs, right=True)
    offset_bs = position_bs - starts.gather(1, document_bs)
    if not cuts_documents:
        slot_ends = torch.arange(1, slots + 1, device=cu_seqlens_bm.device) * (s // slots)
        before_bml = (slot_ends - starts[..., None]).clamp(min=0).minimum((ends.long() - starts)[..., None])
        lengths_bml = before_bml.diff(dim=-1, prepend=torch.zeros_like(before_bml[..., :1]))
        return DocumentPlacement(lengths_bml, document_bs, offset_bs, position_bs // (s // slots))
    lengths_bml = chunk_lengths(cu_seqlens_bm, slots) if chunks_bml is None else chunks_bml
    chunk_ends = lengths_bml.cumsum(-1)
    slot_bs = torch.zeros_like(position_bs)
    for slot in range(lengths_bml.shape[-1] - 1):
        slot_bs += chunk_ends[..., slot].gather(1, document_bs) <= offset_bs
    return DocumentPlacement(lengths_bml, document_bs, offset_bs, slot_bs)


def rank_order(slot_bs: Tensor, ranks: int) -> Tensor:
    """Return the positions of the tokens in rank order (tokens of rank 0, then rank 1, ...), `[b, s]`.

    `slot_bs` is the slot of each token.
    """
    whole_bs = slot_bs >= 2 * ranks
    rank_bs = torch.where(whole_bs, slot_bs - 2 * ranks, torch.minimum(slot_bs, 2 * ranks - 1 - slot_bs))
    place_bs = torch.where(whole_bs, 0, torch.where(slot_bs < ranks, 1, 2))
    return (3 * rank_bs + place_bs).argsort(dim=1, stable=True)


def shard_positions(
    cu_seqlens_bm: Tensor | None, s: int, rank: int, ranks: int, device: torch.device, chunks_bml: Tensor | None = None
) -> Tensor:
    """Return the positions of the s/n tokens of `rank`, `[b, s/n]`; `[1, s/n]` if documents are absent or not split.

    `chunks_bml` has the same meaning as in `place_tokens`.
    """
    assert s % (2 * ranks) == 0, f"{s} tokens cannot be sharded over {ranks} ranks"
    whole = one_segment(s, device) if cu_seqlens_bm is None else cu_seqlens_bm
    placed = place_tokens(whole, 2 * ranks, s, chunks_bml=chunks_bml)
    return rank_order(placed.slot_bs, ranks).chunk(ranks, dim=1)[rank]


def rank_rows(slot_bs: Tensor, ranks: int) -> Tensor:
    """Return the row of each token in rank order, `[b, s]`."""
    return rank_order(slot_bs, ranks).argsort(dim=1)


def first(class_bs: Tensor, count: int) -> Tensor:
    """Return the positions of the first `count` tokens by class, then by place in the sequence; `[b, count]`."""
    return class_bs.argsort(dim=1, stable=True)[:, :count]


def offsets(lengths_bm: Tensor) -> Tensor:
    """Return `cu_seqlens` int32 `[b, m + 1]` of consecutive segments with these lengths."""
    return pad(lengths_bm.cumsum(1), (1, 0)).int()
