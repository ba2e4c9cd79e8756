"""Attention on a CPU without gradients, computed by PyTorch's flash kernel.

The kernel computes blocks of scores in fp32 and reads keys and values in bf16 as they are. Segments of a sample are
computed one after the other. If the mask gives positions of queries, its pairs are stored as a matrix. With one query
per sequence and grouped heads, the heads of a group are computed as if they were queries, so each key is read once and
no key is repeated.

Shapes: s queries, t keys, b sequences, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.attention.mask import AttentionMask, key_ranges
from megafp8.layers.attention.scores import Scores


def computes(mask: AttentionMask, scores: Scores, sink_a: Tensor | None) -> bool:
    """Return whether `attention` supports these scores and this mask without a large matrix of pairs."""
    if not scores.only_scales or sink_a is not None or mask.visible is not None:
        return False
    return mask.positions_bs is not None or (mask.causal and mask.prefix_b is None)


def attention(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> Tensor:
    """Compute `layers.attention.op.attention` on a CPU; requires that `computes` is true."""
    w = v_tbgd.shape[-1]
    if w < q_sbad.shape[-1]:  # the kernel does not support narrow values
        wide_tbgd = F.pad(v_tbgd, (0, q_sbad.shape[-1] - w))
        return attention(q_sbad, k_tbgd, wide_tbgd, mask, scores)[..., :w]
    if mask.positions_bs is None:
        return _by_segments(q_sbad, k_tbgd, v_tbgd, mask, scores)
    (s, _, a, d), (t, _, g, _) = q_sbad.shape, k_tbgd.shape
    key = "added", t, q_sbad.dtype
    if key not in mask.derived:
        mask.derived[key] = _added(mask, s, t, q_sbad.dtype)
    added_b1st = mask.derived[key]
    k, v, scale = k_tbgd.permute(1, 2, 0, 3), v_tbgd.permute(1, 2, 0, 3), scores.scale_of(d)
    if s == 1:
        q_bgnd = q_sbad[0].unflatten(1, (g, a // g))
        y = F.scaled_dot_product_attention(q_bgnd, k, v, added_b1st, scale=scale)
        return y.flatten(1, 2).unsqueeze(0)
    q = q_sbad.permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, k, v, added_b1st, scale=scale, enable_gqa=a != g).permute(2, 0, 1, 3)


def _by_segments(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> Tensor:
    (s, b, a, d), (t, _, g, _) = q_sbad.shape, k_tbgd.shape
    y_sbad = torch.zeros_like(q_sbad)
    for sample, queries, keys in mask.once("segments", lambda: list(_segments(mask, s, t, b))):
        q = q_sbad[queries, sample].transpose(0, 1)[None]
        k, v = (x[keys, sample].transpose(0, 1)[None] for x in (k_tbgd, v_tbgd))
        m, n = q.shape[2], k.shape[2]
        is_triangle = m == n and (mask.window is None or n <= mask.window)
        key = "added", m, n, q.dtype
        if not is_triangle and key not in mask.derived:
            mask.derived[key] = _added(AttentionMask(window=mask.window), m, n, q.dtype)
        added = None if is_triangle else mask.derived[key]
        y = F.scaled_dot_product_attention(
            q, k, v, added, is_causal=is_triangle, scale=scores.scale_of(d), enable_gqa=a != g
        )
        y_sbad[queries, sample] = y[0].transpose(0, 1)
    return y_sbad


def _segments(mask: AttentionMask, s: int, t: int, b: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield the sample, queries and keys of each segment that has queries."""
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        yield from ((sample, slice(0, s), slice(0, t)) for sample in range(b))
        return
    query_ends, key_ends = mask.cu_seqlens_q.tolist(), mask.cu_seqlens_k.tolist()
    for sample in range(b):
        ends_q, ends_k = (x[sample if len(x) > 1 else 0] for x in (query_ends, key_ends))
        for (first, end), keys in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True):
            if first < end:
                yield sample, slice(first, end), slice(*keys)


def _added(mask: AttentionMask, s: int, t: int, dtype: torch.dtype) -> Tensor:
    """Return the number added to each score, `[1 or b, 1, s, t]`: 0, or -inf if the key is not visible."""
    first_bs, end_bs = key_ranges(mask, s, t, torch.device("cpu"))
    j = torch.arange(t)
    hidden = (j < first_bs[..., None]) | (j >= end_bs[..., None])
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf).unsqueeze(1)
