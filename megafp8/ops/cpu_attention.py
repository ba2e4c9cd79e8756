"""Attention on a CPU without gradients, by PyTorch's flash kernel, with the pairs of the mask as a matrix.

The kernel computes blocks of scores in fp32, and takes keys and values in bf16 as they are. One query of each sequence
with grouped heads is computed as if the heads of a group were queries, so each key is read once and none is repeated.

Shapes: s queries, t keys, b sequences, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.ops.attention_mask import AttentionMask, key_ranges
from megafp8.ops.attention_scores import Scores


def computes(mask: AttentionMask, scores: Scores, sink_a: Tensor | None) -> bool:
    """Whether `attention` gives these scores, with a matrix of pairs that is not large."""
    return scores.only_scales and sink_a is None and mask.positions_bs is not None and mask.visible is None


def attention(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> Tensor:
    """As `ops.attention.attention`, where `computes`."""
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


def _added(mask: AttentionMask, s: int, t: int, dtype: torch.dtype) -> Tensor:
    """What is added to each score `[1 or b, 1, s, t]`: 0, or -inf where the key is not visible."""
    first_bs, end_bs = key_ranges(mask, s, t, torch.device("cpu"))
    j = torch.arange(t)
    hidden = (j < first_bs[..., None]) | (j >= end_bs[..., None])
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf).unsqueeze(1)
