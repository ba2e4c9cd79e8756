"""Attention to the latest tokens and to entries for earlier tokens (DeepSeek-V4), in blocks of queries.

All heads share one key per token or entry, which is also the value. The keys of a query are a window of tokens,
followed by entries: either all entries of its document that end at or before it, or the entries that an indexer
chooses. For each block of queries, the keys are listed by index, with tokens and entries in one numbering, and
attention runs as in `layers.sparse_attention.op`. The tensors of a block are created for the block and then freed.
Backward recomputes them, except for the choice. Memory of the size of queries times keys per query is needed only for
one block.

*Places of entries.* An entry stands for `rate` tokens, counted from the start of a document. The last tokens of two
entries are at least `rate` rows apart, even if documents are packed. The entry with its last token in row j therefore
gets the index j // rate. The entries of a document are neighbors, and all indices follow from the first and last row of
a query's keys.

It uses the kernels of sparse attention (`layers.sparse_attention.kernel`), for bf16 and fp16 on CUDA.

*A sink* is a score of each head that takes part in its softmax but has no value. *The indexer's loss* is defined as in
`layers.sparse_attention.op`, over the chosen entries; their probabilities are divided by their sum.

Shapes: s queries, t tokens as keys, e entries, b sequences, a heads of this rank with d channels; k keys of a query, at
most l of them entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.layers.attention.op import with_sink
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
from megafp8.linear.grad_sink import deliver, wgrad_dtype


@dataclass(frozen=True)
class CompressedCoreAttention:
    """Attention of one layer to a window of tokens and to entries.

    Attributes:
        window: Size of the window in tokens.
        rate: Number of tokens of an entry; None means that there are no entries.
        top_k: Number of entries that a query chooses; None means all entries.
        scale: Factor of the scores.
        group: Tensor-parallel ranks.
        loss: Loss of the indexer; None without an indexer.
    """

    window: int
    rate: int | None
    top_k: int | None
    scale: float
    group: ProcessGroup
    loss: IndexLoss | None

    def __call__(
        self, q_sbad: Tensor, kv_tbd: Tensor, entries_ebd: Tensor | None, index: Index | None, sink_a: Tensor,
        first_bs: Tensor, stop_bs: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the attention output `[s, b, a, d]`.

        Args:
            q_sbad: Queries.
            kv_tbd: Keys of tokens, which are also their values.
            entries_ebd: Entries; None without entries.
            index: The indexer's queries, entries and weights, sequence-first; None without an indexer.
            sink_a: Sink of each head.
            first_bs: First token of each query's document, int64 `[1 or b, s]`.
            stop_bs: Token after each query, int64 `[1 or b, s]`.
        """
        index = Index(*[None] * 3) if index is None else index  # type: ignore[arg-type]
        return _CompressedAttention.apply(q_sbad, kv_tbd, entries_ebd, *index, sink_a, first_bs, stop_bs, self)


class _Tensors(NamedTuple):
    """Queries, keys, entries, and the tensors of the indexer, all sequence-first."""

    q_sbad: Tensor
    kv_tbd: Tensor
    entries_ebd: Tensor | None
    index_q: Tensor | None
    index_k: Tensor | None
    index_weights: Tensor | None


class _CompressedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, kv_tbd: Tensor, entries_ebd: Tensor | None, index_q: Tensor | None,
        index_k: Tensor | None, index_weights: Tensor | None, sink_a: Tensor, first_bs: Tensor, stop_bs: Tensor,
        options: CompressedCoreAttention,
    ) -> Tensor:  # fmt: skip
        tensors = _Tensors(q_sbad, kv_tbd, entries_ebd, index_q, index_k, index_weights)
        call = _Call(tensors, sink_a, first_bs, stop_bs, options)
        o_sbad = torch.empty_like(q_sbad)
        chosen_bsl = None if call.indexer is None else call.indexer.choose(call.blocks(), call.most_entries)
        for rows in call.blocks():
            o_bsad, _ = call.attend(rows, call.keys(rows, chosen_bsl))
            o_sbad[rows] = o_bsad.transpose(0, 1)
        ctx.save_for_backward(*tensors, first_bs, stop_bs, chosen_bsl)
        ctx.sink_a, ctx.options = sink_a, options  # a saved tensor may come back as an object without a gradient sink
        return o_sbad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, first_bs, stop_bs, chosen_bsl = ctx.saved_tensors
        tensors, options, sink_a = _Tensors(*saved), ctx.options, ctx.sink_a
        call, dtype = _Call(tensors, sink_a, first_bs, stop_bs, options), wide(tensors.q_sbad)
        dq_sbad, dsink_a = torch.empty_like(tensors.q_sbad), torch.zeros_like(sink_a, dtype=dtype)
        dkv_bjd = torch.zeros_like(call.kv_bjd, dtype=dtype)
        dindex = None if call.indexer is None else call.indexer.zeros()
        for rows in call.blocks():
            keys = call.keys(rows, chosen_bsl)
            o_bsad, lse_bsa = call.attend(rows, keys)
            do_bsad = do_sbad[rows].transpose(0, 1).contiguous()
            share_bsa = torch.exp(sink_a.detach().to(dtype) - lse_bsa)  # probability of the sink
            dsink_a -= (share_bsa * torch.linalg.vecdot(do_bsad.to(dtype), o_bsad.to(dtype))).sum((0, 1))
            dq_bsad, p_bsk = call.functions.attend_backward(
                do_bsad, call.queries(rows), call.kv_bjd, keys, o_bsad, lse_bsa, options.scale, dkv_bjd
            )
            dq_sbad[rows] = dq_bsad.transpose(0, 1)
            if call.indexer is not None and dindex is not None:
                entries, p_bsl = call.entries_of(rows, chosen_bsl, p_bsk)
                call.indexer.loss_backward(rows, entries, p_bsl, dindex)
        dkv, dentries = (x.transpose(0, 1).to(dq_sbad.dtype) for x in dkv_bjd.split([call.t, call.e], dim=1))
        dsink = deliver(sink_a, dsink_a.to(wgrad_dtype(sink_a)))
        dentries_or_none = None if tensors.entries_ebd is None else dentries
        index_grads = [None] * 3 if dindex is None else [*dindex.finished(dq_sbad.dtype)]
        return dq_sbad, dkv, dentries_or_none, *index_grads, dsink, None, None, None


