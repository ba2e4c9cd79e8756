"""Which keys each query attends to, without a matrix: segments, causality, a window.

Shapes: s queries, t keys, b micro-batch; n segments of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys each query attends to: keys of its segment, and of these those that `causal` and `window` allow.

    `cu_seqlens_q`, `cu_seqlens_k`: int32 `[b, n + 1]`, ascending from 0 to at most s and t. Segment i of sample j has
    the queries `cu_seqlens_q[j, i]:cu_seqlens_q[j, i + 1]` and likewise keys, possibly none. Both None where a sample
    is one segment; one tensor for both if no segment has other numbers of queries and keys.
    `causal`: the last query of a segment attends to all of its keys, and each query before it to one less; a segment
    then has at least as many keys as queries.
    `window`: a query attends to the latest of these only, that many; needs `causal` and segments.
    `square`: segments that have queries have as many keys, which makes kernels faster; never needed.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    causal: bool = True
    window: int | None = None
    square: bool = False
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What a kernel computes from it once, for all layers."""

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.cu_seqlens_q, self.cu_seqlens_k) if x is not None]


CAUSAL = AttentionMask()


def one_segment(s: int, device: torch.device) -> Tensor:
    """`cu_seqlens` `[1, 2]` of sequences that are one segment of s tokens; made on the device, as graphs want it."""
    return torch.arange(0, s + 1, s, dtype=torch.int32, device=device)[None]


def causal_mask(cu_seqlens_bn: Tensor | None, window: int | None, s: int, device: torch.device) -> AttentionMask:
    """Causal self-attention of sequences of s tokens, within documents and the `window` latest tokens if given.

    `cu_seqlens_bn`: int32 `[b, n + 1]`, the first token of each document, and s.
    """
    if window is not None and window >= s:
        window = None
    if cu_seqlens_bn is None:
        if window is None:
            return CAUSAL
        cu_seqlens_bn = one_segment(s, device)
    return AttentionMask(cu_seqlens_bn, cu_seqlens_bn, window=window, square=True)


def bidirectional_mask(cu_seqlens_bn: Tensor | None) -> AttentionMask:
    """Self-attention of all tokens of a segment to each other; padding is a segment of its own."""
    return AttentionMask(cu_seqlens_bn, cu_seqlens_bn, causal=False, square=True)
