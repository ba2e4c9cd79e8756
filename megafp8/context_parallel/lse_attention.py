"""Attention that also returns the log-sum-exp of each query's scores, so that results over parts of the keys merge.

A softmax over all keys is the parts' softmaxes, weighted by their parts of the total sum. A part's backward needs only
the merged output and log-sum-exp, since it recomputes the probabilities as exp(score - log-sum-exp) (Dao et al. 2022,
arXiv:2205.14135; Liu et al. 2023, arXiv:2310.01889). torch's public attention does not return the log-sum-exp, so on
CUDA the operator behind it is called: cuDNN's, as everywhere in this model. Elsewhere, and for fp32, plain PyTorch is
used, with all scores in memory.

cuDNN's graphs are cached by the layout of q, k and v, and expect all other tensors in the layout that the forward pass
produces. So all tensors here are dense, sequence first.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, n = a / g, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HIDDEN = -65504.0  # instead of -inf, for which cuDNN returns NaN where a whole tile is masked


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output `[s, b, a, d]` and the log-sum-exp `[b, a, s, 1]`, fp32 or wider.

    All dense. `causal`: query i attends to keys up to i. `mask`: bool `[1 or b, 1, s, t]`, no row all False.
    """
    if _by_cudnn(q_sbad):
        q, k, v = map(_heads_first, (q_sbad, k_tbgd, v_tbgd))
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, _bias(mask, q), True, 0.0, causal)
        return o.permute(2, 0, 1, 3).contiguous(), lse.view(*q.shape[:3], 1)
    q, k, v = (_grouped(x, k_tbgd.shape[2]) for x in (q_sbad, k_tbgd, v_tbgd))
    scores = _scores(q, k, mask, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    return _sequence_first((scores - lse).exp() @ v, q_sbad.dtype), lse.flatten(1, 2)


def backward(
    do_sbad: Tensor,
    q_sbad: Tensor,
    k_tbgd: Tensor,
    v_tbgd: Tensor,
    o_sbad: Tensor,
    lse_bas1: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contribution of these keys to dq `[s, b, a, d]`, and of these queries to dk and dv `[t, b, g, d]`.

    `o_sbad` and `lse_bas1` are over all keys that the queries attend to. All dense.
    """
    if _by_cudnn(q_sbad):
        do, q, k, v, o = map(_heads_first, (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse_bas1, unused, unused, _bias(mask, q), None, None, q.shape[2], k.shape[2], 0.0, causal
        )
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)
    groups = k_tbgd.shape[2]
    do, q, k, v, o = (_grouped(x, groups) for x in (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    p = (_scores(q, k, mask, causal) - lse_bas1.unflatten(1, (groups, -1))).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dq, dk, dv = ds @ k, (ds.mT @ q).sum(2, keepdim=True), (p.mT @ do).sum(2, keepdim=True)
    return _sequence_first(dq, q_sbad.dtype), _sequence_first(dk, k_tbgd.dtype), _sequence_first(dv, v_tbgd.dtype)


def merge(o_sbad: Tensor, lse_bas1: Tensor, more_sbad: Tensor, more_bas1: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the outputs and log-sum-exps of the same queries over two sets of keys."""
    weight_sba1 = torch.sigmoid(more_bas1 - lse_bas1).permute(2, 0, 1, 3)
    wide = weight_sba1.dtype
    merged = torch.lerp(o_sbad.to(wide), more_sbad.to(wide), weight_sba1).to(o_sbad.dtype)
    return merged, torch.logaddexp(lse_bas1, more_bas1)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def _by_cudnn(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _heads_first(x_sbad: Tensor) -> Tensor:
    assert x_sbad.is_contiguous(), "cuDNN's cached graphs expect one layout"
    return x_sbad.permute(1, 2, 0, 3)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, _HIDDEN)


# --- plain PyTorch ----------------------------------------------------------------------------------------------------


def _grouped(x_sbad: Tensor, groups: int) -> Tensor:
    """`[b, g, n, s, d]`, at least fp32."""
    wide = torch.promote_types(x_sbad.dtype, torch.float32)
    return x_sbad.to(wide).permute(1, 2, 0, 3).unflatten(1, (groups, -1))


def _sequence_first(x_bgnsd: Tensor, dtype: torch.dtype) -> Tensor:
    return x_bgnsd.flatten(1, 2).permute(2, 0, 1, 3).to(dtype).contiguous()


def _scores(q_bgnsd: Tensor, k_bg1td: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    scores = q_bgnsd @ k_bg1td.mT / math.sqrt(q_bgnsd.shape[-1])
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None, None]
    return scores if mask is None else scores.masked_fill(~mask.unsqueeze(1), -math.inf)
