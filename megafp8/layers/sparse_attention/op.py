"""Attention to keys that an indexer chooses (DeepSeek Sparse Attention, arXiv:2512.02556), in blocks of queries.

All heads share one key, which consists of the latent and its rotary key (`layers.sparse_attention.module`). The heads
of a query are therefore the rows of one matrix product with the keys that the query has chosen. A query costs attention
to k keys, however long the sequence is. The other tensors of a block of queries are created for the block and then
freed: index scores of all keys, queries as wide as the latent, and probabilities. Backward recomputes them, except for
the choice of keys. Thus no memory grows with the square of the sequence length.

*The indexer's loss* is the divergence of the softmax of its scores from the mean of the heads' probabilities, over the
chosen keys, or over all keys in the dense warm-up. The backward of attention has these probabilities anyway. It
computes the loss and adds the loss's gradient, independent of the gradient of the output, as `layers.experts.router`
does for routers. This gradient reaches only the indexer, and it is the indexer's only gradient.

*Choice of blocks.* Keys may be chosen in blocks, counted from the start of a document. The score of a block is its
largest score of a key that the query may choose, and the latest blocks are always chosen.

*A shared choice.* A layer without an indexer attends to the keys that an earlier layer chose for the same queries, and
adds nothing to the loss.

*Tensor parallelism.* Ranks have different heads, but the same indexer and keys. For each block, a rank chooses the keys
of its part of the queries, and all ranks gather the choices. In backward the probabilities are summed over ranks. Each
rank computes the indexer's gradient for its part of the queries, and the mixer sums these gradients over ranks.

The kernels are in `layers.sparse_attention.kernel` for bf16 and fp16 on CUDA, otherwise in
`layers.sparse_attention.reference`.

Shapes: s queries, t keys, b sequences, a heads of this rank; n channels of a head's query without positions, r rotary
channels, c channels of the latent, v channels of a head's value; i heads of the indexer with d channels; k chosen keys
of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.layers.sparse_attention import reference
from megafp8.layers.sparse_attention.reference import Index, Keys, wide
from megafp8.linear.grad_sink import deliver, wgrad_dtype
from megafp8.parallel import collectives

BLOCK_BYTES = 1 << 29
"""Bytes of the fp32 index scores of one block of queries."""
MOST_QUERIES = 4096
REFERENCE_BYTES = 1 << 26
"""Bytes of one block's index scores and of its probabilities or gathered keys, if the reference computes them."""


@dataclass(frozen=True)
class IndexLoss:
    """Loss of a layer's indexer.

    Attributes:
        weight: Weight of one query's divergence.
        grad: Additional factor of the gradient, fp32 `[]`; None means 1.
        total: Sum of this rank's part of the loss, float64 `[1]`, to which backward adds.
    """

    weight: float
    grad: Tensor | None
    total: Tensor


