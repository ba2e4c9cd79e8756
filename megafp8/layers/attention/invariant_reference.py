"""Batch-invariant attention: the result of a query depends only on the query and its keys, not on other queries.

The keys of a sequence are cut into blocks of `KEYS`, counted from its first token, and `PART` keys form a part. Within
a part, blocks are processed in order with a running maximum and sum, and parts are merged in order:

    M' = max(M, m)      L' = L · 2^(M - M') + l · 2^(m - M')      O' = O · 2^(M - M') + o · 2^(m - M')

Here M, L and O are the maximum, the sum and the unnormalized output of the parts so far, and m, l and o belong to the
new part. A block without a key of a query changes exactly nothing for this query: its factors are 2^0 and 0. The result
is therefore the same whichever other queries are computed together with a query, and whether parts are computed one
after the other, as for prompts, or in parallel, as for single queries of long sequences.
`megafp8.layers.attention.invariant_kernel` computes the same on GPUs.

Libraries choose kernels by shape. Therefore every product here has one fixed shape, and missing queries and keys are
filled with zeros.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width, w width of values; n = a/g.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.attention.mask import AttentionMask, key_origins, key_ranges
from megafp8.layers.attention.scores import Scores

KEYS = 64
"""Number of keys in a block."""
PART = 256
"""Number of keys in a part, a multiple of `KEYS`."""
_QUERIES = 16
_ALIGNMENT = 16
"""Widths of products are padded to a multiple of this, because kernels for other widths may treat rows differently."""


def check(mask: AttentionMask, scores: Scores) -> None:
    """Raise ValueError if there is no batch-invariant attention for this mask and these scores."""
    what = None
    if not mask.causal or mask.prefix_b is not None:
        what = "attention to later tokens"
    elif mask.visible is not None:
        what = "a boolean mask"
    elif scores.dropout is not None:
        what = "dropout of attention"
    if what is not None:
        raise ValueError(f"inference.batch_invariant = true: there is no kernel for {what}; set it to false")


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return the output `[s, b, a, w]` and the log-sum-exps `[s, b, a]`, as `layers.attention.op.forward` does."""
    (s, b, a, _), t, w = q_sbad.shape, len(k_tbgd), v_tbgd.shape[-1]
    wide = torch.promote_types(q_sbad.dtype, torch.float32)
    o_sbad, scale = q_sbad.new_zeros(s, b, a, w), scores.scale_of(q_sbad.shape[-1])
    lse_sba = torch.full((s, b, a), -math.inf, dtype=wide, device=q_sbad.device)
    first_bs, end_bs = key_ranges(mask, s, t, q_sbad.device)
    origin_bs = key_origins(mask, s, t, q_sbad.device)
    positions_bs = torch.arange(s, device=q_sbad.device)[None] if mask.positions_bs is None else mask.positions_bs
    for sample in range(b):
        first_s, end_s, origin_s, position_s = (x[sample % len(x)] for x in (first_bs, end_bs, origin_bs, positions_bs))
        q, k, v = (_heads_first(x[:, sample], wide) for x in (q_sbad, k_tbgd, v_tbgd))
        has_keys_s = end_s > first_s
        for origin in origin_s[has_keys_s].unique().tolist():
            rows = torch.nonzero(has_keys_s & (origin_s == origin)).flatten()
            for rows_i in rows.split(_QUERIES):
                lacking = _QUERIES - len(rows_i)
                first_i, end_i, position_i = (F.pad(x[rows_i], (0, lacking)) for x in (first_s, end_s, position_s))
                q_aid = F.pad(q[:, rows_i], (0, 0, 0, lacking))
                o_aiw, lse_ai = _of_queries(q_aid, k, v, origin, first_i, end_i, position_i, scores, scale, t)
                o_sbad[rows_i, sample] = o_aiw[:, : len(rows_i), :w].transpose(0, 1).to(o_sbad.dtype)
                lse_sba[rows_i, sample] = lse_ai[:, : len(rows_i)].T
    return o_sbad, lse_sba


