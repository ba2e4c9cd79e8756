"""Attention of some queries to some keys that also says how much there was: the log-sum-exp of each query's scores.

With it parts merge exactly: a softmax over all keys is the parts' softmaxes, weighted by their shares of the whole sum.
And a part's backward needs nothing of the others but the merged output and log-sum-exp, since it computes the
probabilities anew as exp(score - log-sum-exp) (Dao et al. 2022, arXiv:2205.14135; Liu et al. 2023, arXiv:2310.01889).
torch's public attention keeps the log-sum-exp to itself, so on CUDA the operator behind it is called: cuDNN's, as
everywhere in this model. Elsewhere, and for fp32, the formulas are spelt out; they hold all scores in memory.

cuDNN's graphs are cached by the layout of q, k and v, and expect everything else laid out as the forward pass leaves
it. So all tensors here are dense, sequence first.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, n = a / g, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HIDDEN = -65504.0  # cuDNN makes NaN of -inf where a whole tile is hidden; every row has a key that is not


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output `[s, b, a, d]` and the log-sum-exp `[b, a, s, 1]`, fp32 or wider.

    All dense. `causal`: key i is for the queries from i on. `mask`: bool `[1 or b, 1, s, t]`, something in every row.
    """
    if not _by_cudnn(q_sbad):
        return _forward(q_sbad, k_tbgd, v_tbgd, mask, causal)
    q, k, v = map(_heads_first, (q_sbad, k_tbgd, v_tbgd))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, _bias(mask, q), True, 0.0, causal)
    return o.permute(2, 0, 1, 3).contiguous(), lse.view(*q.shape[:3], 1)


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
    """These keys' shares of dq `[s, b, a, d]`, and of dk and dv `[t, b, g, d]` these queries'.

    `o_sbad` and `lse_bas1` are those of all keys that the queries see. All dense.
    """
    if not _by_cudnn(q_sbad):
        return _backward(do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad, lse_bas1, mask, causal)
    do, q, k, v, o = map(_heads_first, (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse_bas1, unused, unused, _bias(mask, q), None, None, q.shape[2], k.shape[2], 0.0, causal
    )
    return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def merge(o_sbad: Tensor, lse_bas1: Tensor, more_sbad: Tensor, more_bas1: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of the same queries over two sets of keys together."""
    share_sba1 = torch.sigmoid(more_bas1 - lse_bas1).permute(2, 0, 1, 3)
    wide = share_sba1.dtype
    merged = torch.lerp(o_sbad.to(wide), more_sbad.to(wide), share_sba1).to(o_sbad.dtype)
    return merged, torch.logaddexp(lse_bas1, more_bas1)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def _by_cudnn(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _heads_first(x_sbad: Tensor) -> Tensor:
    assert x_sbad.is_contiguous(), "cuDNN's cached graphs know one layout"
    return x_sbad.permute(1, 2, 0, 3)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, _HIDDEN)


# --- spelt out --------------------------------------------------------------------------------------------------------


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


def _forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    q, k, v = (_grouped(x, k_tbgd.shape[2]) for x in (q_sbad, k_tbgd, v_tbgd))
    scores = _scores(q, k, mask, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    return _sequence_first((scores - lse).exp() @ v, q_sbad.dtype), lse.flatten(1, 2)


def _backward(
    do_sbad: Tensor,
    q_sbad: Tensor,
    k_tbgd: Tensor,
    v_tbgd: Tensor,
    o_sbad: Tensor,
    lse_bas1: Tensor,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k_tbgd.shape[2]
    do, q, k, v, o = (_grouped(x, groups) for x in (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    p = (_scores(q, k, mask, causal) - lse_bas1.unflatten(1, (groups, -1))).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dq, dk, dv = ds @ k, (ds.mT @ q).sum(2, keepdim=True), (p.mT @ do).sum(2, keepdim=True)
    return _sequence_first(dq, q_sbad.dtype), _sequence_first(dk, k_tbgd.dtype), _sequence_first(dv, v_tbgd.dtype)
