"""Reference of the kernels of DeepSeek Sparse Attention: PyTorch code for one block of queries.

Each query has a range of keys, `first <= key < stop`, from which an indexer chooses at most k:

    index score of query s and key t    I = Σ_i w_i · relu(q_i · k)    over the indexer's heads i; one key for all heads

Sums are in fp32 or wider. Among keys with equal scores, the key at the lower position is chosen, so the choice depends
only on scores. Attention has the form in which all heads share one key. This key consists of the latent and its rotary
key, and its first channels are the value.

Shapes: b sequences, s queries of the block, t keys, k chosen keys of a query, or t if no keys are chosen; a heads of c
channels, the first v of them the value; i heads of the indexer with d channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Index(NamedTuple):
    """Tensors from which the indexer's scores are computed.

    Attributes:
        q: Queries, `[b, s, i, d]`.
        k: Keys, `[b, t, d]`.
        weights: Weights of the heads, `[b, s, i]`.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


class Keys(NamedTuple):
    """Keys to which each query attends.

    Attributes:
        chosen: Positions of the chosen keys, int32 `[b, s, k]`, with -1 at the end if a query has fewer than k keys.
            None means all keys of the range.
        first: First key of the range, int64 `[b, s]`.
        stop: Key after the last key of the range, int64 `[b, s]`.
    """

    chosen: Tensor | None
    first: Tensor
    stop: Tensor

    def visible(self, t: int) -> Tensor:
        """Return which of the k entries, or of all t keys, are keys of the query, bool `[b, s, k]`."""
        if self.chosen is not None:
            return self.chosen >= 0
        j = torch.arange(t, device=self.first.device)
        return (j >= self.first.unsqueeze(-1)) & (j < self.stop.unsqueeze(-1))

    def of_blocks(self, size: int) -> Keys:
        """Return the keys of chosen blocks of `size` keys, which are counted from the first key of the range.

        Their range holds their number.
        """
        assert self.chosen is not None
        first_bs, stop_bs = (x.int()[..., None, None] for x in (self.first, self.stop))
        place = torch.arange(size, dtype=torch.int32, device=self.first.device)
        key = first_bs + self.chosen.unsqueeze(-1) * size + place
        missing = (self.chosen < 0).unsqueeze(-1) | (key >= stop_bs)
        count_bs = (~missing).sum((-2, -1))
        return Keys(key.masked_fill_(missing, -1).flatten(2), torch.zeros_like(count_bs), count_bs)

    def gather_rows(self, x_btc: Tensor) -> Tensor:
        """Return the rows of the keys, `[b, s, k, c]`, or all rows `[b, 1, t, c]`."""
        if self.chosen is None:
            return x_btc.unsqueeze(1)
        b, s, k = self.chosen.shape
        rows = self.chosen.long().clamp(min=0).view(b, s * k, 1).expand(-1, -1, x_btc.shape[-1])
        return x_btc.gather(1, rows).view(b, s, k, -1)

    def add(self, into_btc: Tensor, *products: tuple[Tensor, Tensor]) -> None:
        """Add to the rows of the keys the sum over heads of `x_bsak` times `y_bsac`, for each of the `products`.

        A product with fewer channels is added to the first channels. x must be zero where there is no key.
        """
        if self.chosen is None:
            for x_bsak, y_bsac in products:
                into_btc[..., : y_bsac.shape[-1]] += x_bsak.flatten(1, 2).mT @ y_bsac.flatten(1, 2)
            return
        b, t, c = into_btc.shape
        rows_bskc = products[0][0].mT @ products[0][1]
        for x_bsak, y_bsac in products[1:]:
            rows_bskc[..., : y_bsac.shape[-1]] += x_bsak.mT @ y_bsac
        sample = torch.arange(b, device=rows_bskc.device).view(b, 1, 1) * t
        at = (self.chosen.clamp(min=0) + sample).flatten().long()
        into_btc.view(b * t, c).index_add_(0, at, rows_bskc.view(-1, c))


