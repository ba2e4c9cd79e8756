"""Reference of all attention kernels: PyTorch code that computes some queries at a time, in fp32 or wider.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width; n = a/g.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.layers.attention.mask import AttentionMask, key_ranges
from megafp8.layers.attention.scores import Scores, kept

_ROWS = 512
"""Number of queries that are computed at once, which is the height of the matrix of scores."""


class _Block(NamedTuple):
    """Some queries of a sample, and the keys that at least one of them attends to.

    Attributes:
        sample: Index of the sample.
        queries: Range of the queries.
        keys: Range of the keys.
        visible: Which query attends to which key, bool; broadcasts to `[g, n, s, t]`.
        positions: Positions of the queries in the whole sequence.
    """

    sample: int
    queries: slice
    keys: slice
    visible: Tensor
    positions: Tensor


def _blocks(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask) -> Iterator[_Block]:
    """Yield blocks that cover all queries with keys; no block crosses a segment boundary."""
    (s, b, _, _), (t, _, groups, _), device = q_sbad.shape, k_tbgd.shape, q_sbad.device
    first_bs, end_bs = key_ranges(mask, s, t, device)
    positions_bs = torch.arange(s, device=device)[None] if mask.positions_bs is None else mask.positions_bs
    segmented = mask.cu_seqlens_q is not None and mask.positions_bs is None
    ends = mask.cu_seqlens_q.tolist() if segmented and mask.cu_seqlens_q is not None else [[0, s]]
    for sample in range(b):
        for start, stop in itertools.pairwise(ends[sample % len(ends)]):
            for at in range(start, stop, _ROWS):
                rows = slice(at, min(at + _ROWS, stop))
                first, end = (x[sample % len(x), rows] for x in (first_bs, end_bs))
                if not (some := end > first).any():
                    continue
                keys = slice(int(first[some].min()), int(end[some].max()))
                j = torch.arange(keys.start, keys.stop, device=device)
                visible = (j >= first[:, None]) & (j < end[:, None])
                if mask.visible is not None:
                    given_ast = mask.visible[sample % len(mask.visible), :, rows, keys]
                    visible = (visible & given_ast).unflatten(0, (groups if len(given_ast) > 1 else 1, -1))
                yield _Block(sample, rows, keys, visible, positions_bs[sample % len(positions_bs), rows])


def _heads_first(x_sad: Tensor, groups: int) -> Tensor:
    """Return `x_sad` as `[g, n, s, d]` in fp32 or wider."""
    wide = torch.promote_types(x_sad.dtype, torch.float32)
    return x_sad.to(wide).transpose(0, 1).unflatten(0, (groups, -1))


def _sequence_first(x_gnsd: Tensor) -> Tensor:
    return x_gnsd.flatten(0, 1).transpose(0, 1)


def _distances(block: _Block, bias_ar: Tensor, keys: int) -> Tensor:
    """Return the index into the bias for each query and key of a block, `[s, t]`."""
    j = torch.arange(block.keys.start, block.keys.stop, device=block.positions.device)
    return j - block.positions[:, None] + (bias_ar.shape[1] - keys)  # s_total - 1


def _scores(q_gnsd: Tensor, k_g1td: Tensor, block: _Block, scores: Scores, keys: int) -> tuple[Tensor, Tensor | None]:
    """Return a block's scores `[g, n, s, t]`, -inf where a key is not visible, and the derivative of the soft cap."""
    x = q_gnsd @ k_g1td.mT * scores.scale_of(q_gnsd.shape[-1])
    slope = None
    if scores.softcap is not None:
        tanh = torch.tanh(x / scores.softcap)
        x, slope = scores.softcap * tanh, 1 - tanh * tanh
    if scores.distance_bias_ar is not None:
        bias_ar = scores.distance_bias_ar.detach()
        x = x + bias_ar[:, _distances(block, bias_ar, keys)].to(x.dtype).unflatten(0, x.shape[:2])
    return x.masked_fill(~block.visible, -math.inf), slope