def _heads_first(x_sad: Tensor, wide: torch.dtype) -> Tensor:
    """Return `x_sad` as `[a, s, d]`, with d padded to a multiple of `_ALIGNMENT`."""
    return F.pad(x_sad.to(wide).transpose(0, 1), (0, -x_sad.shape[-1] % _ALIGNMENT))


def _of_queries(
    q_aid: Tensor, k_gtd: Tensor, v_gtw: Tensor, origin: int, first_i: Tensor, end_i: Tensor, position_i: Tensor,
    scores: Scores, scale: float, t: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs `[a, i, w]` and log-sum-exps of queries of one sequence that begins at the key `origin`."""
    heads = len(q_aid) // len(k_gtd)
    some = end_i > first_i
    start, stop = int(first_i[some].min()), int(end_i.max())
    start = origin + (start - origin) // KEYS * KEYS
    total = _empty(q_aid, v_gtw)
    for part in range((start - origin) // PART, -(-(stop - origin) // PART)):
        partial = _empty(q_aid, v_gtw)
        part_start = origin + part * PART
        for n in range(max(start, part_start), min(stop, part_start + PART), KEYS):
            lacking = max(0, n + KEYS - t)
            k, v = (F.pad(x[:, n : n + KEYS], (0, 0, 0, lacking)) for x in (k_gtd, v_gtw))
            j = torch.arange(n, n + KEYS, device=q_aid.device)
            x = _product(q_aid, k.mT, heads) * scale
            if scores.softcap is not None:
                x = scores.softcap * torch.tanh(x / scores.softcap)
            if scores.distance_bias_ar is not None:
                bias_ar = scores.distance_bias_ar.detach()
                at = j - position_i[:, None] + (bias_ar.shape[1] - t)
                x = x + bias_ar[:, at.clamp(0, bias_ar.shape[1] - 1)].to(x.dtype)
            x = x.masked_fill(~((j >= first_i[:, None]) & (j < end_i[:, None])), -math.inf)
            partial = _with_block(*partial, x, v, heads)
        total = _merged(*total, *partial)
    largest, sums, o = total
    has_keys = sums > 0
    lse = torch.where(has_keys, largest + sums.log(), -math.inf)
    return o / torch.where(has_keys, sums, 1.0).unsqueeze(-1), lse


_Part = tuple[Tensor, Tensor, Tensor]


def _empty(q_aid: Tensor, v_gtw: Tensor) -> _Part:
    """Return the maxima and sums `[a, i]` and outputs `[a, i, w]` of an empty set of keys."""
    largest = q_aid.new_full(q_aid.shape[:2], -math.inf)
    return largest, torch.zeros_like(largest), q_aid.new_zeros(*q_aid.shape[:2], v_gtw.shape[-1])


def _product(x_aij: Tensor, y_gjk: Tensor, heads: int) -> Tensor:
    """Multiply each head's matrix by the matrix of its group."""
    return (x_aij.unflatten(0, (-1, heads)).flatten(1, 2) @ y_gjk).unflatten(1, (heads, -1)).flatten(0, 1)


def _finite(largest: Tensor) -> Tensor:
    return largest.masked_fill(largest == -math.inf, 0.0)


def _with_block(largest: Tensor, total: Tensor, o: Tensor, x_aij: Tensor, v: Tensor, heads: int) -> _Part:
    larger = torch.maximum(largest, x_aij.amax(-1))
    shrink = (largest - _finite(larger)).exp()
    p = (x_aij - _finite(larger).unsqueeze(-1)).exp()
    return larger, total * shrink + p.sum(-1), o * shrink.unsqueeze(-1) + _product(p, v, heads)


def _merged(largest: Tensor, total: Tensor, o: Tensor, part_largest: Tensor, part: Tensor, part_o: Tensor) -> _Part:
    larger = torch.maximum(largest, part_largest)
    shrink, part_shrink = (largest - _finite(larger)).exp(), (part_largest - _finite(larger)).exp()
    o = o * shrink.unsqueeze(-1) + part_o * part_shrink.unsqueeze(-1)
    return larger, total * shrink + part * part_shrink, o