def wide(x: Tensor) -> torch.dtype:
    """Return float64 if `x` is float64, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def index_scores(index: Index, first_bs: Tensor, stop_bs: Tensor) -> Tensor:
    """Return the scores of the keys in the queries' ranges, `[b, s, t]`; other elements are undefined.

    They are summed one head of the indexer after the other.
    """
    dtype = wide(index.q)
    k_bdt = index.k.to(dtype).mT
    total = index.q.new_zeros(*index.q.shape[:2], index.k.shape[1], dtype=dtype)
    for q_bsd, w_bs in zip(index.q.to(dtype).unbind(2), index.weights.to(dtype).unbind(2), strict=True):
        total += (q_bsd @ k_bdt).relu_() * w_bs.unsqueeze(-1)
    return total


def block_maxima(scores_bst: Tensor, first_bs: Tensor, stop_bs: Tensor, size: int) -> Tensor:
    """Return the largest score in each block of `size` keys, counted from the first key of a query's range.

    The result is `[b, s, ceil(t / size)]`, with -inf for blocks after the range.
    """
    t = scores_bst.shape[-1]
    j = first_bs.unsqueeze(-1) + torch.arange(-(-t // size) * size, device=scores_bst.device)
    x = scores_bst.gather(-1, j.clamp(max=t - 1)).masked_fill(j >= stop_bs.unsqueeze(-1), -math.inf)
    return x.unflatten(-1, (-1, size)).amax(-1)


def choose(scores_bst: Tensor, first_bs: Tensor, stop_bs: Tensor, top_k: int) -> Tensor:
    """Return the `top_k` keys with the greatest scores, int32 `[b, s, k]`, in order of position; -1 pads the end."""
    t = scores_bst.shape[-1]
    visible = Keys(None, first_bs, stop_bs).visible(t)
    scores = scores_bst.masked_fill(~visible, -math.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    best = best.masked_fill(~visible.gather(-1, best), t).sort(dim=-1).values
    best = torch.nn.functional.pad(best, (0, top_k - best.shape[-1]), value=t)
    return best.masked_fill(best == t, -1).int()


def _probabilities(q_bsac: Tensor, rows: Tensor, visible_bsk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities of each query's keys `[b, s, a, k]`, and the log-sum-exps `[b, s, a]`.

    Queries without keys have zeros and -inf.
    """
    x = (q_bsac @ rows.mT * scale).masked_fill(~visible_bsk.unsqueeze(2), -math.inf)
    lse = x.logsumexp(-1)
    return (x - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp(), lse


def attend(q_bsac: Tensor, kv_btc: Tensor, keys: Keys, value_width: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the outputs `[b, s, a, v]` and log-sum-exps `[b, s, a]`."""
    dtype, rows = wide(q_bsac), keys.gather_rows(kv_btc)
    p, lse = _probabilities(q_bsac.to(dtype), rows.to(dtype), keys.visible(kv_btc.shape[1]), scale)
    return (p @ rows[..., :value_width].to(dtype)).to(q_bsac.dtype), lse


def attend_backward(
    do_bsav: Tensor, q_bsac: Tensor, kv_btc: Tensor, keys: Keys, o_bsav: Tensor, lse_bsa: Tensor, scale: float,
    dkv_btc: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq `[b, s, a, c]` and the probabilities summed over heads `[b, s, k]`, and add to `dkv_btc`.

    `dkv_btc` is fp32 or wider.
    """
    dtype, v = wide(q_bsac), do_bsav.shape[-1]
    rows, visible = keys.gather_rows(kv_btc).to(dtype), keys.visible(kv_btc.shape[1])
    q, do = q_bsac.to(dtype), do_bsav.to(dtype)
    p = (q @ rows.mT * scale - lse_bsa.to(dtype).unsqueeze(-1)).exp().masked_fill(~visible.unsqueeze(2), 0.0)
    delta = (do * o_bsav.to(dtype)).sum(-1, keepdim=True)
    ds = p * (do @ rows[..., :v].mT - delta) * scale
    keys.add(dkv_btc, (ds, q), (p, do))
    return (ds @ rows).to(q_bsac.dtype), p.sum(2)


def index_loss_backward(
    index: Index, keys: Keys, p_bsk: Tensor, factor: Tensor, dk_btd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the indexer's loss, and add the gradient of keys to `dk_btd`, fp32 or wider.

    The loss is the divergence of the softmax of index scores over the keys from `p_bsk`, which sums to 1. `factor`
    multiplies the gradients.

    Returns:
        dq `[b, s, i, d]`, dweights `[b, s, i]`, and the sum of all queries' divergences, without `factor`.
    """
    dtype = wide(index.q)
    rows, visible = keys.gather_rows(index.k).to(dtype), keys.visible(index.k.shape[1])
    q, weights = index.q.to(dtype), index.weights.to(dtype).unsqueeze(-1)
    products = (q @ rows.mT).relu_()
    x = (products * weights).sum(2).masked_fill(~visible, -math.inf)
    log_softmax = x - x.logsumexp(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    loss = (torch.xlogy(p_bsk, p_bsk) - torch.where(visible, p_bsk * log_softmax, 0.0)).sum(dtype=torch.float64)
    dx = torch.where(visible, (log_softmax.exp() - p_bsk) * factor, 0.0).unsqueeze(2)
    dproducts = dx * weights * (products > 0)
    keys.add(dk_btd, (dproducts, q))
    return (dproducts @ rows).to(index.q.dtype), (dx * products).sum(-1).to(index.weights.dtype), loss