class _Call:
    """Tensors of a call in the form that blocks of queries read. `kv_bjd` holds keys of tokens, then entries."""

    def __init__(
        self, tensors: _Tensors, sink_a: Tensor, first_bs: Tensor, stop_bs: Tensor, options: CompressedCoreAttention
    ) -> None:
        q_sbad, kv_tbd, entries_ebd, index_q, index_k, index_weights = tensors
        (self.s, self.b, self.a, self.d), self.t = q_sbad.shape, len(kv_tbd)
        self.q_sbad, self.sink_a, self.options = q_sbad, sink_a, options
        self.e = 0 if entries_ebd is None else len(entries_ebd)
        together = kv_tbd if entries_ebd is None else torch.cat([kv_tbd, entries_ebd])
        self.kv_bjd = together.transpose(0, 1).contiguous()
        self.first_bs, self.stop_bs = (x.expand(self.b, -1) for x in (first_bs, stop_bs))
        self.window = min(options.window, self.t)
        self.most_entries = self.e if options.top_k is None else options.top_k
        rate = options.rate
        if rate is not None:
            self.entry_bs = (self.first_bs + rate - 1) // rate
            self.count_bs = (self.stop_bs - self.first_bs) // rate
        self.functions = functions_for(q_sbad)
        self.indexer: Indexer | None = None
        if index_q is not None and index_k is not None and index_weights is not None:
            assert options.loss is not None
            index = Index(index_q, index_k, index_weights)
            stop_of_entries = self.entry_bs + self.count_bs
            self.indexer = Indexer(index, self.entry_bs, stop_of_entries, options.group, options.loss, self.functions)

    def blocks(self) -> list[slice]:
        """Return ranges of queries with tensors that fit into one block."""
        keys, score_bytes = self.window + self.most_entries, 0 if self.indexer is None else 2 * self.e
        bytes_of_query, block_bytes = 4 * self.b * (8 * keys + score_bytes + 2 * self.a * self.d), BLOCK_BYTES
        if self.functions is reference:
            index_heads = 0 if self.indexer is None else self.indexer.q_sbid.shape[2]
            pair_bytes = keys * max(2 * self.a, self.d) + self.most_entries * index_heads
            bytes_of_query, block_bytes = 4 * self.b * (pair_bytes + score_bytes), REFERENCE_BYTES
        size = max(1, min(block_bytes // bytes_of_query, MOST_QUERIES))
        return [slice(at, min(at + size, self.s)) for at in range(0, self.s, size)]

    def keys(self, rows: slice, chosen_bsl: Tensor | None) -> Keys:
        """Return a block's keys, int32 `[b, s, k]`: tokens, then entries, then -1; the range holds their number."""
        first_bs, stop_bs = self.first_bs[:, rows].unsqueeze(-1), self.stop_bs[:, rows].unsqueeze(-1)
        token_bs = torch.maximum(first_bs, stop_bs - self.window)
        place_k = torch.arange(self.window + self.most_entries, device=stop_bs.device)
        tokens_bs = stop_bs - token_bs
        keys, total_bs = torch.where(place_k < tokens_bs, token_bs + place_k, -1), tokens_bs
        if self.options.rate is not None:
            among = place_k - tokens_bs
            if chosen_bsl is None:
                entry, count_bs = self.entry_bs[:, rows].unsqueeze(-1) + among, self.count_bs[:, rows].unsqueeze(-1)
            else:
                entry = chosen_bsl[:, rows].long().gather(-1, among.clamp(0, self.most_entries - 1))
                count_bs = self.count_bs[:, rows].unsqueeze(-1).clamp(max=self.most_entries)
            keys = torch.where((among >= 0) & (among < count_bs), self.t + entry, keys)
            total_bs = tokens_bs + count_bs
        return Keys(keys.int(), torch.zeros_like(total_bs[..., 0]), total_bs[..., 0])

    def entries_of(self, rows: slice, chosen_bsl: Tensor, p_bsk: Tensor) -> tuple[Keys, Tensor]:
        """Return the chosen entries of a block, and their probabilities, `[b, s, l]`, from those of all keys."""
        assert self.indexer is not None
        chosen = chosen_bsl[:, rows].contiguous()
        tokens_bs = (self.stop_bs - self.first_bs).clamp(max=self.window)[:, rows].unsqueeze(-1)
        p_bsl = p_bsk.gather(-1, tokens_bs + torch.arange(self.most_entries, device=p_bsk.device))
        keys = Keys(chosen, self.indexer.first_bs[:, rows], self.indexer.stop_bs[:, rows])
        return keys, p_bsl.masked_fill(chosen < 0, 0.0)

    def queries(self, rows: slice) -> Tensor:
        return self.q_sbad[rows].transpose(0, 1).contiguous()

    def attend(self, rows: slice, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the outputs and log-sum-exps of a block, including the sink."""
        o_bsad, lse_bsa = self.functions.attend(self.queries(rows), self.kv_bjd, keys, self.d, self.options.scale)
        return with_sink(o_bsad, lse_bsa, self.sink_a)