def _dropout_factors(like_gnst: Tensor, block: _Block, scores: Scores) -> Tensor:
    """Return the factors of a block's probabilities: 0 or 1 / (1 - p)."""
    assert scores.dropout is not None
    (g, n), sample = like_gnst.shape[:2], scores.dropout.sample_b[block.sample]
    keep = kept(scores.dropout, sample, g * n, block.positions, block.keys).unflatten(0, (g, n))
    return keep.to(like_gnst.dtype) / (1 - scores.dropout.p)


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Compute the reference of `layers.attention.op.forward`."""
    (s, b, a, _), (t, _, groups, _) = q_sbad.shape, k_tbgd.shape
    o_sbad = q_sbad.new_zeros(s, b, a, v_tbgd.shape[-1])
    wide = torch.promote_types(q_sbad.dtype, torch.float32)
    lse_sba = torch.full((s, b, a), -math.inf, dtype=wide, device=q_sbad.device)
    for block in _blocks(q_sbad, k_tbgd, mask):
        sample, queries, keys = block[:3]
        q = _heads_first(q_sbad[queries, sample], groups)
        k, v = (_heads_first(x[keys, sample], groups) for x in (k_tbgd, v_tbgd))
        x, _ = _scores(q, k, block, scores, t)
        lse = x.logsumexp(-1, keepdim=True)
        p = (x - lse.masked_fill(lse.isneginf(), 0.0)).exp()
        if scores.dropout is not None:
            p = p * _dropout_factors(p, block, scores)
        o_sbad[queries, sample] = _sequence_first(p @ v).to(o_sbad.dtype)
        lse_sba[queries, sample] = lse.flatten(0, 1).squeeze(-1).T
    return o_sbad, lse_sba


def largest(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> Tensor:
    """Compute the reference of `layers.attention.op.largest`."""
    a, (t, _, groups, _) = q_sbad.shape[2], k_tbgd.shape
    wide = torch.promote_types(q_sbad.dtype, torch.float32)
    largest_a = torch.full((a,), -math.inf, dtype=wide, device=q_sbad.device)
    for block in _blocks(q_sbad, k_tbgd, mask):
        q, k = (
            _heads_first(x[rows, block.sample], groups) for x, rows in ((q_sbad, block.queries), (k_tbgd, block.keys))
        )
        x, _ = _scores(q, k, block, scores, t)
        largest_a = torch.maximum(largest_a, x.amax((-1, -2)).flatten())
    return largest_a


def in_one_block(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, sink_a: Tensor | None, scores: Scores
) -> Tensor:
    """Return attention `[s, b, a, d]` computed with the scores of all pairs at once, for exporters.

    No branch depends on values of tensors. Dropout and `positions_bs` are not supported.
    """
    (s, _, a, d), (t, _, groups, _), device = q_sbad.shape, k_tbgd.shape, q_sbad.device
    assert scores.dropout is None
    assert mask.positions_bs is None
    first_bs, end_bs = key_ranges(mask, s, t, device)
    i, j = torch.arange(s, device=device), torch.arange(t, device=device)
    visible_b1st = ((j >= first_bs[..., None]) & (j < end_bs[..., None])).unsqueeze(1)
    if mask.visible is not None:
        visible_b1st = visible_b1st & mask.visible
    wide = torch.promote_types(q_sbad.dtype, torch.float32)
    q, k, v = (x.to(wide).permute(1, 2, 0, 3) for x in (q_sbad, k_tbgd, v_tbgd))
    k, v = (x.repeat_interleave(a // groups, dim=1) for x in (k, v))
    x = q @ k.mT * scores.scale_of(d)
    if scores.softcap is not None:
        x = scores.softcap * torch.tanh(x / scores.softcap)
    if scores.distance_bias_ar is not None:
        x = x + scores.distance_bias_ar[:, j - i[:, None] + (s - 1)].to(wide)
    x = x.masked_fill(~visible_b1st, -math.inf)
    top = x.amax(-1, keepdim=True)
    if sink_a is not None:
        top = torch.maximum(top, sink_a.to(wide)[:, None, None])
    top = top.masked_fill(top == -math.inf, 0.0)
    p = (x - top).exp()
    total = p.sum(-1, keepdim=True)
    if sink_a is not None:
        total = total + (sink_a.to(wide)[:, None, None] - top).exp()
    return (p @ v / total.masked_fill(total == 0, 1.0)).to(q_sbad.dtype).permute(2, 0, 1, 3)


def backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scores: Scores, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the reference of `layers.attention.op.backward`."""
    (t, _, groups, _), wide = k_tbgd.shape, torch.promote_types(q_sbad.dtype, torch.float32)
    dq_sbad, dk_tbgd, dv_tbgd = (torch.zeros_like(x, dtype=wide) for x in (q_sbad, k_tbgd, v_tbgd))
    bias_ar = scores.distance_bias_ar if bias_grad else None
    dbias_ar = None if bias_ar is None else torch.zeros_like(bias_ar, dtype=wide)
    scale = scores.scale_of(q_sbad.shape[-1])
    for block in _blocks(q_sbad, k_tbgd, mask):
        sample, queries, keys = block[:3]
        do, q, o = (_heads_first(x[queries, sample], groups) for x in (do_sbad, q_sbad, o_sbad))
        k, v = (_heads_first(x[keys, sample], groups) for x in (k_tbgd, v_tbgd))
        lse = lse_sba[queries, sample].T.unflatten(0, (groups, -1)).unsqueeze(-1)
        x, slope = _scores(q, k, block, scores, t)
        p = (x - lse.masked_fill(lse.isneginf(), 0.0)).exp()
        dp, dropped = do @ v.mT, p
        if scores.dropout is not None:
            factors = _dropout_factors(p, block, scores)
            dp, dropped = dp * factors, p * factors
        ds = p * (dp - (do * o).sum(-1, keepdim=True))
        if dbias_ar is not None:
            _add_by_distance(dbias_ar, ds.flatten(0, 1), block, t)
        if slope is not None:
            ds = ds * slope
        ds = ds * scale
        dq_sbad[queries, sample] += _sequence_first(ds @ k)
        dk_tbgd[keys, sample] += _sequence_first((ds.mT @ q).sum(1, keepdim=True))
        dv_tbgd[keys, sample] += _sequence_first((dropped.mT @ do).sum(1, keepdim=True))
    return dq_sbad.to(q_sbad.dtype), dk_tbgd.to(k_tbgd.dtype), dv_tbgd.to(v_tbgd.dtype), dbias_ar


def _add_by_distance(dbias_ar: Tensor, ds_ast: Tensor, block: _Block, keys: int) -> None:
    """Add each score's gradient to the bias gradient of its distance.

    The sums run over queries, so their order is fixed on GPUs, too.
    """
    first = int(block.keys.start) - block.positions[:, None] + (dbias_ar.shape[1] - keys)
    column_sr = torch.arange(dbias_ar.shape[1], device=ds_ast.device) - first
    inside = (column_sr >= 0) & (column_sr < ds_ast.shape[-1])
    index = column_sr.clamp(0, ds_ast.shape[-1] - 1).expand(len(ds_ast), -1, -1)
    dbias_ar += (ds_ast.gather(-1, index) * inside).sum(1)