@dataclass(frozen=True)
class SparseAttention:
    """Attention of one layer to chosen keys.

    Attributes:
        top_k: Number of keys or blocks that a query chooses; None means all keys.
        scale: Factor of the scores.
        group: Tensor-parallel ranks with the same indexer; None if each rank has its own.
        loss: Loss of the indexer; None without an indexer.
        block_size: Number of keys of a block; None means that single keys are chosen.
        local_blocks: Number of the latest blocks that are always chosen.
    """

    top_k: int | None
    scale: float
    group: ProcessGroup | None
    loss: IndexLoss | None
    block_size: int | None = None
    local_blocks: int = 0

    def __call__(
        self, q_sbad: Tensor, kv_tbc: Tensor, index: Index | None, chosen_bsk: Tensor | None, up: Tensor,
        first_bs: Tensor, stop_bs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the attention output `[s, b, a, v]`, and the chosen keys; None for all keys.

        Args:
            q_sbad: Queries of n + r channels.
            kv_tbc: Latents with rotary keys, of c + r channels.
            index: The indexer's queries, keys and weights, sequence-first; None without an indexer.
            chosen_bsk: Keys that another layer chose, as in `Keys`; None with an indexer, or for all keys.
            up: Weight `[a (n + v), c]` that maps latents to keys and values.
            first_bs: First key that each query may choose, int64 `[1 or b, s]`.
            stop_bs: Key after the last key that each query may choose, int64 `[1 or b, s]`.
        """
        index = Index(*[None] * 3) if index is None else index  # type: ignore[arg-type]
        return _SparseAttention.apply(q_sbad, kv_tbc, *index, chosen_bsk, up, first_bs, stop_bs, self)


class _SparseAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, kv_tbc: Tensor, index_q: Tensor | None, index_k: Tensor | None,
        index_weights: Tensor | None, chosen_bsk: Tensor | None, up: Tensor, first_bs: Tensor, stop_bs: Tensor,
        options: SparseAttention,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        call = _Call(q_sbad, kv_tbc, (index_q, index_k, index_weights), up, first_bs, stop_bs, options)
        s, b, a, _ = q_sbad.shape
        o_sbav = q_sbad.new_empty(s, b, a, call.values.shape[1])
        own_bsk: Tensor | None = None
        if call.indexer is not None and options.top_k is not None:
            blocks = options.block_size, options.local_blocks
            chosen_bsk = own_bsk = call.indexer.choose(call.blocks(), options.top_k, *blocks)
            ctx.mark_non_differentiable(own_bsk)
        ctx.set_materialize_grads(False)  # else backward would receive zeros as wide as the choice
        for rows in call.blocks():
            o_bsac, _ = call.attend(call.absorbed(rows), call.keys(rows, chosen_bsk))
            o_sbav[rows] = torch.einsum("bsac,avc->sbav", o_bsac, call.values)
        ctx.save_for_backward(q_sbad, kv_tbc, index_q, index_k, index_weights, up, first_bs, stop_bs, chosen_bsk)
        ctx.up, ctx.options = up, options  # saved tensors may come back as other objects without a gradient sink
        return o_sbav, own_bsk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbav: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q_sbad, kv_tbc, *index, up, first_bs, stop_bs, chosen_bsk = ctx.saved_tensors
        call = _Call(q_sbad, kv_tbc, index, up, first_bs, stop_bs, ctx.options)
        dtype = wide(q_sbad)
        dq_sbad, dindex = torch.zeros_like(q_sbad), None if call.indexer is None else call.indexer.zeros()
        dkv_btc = torch.zeros_like(call.kv_btc, dtype=dtype)
        dkeys, dvalues = (torch.zeros_like(x, dtype=dtype) for x in (call.keys_up, call.values))
        n = dkeys.shape[1]
        for rows in call.blocks():
            keys, q_bsac = call.keys(rows, chosen_bsk), call.absorbed(rows)
            o_bsac, lse_bsa = call.attend(q_bsac, keys)
            do = do_sbav[rows]
            dvalues += torch.einsum("sbav,bsac->avc", do, o_bsac)
            do_bsac = torch.einsum("sbav,avc->bsac", do, call.values).contiguous()
            dq_bsac, p_bsk = call.attend_backward(do_bsac, q_bsac, keys, o_bsac, lse_bsa, dkv_btc)
            dq_latent, dq_rotary = dq_bsac.split([dkeys.shape[2], q_bsac.shape[3] - dkeys.shape[2]], dim=-1)
            dkeys += torch.einsum("sban,bsac->anc", q_sbad[rows][..., :n], dq_latent)
            dq_sbad[rows][..., :n] = torch.einsum("bsac,anc->sban", dq_latent, call.keys_up)
            dq_sbad[rows][..., n:] = dq_rotary.transpose(0, 1)
            if call.indexer is not None and dindex is not None:
                call.indexer.loss_backward(rows, keys, p_bsk, dindex)
        dup = torch.cat([dkeys, dvalues], dim=1).flatten(0, 1)
        dup_or_none = deliver(ctx.up, dup.to(wgrad_dtype(ctx.up)))
        dkv = dkv_btc.transpose(0, 1).to(kv_tbc.dtype)
        index_grads = [None] * 3 if dindex is None else [*dindex.finished(q_sbad.dtype)]
        return dq_sbad, dkv, *index_grads, None, dup_or_none, None, None, None


class _Call:
    """Tensors of a call in the form that blocks of queries read, and the module that computes them."""

    def __init__(
        self, q_sbad: Tensor, kv_tbc: Tensor, index: Sequence[Tensor | None], up: Tensor, first_bs: Tensor,
        stop_bs: Tensor, options: SparseAttention,
    ) -> None:  # fmt: skip
        (self.s, self.b, self.a, width), c = q_sbad.shape, up.shape[1]
        n = width - (kv_tbc.shape[-1] - c)
        self.q_sbad, self.options = q_sbad, options
        self.kv_btc = kv_tbc.transpose(0, 1).contiguous()
        self.first_bs, self.stop_bs = (x.expand(self.b, -1) for x in (first_bs, stop_bs))
        up_axc = up.detach().unflatten(0, (self.a, -1))
        self.keys_up, self.values = up_axc[:, :n], up_axc[:, n:]
        self.functions = reference if options.top_k is None else functions_for(q_sbad)
        self.indexer: Indexer | None = None
        q, k, weights = index
        if q is not None and k is not None and weights is not None:
            assert options.loss is not None
            tensors = Index(q, k, weights)
            self.indexer = Indexer(tensors, self.first_bs, self.stop_bs, options.group, options.loss, self.functions)

    def blocks(self) -> list[slice]:
        """Return ranges of queries with tensors that fit into one block."""
        b, t, c = self.kv_btc.shape
        bytes_of_query, block_bytes = 4 * b * t, BLOCK_BYTES
        if self.functions is reference:
            top_k = self.options.top_k
            keys, gathered = (t, 0) if top_k is None else (top_k * (self.options.block_size or 1), c)
            index_heads = 0 if self.indexer is None else self.indexer.q_sbid.shape[2]
            bytes_of_query += 4 * b * keys * max(self.a, index_heads, gathered)
            block_bytes = REFERENCE_BYTES
        size = max(1, min(block_bytes // bytes_of_query, MOST_QUERIES))
        return [slice(at, min(at + size, self.s)) for at in range(0, self.s, size)]

    def keys(self, rows: slice, chosen_bsk: Tensor | None) -> Keys:
        chosen, size = None if chosen_bsk is None else chosen_bsk[:, rows].contiguous(), self.options.block_size
        keys = Keys(chosen, self.first_bs[:, rows], self.stop_bs[:, rows])
        return keys if chosen is None or size is None else keys.of_blocks(size)

    def absorbed(self, rows: slice) -> Tensor:
        """Return queries as wide as the keys that all heads share, `[b, s, a, c + r]`."""
        q, n = self.q_sbad[rows], self.keys_up.shape[1]
        latent = torch.einsum("sban,anc->bsac", q[..., :n], self.keys_up)
        return torch.cat([latent, q[..., n:].transpose(0, 1)], dim=-1)

    def attend(self, q_bsac: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        return self.functions.attend(q_bsac, self.kv_btc, keys, self.values.shape[2], self.options.scale)

    def attend_backward(
        self, do_bsac: Tensor, q_bsac: Tensor, keys: Keys, o_bsac: Tensor, lse_bsa: Tensor, dkv_btc: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.functions.attend_backward(
            do_bsac, q_bsac, self.kv_btc, keys, o_bsac, lse_bsa, self.options.scale, dkv_btc
        )


class IndexGrads(NamedTuple):
    """Gradients of an `Index`; gradients of keys are batch-first, in fp32 or wider."""

    q_sbid: Tensor
    k_btd: Tensor
    weights_sbi: Tensor

    def finished(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients in the layout of the tensors: sequence-first, keys in `dtype`."""
        return self.q_sbid, self.k_btd.transpose(0, 1).to(dtype), self.weights_sbi


class Indexer:
    """Indexer of a call: the choice of keys for its queries, and the gradient of its loss.

    Each of the ranks of `group` computes its part of a block's queries. The tensors of `index` are sequence-first.
    """

    def __init__(
        self, index: Index, first_bs: Tensor, stop_bs: Tensor, group: ProcessGroup | None, loss: IndexLoss,
        functions: Any,
    ) -> None:  # fmt: skip
        self.q_sbid, self.weights_sbi, self.k_btd = index.q, index.weights, index.k.transpose(0, 1).contiguous()
        self.first_bs, self.stop_bs = first_bs, stop_bs
        self.group, self.loss, self.functions = group, loss, functions
        self.rank, self.ranks = (0, 1) if group is None else (group.rank(), group.size())

    def _index(self, rows: slice) -> Index:
        q, weights = (x[rows].transpose(0, 1) for x in (self.q_sbid, self.weights_sbi))
        return Index(q, self.k_btd, weights)

    def _part(self, rows: slice) -> tuple[slice, int]:
        """Return this rank's part of a block's queries, and the largest number of queries of any rank."""
        size = -(-(rows.stop - rows.start) // self.ranks)
        at = min(rows.start + self.rank * size, rows.stop)
        return slice(at, min(at + size, rows.stop)), size

    def _select(self, rows: slice, top_k: int, size: int | None, local_blocks: int) -> Tensor:
        """Return the choice of these queries as in `choose`."""
        functions, first_bs, stop_bs = self.functions, self.first_bs[:, rows], self.stop_bs[:, rows]
        scores = functions.index_scores(self._index(rows), first_bs, stop_bs)
        if size is not None:
            scores = functions.block_maxima(scores, first_bs, stop_bs, size)
            first_bs, stop_bs = torch.zeros_like(first_bs), (stop_bs - first_bs + size - 1) // size
            block = torch.arange(scores.shape[-1], device=scores.device)
            scores.masked_fill_(block >= stop_bs.unsqueeze(-1) - local_blocks, torch.inf)
        return functions.choose(scores, first_bs, stop_bs, top_k)

    def choose(self, blocks: list[slice], top_k: int, block_size: int | None = None, local_blocks: int = 0) -> Tensor:
        """Return the keys, or the blocks of keys, that each query chooses, int32 `[b, s, k]`."""
        s, b = self.q_sbid.shape[:2]
        chosen = torch.empty(b, s, top_k, dtype=torch.int32, device=self.q_sbid.device)
        for rows in blocks:
            own_rows, size = self._part(rows)
            selected = self._select(own_rows, top_k, block_size, local_blocks)
            if self.group is not None and self.ranks > 1:
                padded = F.pad(selected.transpose(0, 1), (0, 0, 0, 0, 0, size - selected.shape[1])).contiguous()
                selected = collectives.all_gather(padded, self.group)[: rows.stop - rows.start].transpose(0, 1)
            chosen[:, rows] = selected
        return chosen

    def zeros(self) -> IndexGrads:
        """Return zero gradients, to which blocks add."""
        q, weights = torch.zeros_like(self.q_sbid), torch.zeros_like(self.weights_sbi)
        return IndexGrads(q, torch.zeros_like(self.k_btd, dtype=wide(self.q_sbid)), weights)

    def loss_backward(self, rows: slice, keys: Keys, p_bsk: Tensor, grads: IndexGrads) -> None:
        """Add the gradients of the loss of this rank's part of a block, and add the loss to its total.

        `p_bsk` holds the probabilities of the keys, summed over this rank's heads.
        """
        loss, (own_rows, size) = self.loss, self._part(rows)
        if self.group is not None and self.ranks > 1:
            p_sbk = F.pad(p_bsk.transpose(0, 1), (0, 0, 0, 0, 0, size * self.ranks - p_bsk.shape[1])).contiguous()
            p_bsk = collectives.reduce_scatter(p_sbk, self.group)[: own_rows.stop - own_rows.start].transpose(0, 1)
        if own_rows.stop == own_rows.start:
            return
        total = p_bsk.sum(-1, keepdim=True)
        p_bsk = (p_bsk / total.masked_fill(total == 0, 1.0)).contiguous()
        within = slice(own_rows.start - rows.start, own_rows.stop - rows.start)
        keys = Keys(None if keys.chosen is None else keys.chosen[:, within], *(x[:, within] for x in keys[1:]))
        grad = torch.ones((), device=p_bsk.device) if loss.grad is None else loss.grad
        dq, dweights, divergence = self.functions.index_loss_backward(
            self._index(own_rows), keys, p_bsk, grad.to(p_bsk.dtype) * loss.weight, grads.k_btd
        )
        grads.q_sbid[own_rows], grads.weights_sbi[own_rows] = dq.transpose(0, 1), dweights.transpose(0, 1)
        loss.total.add_(divergence * loss.weight)


def functions_for(q_sbad: Tensor) -> Any:
    """Return the module that computes such tensors with chosen keys; it has the same functions as the reference."""
    if not q_sbad.is_cuda or q_sbad.dtype not in (torch.bfloat16, torch.float16):
        return reference
    from megafp8.layers.sparse_attention import kernel  # needs Triton, which comes with torch's CUDA builds

    return kernel
