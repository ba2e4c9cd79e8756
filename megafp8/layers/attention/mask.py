"""Attention masks that are never stored as a matrix: segments, causality, a window, a prefix.

Whatever the mask is made of, each query attends to a contiguous range of keys (`key_ranges`). The only exceptions are
boolean masks that users pass.

Shapes: s queries, t keys, b micro-batch, a heads; n segments of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.numerics.onnx_export import in_onnx_export
from megafp8.parallel.context import one_segment


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Rule that says which keys each query attends to: keys of its own segment, limited by the other fields.

    Attributes:
        cu_seqlens_q: Boundaries of the segments' queries, int32 `[b, n + 1]`, ascending from 0 to at most s. Segment i
            of sample j has the queries `cu_seqlens_q[j, i]:cu_seqlens_q[j, i + 1]`, possibly none. None if each sample
            is one segment.
        cu_seqlens_k: Boundaries of the segments' keys, in the same format with at most t. It is the same tensor as
            `cu_seqlens_q` if every segment has equal numbers of queries and keys.
        causal: The last query of a segment attends to all of its keys, and each query before it to one key less. The
            number of keys of a segment must then be at least its number of queries.
        window: A query attends only to keys less than `window` places before its latest key, and if not `causal`, also
            to keys less than `window` places after it.
        chunk: Each segment's keys are cut into chunks of this many keys, and a query attends only to its own chunk.
            Requires `positions_bs`; without it, `chunks_of` turns chunks into segments.
        prefix_b: Number of prefix keys of each sample, int `[b]`. With `causal`, all queries also attend to the keys of
            their segment that are among the first `prefix_b` keys of the sample.
        visible: Boolean mask `[1 or b, 1 or a, s, t]`, false where a query must not attend to a key. It applies in
            addition to the other fields. Kernels read it as it is and skip no work because of it.
        positions_bs: Position of each query in the sequence of keys, int `[1 or b, s]`, if queries are only some of the
            sequence's tokens, as under context parallelism. `cu_seqlens_q` must then be `cu_seqlens_k`, of the whole
            sequence.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix_b: Tensor | None = None
    visible: Tensor | None = None
    positions_bs: Tensor | None = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that kernels compute from the mask once for all layers, by key."""

    def __post_init__(self) -> None:
        if self.prefix_b is not None and not self.causal:
            raise ValueError("prefix_b: without causal all keys are visible anyway; leave it out, or set causal=True")
        if self.prefix_b is not None and self.window is not None:
            raise ValueError(f"prefix_b: not with window = {self.window}; use a boolean mask (visible) for both")
        assert self.chunk is None or (self.positions_bs is not None and self.causal)
        assert self.positions_bs is None or self.cu_seqlens_q is self.cu_seqlens_k

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the mask."""
        tensors = (self.cu_seqlens_q, self.cu_seqlens_k, self.prefix_b, self.visible, self.positions_bs)
        return [x for x in tensors if x is not None]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, called once for all layers if the mask belongs to a micro-batch.

        Masks without tensors, such as `CAUSAL`, are shared by sequences of all lengths and may outlive a CUDA graph's
        memory, so nothing is stored for them.
        """
        if not self.tensors:
            return make()
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def is_plain(self, s: int, t: int) -> bool:
        """Return whether s queries attend to all t keys, or form a causal triangle with s = t."""
        if self.cu_seqlens_q is not None or self.window is not None or self.chunk is not None:
            return False
        if self.prefix_b is not None or self.visible is not None:
            return False
        return not self.causal or (s == t and self.positions_bs is None)


CAUSAL = AttentionMask()


def chunks_of(cu_seqlens_bn: Tensor | None, chunk: int | None, s: int, device: torch.device) -> Tensor | None:
    """Return chunks of documents as segments, int32 `[b, n + 1]`: the first token of each chunk, then s.

    Chunks are counted from the start of their document. Without `chunk` the result is `cu_seqlens_bn`. Does not
    synchronize the host.
    """
    if chunk is None or chunk >= s:
        return cu_seqlens_bn
    if cu_seqlens_bn is None:
        starts_n = torch.arange(0, s, chunk, dtype=torch.int32, device=device)
        return torch.cat([starts_n, starts_n.new_full((1,), s)])[None]
    first_bn = cu_seqlens_bn.long()
    i_bs = torch.arange(s, device=device).expand(len(first_bn), -1)
    place_bs = i_bs - first_bn.gather(1, segments_of(i_bs, first_bn[:, 1:]))
    most = cu_seqlens_bn.shape[1] - 1 + s // chunk
    starts_bs = torch.where(place_bs % chunk == 0, i_bs, s).sort(dim=1).values[:, :most]
    return F.pad(starts_bs, (0, 1), value=s).to(cu_seqlens_bn.dtype)


