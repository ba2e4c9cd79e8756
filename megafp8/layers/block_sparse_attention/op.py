"""Attention with grouped queries to blocks of tokens that an indexer chooses for each group, in blocks of queries.

The heads that share a key-value head are a group. Groups are independent of each other, so they are samples here: n =
b·g samples with one row of key and value for each token, and with a/g heads. The chosen blocks are then lists of
tokens, and the functions of `layers.sparse_attention` for bf16 and fp16 on CUDA, or their reference, compute attention.
The lists and the indexer's scores of all tokens are created for one block of queries and then freed. Only the choice of
blocks, the output and the log-sum-exps are kept for backward.

*Choice* (as in `transformers`). Blocks are counted from the start of a document. The score of a block is its largest
score of a token that the query may attend to. The blocks of the query and of the tokens right before it are always
chosen, then the blocks with the greatest scores. Of equal scores, the earlier block wins, while `transformers` leaves
ties to `topk`.

*Scores.* One head scores tokens for each group, without ReLU and weight. The functions for indexers with several heads
compute it, because q·k = relu(q·k) - relu(-q·k): the heads are q and -q with the weights 1 and -1.

*The indexer's loss* is ours, as `transformers` has none. It is defined as in `layers.sparse_attention.op` for each
group: the divergence of the softmax of the scores over the chosen tokens from the mean of the group's probabilities.

*Tensor parallelism.* A rank has whole groups, so attention and indexer need no communication.

Shapes: s queries, t tokens as keys, b sequences, a heads of this rank with d channels, g groups, n = b·g samples; i
channels of the indexer; k chosen blocks of a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.layers.sparse_attention import reference
from megafp8.layers.sparse_attention.op import (
    BLOCK_BYTES,
    MOST_QUERIES,
    REFERENCE_BYTES,
    Indexer,
    IndexLoss,
    functions_for,
)
from megafp8.layers.sparse_attention.reference import Index, Keys, wide


@dataclass(frozen=True)
class BlockSparseCoreAttention:
    """Attention of one layer to chosen blocks of tokens.

    Attributes:
        size: Number of tokens of a block.
        top_k: Number of blocks that a query chooses for each group of heads.
        local_blocks: Number of the latest blocks that are always chosen, including the query's own block.
        loss: Loss of the indexer; its weight is for one query and group.
    """

    size: int
    top_k: int
    local_blocks: int
    loss: IndexLoss

    def __call__(
        self, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, index_q_sbgi: Tensor, index_k_tbi: Tensor,
        first_bs: Tensor, stop_bs: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """Return the attention output `[s, b, a, d]`.

        Args:
            q_sbad: Queries; the heads of a group are neighbors.
            k_tbgd: Keys.
            v_tbgd: Values.
            index_q_sbgi: The indexer's queries.
            index_k_tbi: The indexer's keys, which all groups share.
            first_bs: First token of each query's document, int64 `[1 or b, s]`.
            stop_bs: Token after each query, int64 `[1 or b, s]`.
            scale: Factor of the scores of attention.
        """
        return _BlockSparseAttention.apply(
            q_sbad, k_tbgd, v_tbgd, index_q_sbgi, index_k_tbi, first_bs, stop_bs, scale, self
        )

    def blocks_of(self, tokens: int) -> int:
        """Return the largest number of blocks that a query chooses among this many tokens."""
        return min(self.top_k, -(-tokens // self.size))


class _BlockSparseAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, index_q_sbgi: Tensor, index_k_tbi: Tensor,
        first_bs: Tensor, stop_bs: Tensor, scale: float, options: BlockSparseCoreAttention,
    ) -> Tensor:  # fmt: skip
        tensors = q_sbad, k_tbgd, v_tbgd, index_q_sbgi, index_k_tbi, first_bs, stop_bs
        call, functions = _Call(options, *tensors), functions_for(q_sbad)
        s, n, a, d = call.q_snad.shape
        o_snad = q_sbad.new_empty(s, n, a, d)
        lse_nsa = torch.empty(n, s, a, dtype=wide(q_sbad), device=q_sbad.device)
        chosen_nsk = torch.empty(n, s, call.most_blocks, dtype=torch.int32, device=q_sbad.device)
        for rows in call.parts():
            chosen_nsk[:, rows] = call.choose(rows)
            o_nsad, lse_nsa[:, rows] = functions.attend(
                call.queries(rows), call.kv_ntc, call.keys(rows, chosen_nsk), d, scale
            )
            o_snad[rows] = o_nsad.transpose(0, 1)
        o_sbad = o_snad.view_as(q_sbad)
        ctx.save_for_backward(*tensors, o_sbad, lse_nsa, chosen_nsk)
        ctx.scale, ctx.options = scale, options
        return o_sbad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, o_sbad, lse_nsa, chosen_nsk = ctx.saved_tensors
        q_sbad, k_tbgd, _, index_q_sbgi, *_ = tensors
        call, functions, groups = _Call(ctx.options, *tensors), functions_for(q_sbad), k_tbgd.shape[1:3]
        do_snad, o_snad = (x.reshape(call.q_snad.shape) for x in (do_sbad, o_sbad))
        dq_snad = torch.empty_like(call.q_snad)
        dkv_ntc, dindex = torch.zeros_like(call.kv_ntc, dtype=wide(q_sbad)), call.indexer.zeros()
        for rows in call.parts():
            keys = call.keys(rows, chosen_nsk)
            do_nsad, o_nsad = (x[rows].transpose(0, 1).contiguous() for x in (do_snad, o_snad))
            dq_nsad, p_nsk = functions.attend_backward(
                do_nsad, call.queries(rows), call.kv_ntc, keys, o_nsad, lse_nsa[:, rows], ctx.scale, dkv_ntc
            )
            dq_snad[rows] = dq_nsad.transpose(0, 1)
            call.indexer.loss_backward(rows, keys, p_nsk, dindex)
        dkv_tbgc = dkv_ntc.unflatten(0, groups).permute(2, 0, 1, 3).to(q_sbad.dtype)
        dv_tbgd, dk_tbgd = dkv_tbgc.chunk(2, dim=-1)
        dindex_q = (dindex.q_sbid[:, :, 0] - dindex.q_sbid[:, :, 1]).view_as(index_q_sbgi)
        dindex_k = dindex.k_btd.unflatten(0, groups).sum(1).transpose(0, 1).to(q_sbad.dtype)
        return dq_snad.view_as(q_sbad), dk_tbgd, dv_tbgd, dindex_q, dindex_k, None, None, None, None


class _Call:
    """Tensors of a call with groups as samples, `[.., n, ..]`. A row of `kv_ntc` has the value, then the key."""

    def __init__(
        self, options: BlockSparseCoreAttention, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, index_q_sbgi: Tensor,
        index_k_tbi: Tensor, first_bs: Tensor, stop_bs: Tensor,
    ) -> None:  # fmt: skip
        (s, b, _, d), (t, _, g, _), i = q_sbad.shape, k_tbgd.shape, index_k_tbi.shape[-1]
        n, self.options, self.most_blocks = b * g, options, options.blocks_of(t)
        self.q_snad = q_sbad.reshape(s, n, -1, d)
        self.kv_ntc = torch.cat([v_tbgd, k_tbgd], dim=-1).permute(1, 2, 0, 3).contiguous().view(n, t, 2 * d)
        self.first_ns, self.stop_ns = (
            x.expand(b, -1).unsqueeze(1).expand(-1, g, -1).reshape(n, s) for x in (first_bs, stop_bs)
        )
        index_q_sni = index_q_sbgi.reshape(s, n, i)
        weight_sn = torch.full((s, n), i**-0.5, dtype=wide(q_sbad), device=q_sbad.device)
        index = Index(
            torch.stack([index_q_sni, -index_q_sni], dim=2),
            index_k_tbi.unsqueeze(2).expand(-1, -1, g, -1).reshape(t, n, i),
            torch.stack([weight_sn, -weight_sn], dim=2),
        )
        self.indexer = Indexer(index, self.first_ns, self.stop_ns, None, options.loss, functions_for(q_sbad))

    def parts(self) -> list[slice]:
        """Return ranges of queries with tensors that fit into memory together."""
        (s, n, a, _), (_, t, c) = self.q_snad.shape, self.kv_ntc.shape
        tokens = self.most_blocks * self.options.size
        bytes_of_query, part_bytes = 4 * n * (t + 2 * tokens), BLOCK_BYTES
        if self.indexer.functions is reference:
            bytes_of_query, part_bytes = bytes_of_query + 4 * n * tokens * max(a, c), REFERENCE_BYTES
        size = max(1, min(part_bytes // bytes_of_query, MOST_QUERIES))
        return [slice(at, min(at + size, s)) for at in range(0, s, size)]

    def queries(self, rows: slice) -> Tensor:
        return self.q_snad[rows].transpose(0, 1).contiguous()

    def choose(self, rows: slice) -> Tensor:
        """Return the blocks that each query chooses, int32 `[n, s, k]`, in ascending order; -1 pads the end."""
        functions, size, (first_ns, stop_ns) = self.indexer.functions, self.options.size, self._ranges(rows)
        scores_nst = functions.index_scores(self.indexer.index_of(rows), first_ns, stop_ns)
        maxima_nsj = functions.block_maxima(scores_nst, first_ns, stop_ns, size)
        count_ns = (stop_ns - first_ns + size - 1) // size
        block_j = torch.arange(maxima_nsj.shape[-1], device=stop_ns.device)
        maxima_nsj.masked_fill_(block_j >= count_ns.unsqueeze(-1) - self.options.local_blocks, torch.inf)
        return functions.choose(maxima_nsj, torch.zeros_like(count_ns), count_ns, self.most_blocks)

    def keys(self, rows: slice, chosen_nsk: Tensor) -> Keys:
        """Return the tokens of the chosen blocks, int32 `[n, s, k · size]`; the range holds their number."""
        size, chosen_nsk = self.options.size, chosen_nsk[:, rows].unsqueeze(-1)
        first_ns, stop_ns = (x.int()[..., None, None] for x in self._ranges(rows))
        place = torch.arange(size, dtype=torch.int32, device=chosen_nsk.device)
        token = first_ns + chosen_nsk * size + place
        seen = (chosen_nsk >= 0) & (token < stop_ns)
        count_ns = seen.sum((-2, -1))
        return Keys(token.masked_fill_(~seen, -1).flatten(2), torch.zeros_like(count_ns), count_ns)

    def _ranges(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self.first_ns[:, rows], self.stop_ns[:, rows]
