"""Sharding of sequences over context-parallel ranks so that causal attention costs every rank the same.

A causal query attends to all keys before it in its document, so the last n-th of a document costs 2n - 1 times as much
as the first. Each document is cut into 2n chunks of equal length, and rank r has the r-th and the r-th from the end,
whose costs together are the same for all ranks (for one document as in Megatron-LM and Llama 3: Dubey et al. 2024,
arXiv:2407.21783, section 3.3.2; for packed ones as in Transformer Engine, without its padding).

*Slot* i holds the i-th chunks of all documents of a sample. Tokens that are left over when a document is cut go to one
slot after the other, from document to document, so that all slots have s / 2n tokens. A rank's *shard* is slot r
followed by slot 2n - 1 - r. An all-gather gives the shards in the order of ranks ("rank order").

A model that passes states from token to token has the sample as a whole cut into 2n slots, not each document: then one
state stands before each slot. Ranks' costs differ where a few documents are long.

Shapes: s sequence, n ranks, c = s / 2n tokens of a slot; b micro-batch, m documents of a sample.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def one_segment(s: int, device: torch.device) -> Tensor:
    """`cu_seqlens` `[1, 2]` of sequences that are one segment of s tokens; made on the device, as graphs want it."""
    return torch.arange(0, s + 1, s, dtype=torch.int32, device=device)[None]


def slots_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two slots of `rank`."""
    return rank, 2 * ranks - 1 - rank


def chunk_lengths(cu_seqlens_bm: Tensor, slots: int) -> Tensor:
    """Tokens of each document in each slot, `[b, m, slots]`.

    `cu_seqlens_bm`: int32 `[b, m + 1]`, the first token of each document, and s, which `slots` divides.
    """
    lengths_bm = cu_seqlens_bm.diff(dim=1)
    rest_bm = lengths_bm % slots
    first_bm = rest_bm.cumsum(1) - rest_bm  # the slot that gets the first token left over, but for multiples of slots
    slot = torch.arange(slots, device=cu_seqlens_bm.device)
    gets_one = (slot - first_bm[..., None]) % slots < rest_bm[..., None]
    return (lengths_bm // slots)[..., None] + gets_one


class DocumentPlacement(NamedTuple):
    """Document, place in the document and slot of each token, `[b, s]` int64. `lengths_bml`: `chunk_lengths`."""

    lengths_bml: Tensor
    document_bs: Tensor
    offset_bs: Tensor
    slot_bs: Tensor


def place_tokens(cu_seqlens_bm: Tensor, slots: int, s: int, *, cuts_documents: bool = True) -> DocumentPlacement:
    """Where each token of a sample belongs. `cuts_documents`: each document is cut into chunks, not the sample."""
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
    lengths_bml = chunk_lengths(cu_seqlens_bm, slots)
    chunk_ends = lengths_bml.cumsum(-1)
    slot_bs = torch.zeros_like(position_bs)
    for slot in range(slots - 1):
        slot_bs += chunk_ends[..., slot].gather(1, document_bs) <= offset_bs
    return DocumentPlacement(lengths_bml, document_bs, offset_bs, slot_bs)


def rank_order(slot_bs: Tensor, ranks: int) -> Tensor:
    """Positions of the tokens of rank 0, those of rank 1 and so on, `[b, s]`. `slot_bs` of each token."""
    slot_order = slot_bs.argsort(dim=1, stable=True).chunk(2 * ranks, dim=1)
    return torch.cat([slot_order[slot] for rank in range(ranks) for slot in slots_of(rank, ranks)], dim=1)


def shard_positions(cu_seqlens_bm: Tensor | None, s: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """Positions of the s/n tokens of `rank`, `[b, s/n]`; `[1, s/n]` without documents, or where they are not cut."""
    assert s % (2 * ranks) == 0, f"{s} tokens cannot be sharded over {ranks} ranks"
    whole = one_segment(s, device) if cu_seqlens_bm is None else cu_seqlens_bm
    return rank_order(place_tokens(whole, 2 * ranks, s).slot_bs, ranks).chunk(ranks, dim=1)[rank]


def rank_rows(slot_bs: Tensor, ranks: int) -> Tensor:
    """The row of each token in rank order, `[b, s]`."""
    return rank_order(slot_bs, ranks).argsort(dim=1)


def first(class_bs: Tensor, count: int) -> Tensor:
    """Positions of `count` tokens: by class, and in the order of the sequence within it; `[b, count]`."""
    return class_bs.argsort(dim=1, stable=True)[:, :count]


def offsets(lengths_bm: Tensor) -> Tensor:
    """`cu_seqlens` int32 `[b, m + 1]` of segments of these lengths, one after the other."""
    return pad(lengths_bm.cumsum(1), (1, 0)).int()