def causal_mask(
    cu_seqlens_bn: Tensor | None, window: int | None, s: int, device: torch.device, chunk: int | None = None
) -> AttentionMask:
    """Return the mask of causal self-attention over sequences of s tokens.

    Args:
        cu_seqlens_bn: First token of each document, then s, int32 `[b, n + 1]`; attention stays within documents. None
            means that a sequence is one document.
        window: Number of latest tokens to which a token attends; None means all.
        s: Tokens of a sequence.
        device: Device of the mask's tensors.
        chunk: Size in tokens of the chunks of documents within which attention stays; None means no chunks.
    """
    cu_seqlens_bn = chunks_of(cu_seqlens_bn, chunk, s, device)
    if window is not None and window >= s:
        window = None
    if cu_seqlens_bn is None:
        if window is None:
            return CAUSAL
        cu_seqlens_bn = one_segment(s, device)
    return AttentionMask(cu_seqlens_bn, cu_seqlens_bn, window=window)


def bidirectional_mask(cu_seqlens_bn: Tensor | None) -> AttentionMask:
    """Return the mask of self-attention among all tokens of a segment; padding is a separate segment."""
    return AttentionMask(cu_seqlens_bn, cu_seqlens_bn, causal=False)


def segments_of(i_bs: Tensor, ends_bn: Tensor) -> Tensor:
    """Return the segment of each position, int64 `[b, s]`: the number of segment ends up to the position."""
    if in_onnx_export():  # ONNX has no searchsorted
        return (ends_bn[:, None] <= i_bs[..., None]).sum(-1)
    return torch.searchsorted(ends_bn.contiguous(), i_bs.contiguous(), right=True)


def key_ranges(mask: AttentionMask, s: int, t: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each query's first key and the key after its last, int64 `[1 or b, s]`; both 0 for queries without keys.

    Ignores `mask.visible`. Does not synchronize the host.
    """
    i = torch.arange(s, device=device)[None] if mask.positions_bs is None else mask.positions_bs.long()
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        start, stop = torch.zeros_like(i), torch.full_like(i, t)
        latest = i if mask.positions_bs is not None else i + (t - s)
    else:
        ends_q, ends_k = mask.cu_seqlens_q.long(), mask.cu_seqlens_k.long()
        rows = max(i.shape[0], ends_q.shape[0])
        i, ends_q, ends_k = (x.expand(rows, -1).contiguous() for x in (i, ends_q, ends_k))
        segment = segments_of(i, ends_q[:, 1:])
        outside = segment == ends_q.shape[1] - 1
        segment = segment.clamp(max=ends_q.shape[1] - 2)
        start = ends_k.gather(1, segment)
        stop = ends_k.gather(1, segment + 1).masked_fill(outside, 0)
        latest = i + ends_k.gather(1, segment + 1) - ends_q.gather(1, segment + 1)
    first, end = start, stop
    if mask.window is not None:
        first = torch.maximum(first, latest - mask.window + 1)
        end = torch.minimum(end, latest + mask.window)
    if mask.chunk is not None:
        first = torch.maximum(first, latest - (latest - start) % mask.chunk)
    if mask.causal:
        end = torch.minimum(end, latest + 1)
    if mask.prefix_b is not None:
        end = torch.maximum(end, torch.minimum(stop, mask.prefix_b.long()[:, None]))
    some = end > first
    return first * some, end * some


def key_origins(mask: AttentionMask, s: int, t: int, device: torch.device) -> Tensor:
    """Return the first key of each query's segment or chunk, int64 `[1 or b, s]`, whatever the window.

    Queries without keys have the origin 0.
    """
    return key_ranges(replace(mask, window=None), s, t, device)[0]
