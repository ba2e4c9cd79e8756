"""Self-attention of sequences that are sharded over context-parallel ranks.

A rank computes the outputs of its own queries and needs the keys and values of all ranks. It all-gathers them in
forward and again in backward, and reduce-scatters their gradients. It saves only its own shard of q, k, v and the
output.

A ring would pass blocks of k and v on while it computes with other blocks. It moves the same number of bytes. It would
save memory, which is small with grouped queries, and hide a transfer that takes 1/18 of the attention time in
Llama-3-8B. In exchange it needs n small kernels in place of each large one
(docs/decisions/0010-context-parallelism.md). Here the gather overlaps with the triangles of a rank's own chunks. Llama
3 was also trained with the all-gather (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).

A rank has two slots of chunks of documents (`parallel.context`). Queries attend to their own chunk through a causal
triangle, which needs no keys of other ranks, and to all keys of their document in earlier slots. These are separate
kernel calls, and their log-sum-exps merge the results. The keys of a call are copied from the gathered shards in the
order of the sequence. Documents that are whole on a rank (`parallel.placement`) need only the first call, and few of
their keys are gathered, to fill up the tensors.

If attention is bidirectional, one call has all of a rank's queries and all keys of their documents.

Windows on both sides, chunks, prefixes and scores that depend on positions need a different scheme: one call with all
keys and the positions of the rank's queries among them.

With a sliding window, one call has a chunk's keys and the keys before it that the window reaches.

If two calls share queries or keys, their results are added: dk and dv in fp32 on a rank, and in the model's dtype over
ranks.

Shapes: s sequence, n ranks, r = s/n tokens of this rank's shard, c = r/2 of a slot; b micro-batch, a query heads, g
key-value heads of width d; m documents of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.layers.attention import op as attention
from megafp8.layers.attention.mask import CAUSAL, AttentionMask
from megafp8.layers.attention.scores import PLAIN, Scores
from megafp8.layers.attention.sink_op import sink_gradient, with_sink
from megafp8.parallel.collectives import all_gather_async, reduce_scatter
from megafp8.parallel.context import (
    DocumentPlacement,
    first,
    offsets,
    one_segment,
    place_tokens,
    rank_order,
    rank_rows,
    slots_of,
    whole_slot_of,
)
from megafp8.parallel.placement import Placement


class AttentionCall(NamedTuple):
    """Queries and keys of one kernel call.

    Attributes:
        rows: Rows of the queries in the rank's shard.
        mask: Mask that says which keys each query attends to.
        keys_tb: Rows of the keys in rank order, for each sample. None means the tokens of the queries.
        blocks: Lengths of the consecutive parts of `keys_tb` in which no row occurs twice.
    """

    rows: slice
    mask: AttentionMask
    keys_tb: Tensor | None = None
    blocks: tuple[int, ...] = ()


class AttentionPlan(NamedTuple):
    """Attention calls of a rank.

    Attributes:
        calls: Calls in the order to make them.
        gathered: Tokens of each rank, the last of its shard, whose keys and values the ranks gather. `keys_tb` of the
            calls are rows of the gathered tensors.
    """

    calls: tuple[AttentionCall, ...]
    gathered: int


def plan(
    s: int, rank: int, ranks: int, *, window: int | None, cu_seqlens_bm: Tensor | None, device: torch.device,
    causal: bool = True, prefix_b: Tensor | None = None, positions: bool = False, cuts_documents: bool = True,
    chunk: int | None = None, placement: Placement | None = None,
) -> AttentionPlan:  # fmt: skip
    """Return the attention calls of `rank`. Does not synchronize the host.

    `window`, `causal`, `prefix_b` and `chunk` are defined in `AttentionMask`, and `cuts_documents` in `place_tokens`.
    `cu_seqlens_bm`, int32 `[b, m + 1]`, holds the first token of each document of the whole sequence, then s; attention
    stays within documents. Without `placement`, all documents are cut equally. `positions` says whether scores may
    depend on positions (`Scores.depend_on_positions`).
    """
    c, r, slots, shard = s // (2 * ranks), s // ranks, slots_of(rank, ranks), slice(0, s // ranks)
    if window is not None and window >= s:
        window = None
    if chunk is not None and chunk >= s:
        chunk = None
    whole = one_segment(s, device) if cu_seqlens_bm is None else cu_seqlens_bm
    chunks_bml = None if placement is None else placement.chunks_bml
    placed = place_tokens(whole, 2 * ranks, s, cuts_documents=cuts_documents, chunks_bml=chunks_bml)
    if not causal and window is None and not positions:
        assert placement is None
        return AttentionPlan((_bidirectional(shard, slots, placed, ranks, cu_seqlens_bm),), r)
    row_bs = rank_rows(placed.slot_bs, ranks)
    if positions or not causal or prefix_b is not None or chunk is not None:
        positions_bs = rank_order(placed.slot_bs, ranks).chunk(ranks, dim=1)[rank]
        mask = AttentionMask(
            cu_seqlens_bm, cu_seqlens_bm, causal, window, chunk, prefix_b=prefix_b, positions_bs=positions_bs
        )
        return AttentionPlan((AttentionCall(shard, mask, row_bs.T, (s,)),), r)
    if window is not None:
        c = c if placement is None else placement.gathered // 2  # most tokens of a slot of chunks
        most = {slot: (slot + 1) * c for slot in slots}
        if cu_seqlens_bm is None:
            most = {slot: min(keys, c + window - 1) for slot, keys in most.items()}
        whole_documents = {} if placement is None else {whole_slot_of(rank, ranks): r}
        return AttentionPlan((_windowed(shard, whole_documents | most, placed, row_bs, window),), r)
    if cu_seqlens_bm is not None:
        mine = slots if placement is None else (whole_slot_of(rank, ranks), *slots)
        return _of_documents(mine, placed, row_bs, r, r if placement is None else placement.gathered)
    # One document has full triangles and rectangles, which have faster kernels.
    halves = [(slot, slice(i * c, (i + 1) * c)) for i, slot in enumerate(slots)]
    triangles = [AttentionCall(rows, CAUSAL) for _, rows in halves]
    earlier = [(rows, row_bs.gather(1, first(placed.slot_bs, slot * c)).T) for slot, rows in halves if slot]
    rectangles = [AttentionCall(rows, AttentionMask(causal=False), keys, (len(keys),)) for rows, keys in earlier]
    return AttentionPlan((*triangles, *rectangles), r)


def _of_documents(
    slots: tuple[int, ...], placed: DocumentPlacement, row_bs: Tensor, r: int, gathered: int
) -> AttentionPlan:
    """Return the plan of a rank whose r tokens are in these slots, the last two of which have chunks of documents."""
    lengths, _, _, slot_bs = placed
    low, high = slots[-2:]
    segments = offsets(torch.cat([lengths[..., slot] for slot in slots], dim=1))
    local = AttentionCall(slice(0, r), AttentionMask(segments, segments))
    if not gathered:
        return AttentionPlan((local,), 0)
    # The gathered rows of a rank are its last ones: some of whole documents, if it has few tokens of others.
    skipped = r - gathered
    gathered_row_bs = row_bs // r * gathered + row_bs % r - skipped
    after_needed_bs = torch.where(row_bs % r < skipped, 2, 1)  # 2: not gathered
    counts = low * (gathered // 2), high * (gathered // 2)
    keys = [first(torch.where(slot_bs < slot, 0, after_needed_bs), count) for slot, count in zip((low, high), counts)]
    low_bm, high_bm = lengths[..., low], lengths[..., high]
    before_low_bm, before_high_bm = lengths[..., :low].sum(-1), lengths[..., :high].sum(-1)
    none_b1 = torch.zeros_like(low_bm[:, :1])
    whole_b1 = gathered - (low_bm + high_bm).sum(1, keepdim=True)
    unneeded_b1 = counts[0] - before_low_bm.sum(1, keepdim=True)
    mask = AttentionMask(
        offsets(torch.cat([whole_b1, low_bm, none_b1, high_bm], dim=1)),
        offsets(torch.cat([none_b1, before_low_bm, unneeded_b1, before_high_bm], dim=1)),
        causal=False,
    )
    keys_tb = gathered_row_bs.gather(1, torch.cat(keys, dim=1)).T
    return AttentionPlan((local, AttentionCall(slice(skipped, r), mask, keys_tb, counts)), gathered)


def _bidirectional(
    rows: slice, slots: tuple[int, int], placed: DocumentPlacement, ranks: int, cu_seqlens_bm: Tensor | None
) -> AttentionCall:
    """Return the call of all queries with all keys of the sequence.

    With documents, the keys occur once for each slot, because the queries of a segment must be adjacent.
    """
    lengths, _, _, slot_bs = placed
    row_bs, s = rank_rows(slot_bs, ranks), slot_bs.shape[1]
    if cu_seqlens_bm is None:
        return AttentionCall(rows, AttentionMask(causal=False), row_bs.T, (s,))
    queries = offsets(torch.cat([lengths[..., slot] for slot in slots], dim=1))
    keys = offsets(lengths.sum(-1).repeat(1, 2))
    return AttentionCall(rows, AttentionMask(queries, keys, causal=False), row_bs.repeat(1, 2).T, (s, s))


def _windowed(
    rows: slice, most_keys: Mapping[int, int], placed: DocumentPlacement, row_bs: Tensor, window: int
) -> AttentionCall:
    """Return the call of each slot's chunks with their own keys and the `window` - 1 tokens before them.

    Only the device knows how many keys the documents need. The call therefore has the largest number of keys that each
    of the rank's slots may need, `most_keys`, and the surplus keys form a last segment without queries.
    """
    lengths, document_bs, offset_bs, slot_bs = placed
    s = slot_bs.shape[1]
    starts = lengths.cumsum(-1) - lengths
    counts_q, counts_k, keys = [], [], []
    for slot, most in most_keys.items():
        length_bm, start_bm = lengths[..., slot], starts[..., slot]
        oldest_bm = torch.where(length_bm > 0, (start_bm - window + 1).clamp(min=0), s)
        needed_bs = (slot_bs <= slot) & (offset_bs >= oldest_bm.gather(1, document_bs))
        count_bm = torch.where(length_bm > 0, start_bm + length_bm - oldest_bm, 0)
        unneeded_b1 = most - count_bm.sum(1, keepdim=True)
        counts_q += [length_bm, torch.zeros_like(unneeded_b1)]
        counts_k += [count_bm, unneeded_b1]
        chosen = first(torch.where(needed_bs, 0, torch.where(slot_bs <= slot, 1, 2)), most)
        keys.append(row_bs.gather(1, chosen))
    cu_seqlens_q, cu_seqlens_k = (offsets(torch.cat(counts, dim=1)) for counts in (counts_q, counts_k))
    mask = AttentionMask(cu_seqlens_q, cu_seqlens_k, window=window)
    return AttentionCall(rows, mask, torch.cat(keys, dim=1).T, tuple(x.shape[1] for x in keys))


@dataclass(frozen=True)
class ContextAttention:
    """Softmax attention of a micro-batch on one rank of a context-parallel group.

    Forward and backward are collectives.

    Attributes:
        group: Context-parallel ranks.
        plan: Attention calls that this rank makes.
    """

    group: ProcessGroup
    plan: AttentionPlan

    def __call__(
        self, q_rbad: Tensor, k_rbgd: Tensor, v_rbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Return the outputs `[r, b, a, d]` for this rank's shards of q, k and v; `sink_a` holds the sink of each head.

        The gradient of the bias of `scores` covers only this rank's queries, like gradients of parameters.
        """
        known = all(call.mask.positions_bs is not None for call in self.plan.calls)
        assert known or not scores.depend_on_positions, "a plan with positions=True"
        return _ContextAttention.apply(q_rbad, k_rbgd, v_rbgd, sink_a, scores.distance_bias_ar, self, scores)

    @property
    def tensors(self) -> list[Tensor]:
        """Index tensors and masks, which the attention of every block reads."""
        indices = [call.keys_tb for call in self.plan.calls if call.keys_tb is not None]
        return [*indices, *(x for call in self.plan.calls for x in call.mask.tensors)]


class _KeysAndValues:
    """Keys and values of this rank and of all ranks.

    The all-gather of the last `gathered` tokens of each rank starts at construction, and the first call that needs
    other ranks' keys waits for it.
    """

    def __init__(self, k_rbgd: Tensor, v_rbgd: Tensor, group: ProcessGroup, gathered: int) -> None:
        self.local = k_rbgd.contiguous(), v_rbgd.contiguous()
        if gathered:
            last = [x[len(x) - gathered :] for x in self.local]
            self._gathered, self._work = all_gather_async(last, group)
        self._waits = True

    def for_call(self, call: AttentionCall) -> list[Tensor]:
        """Return k and v of a call, each `[t, b, g, d]`."""
        if call.keys_tb is None:
            return [x[call.rows] for x in self.local]
        if self._waits:
            self._work.wait()
            self._waits = False
        return [_take(x, call.keys_tb) for x in self._gathered]


def _take(x_sbgd: Tensor, rows_tb: Tensor) -> Tensor:
    """Return rows of each sample, `[t, b, ...]`; one column of `rows_tb` selects the same rows in all samples."""
    if rows_tb.shape[1] == 1:
        return x_sbgd.index_select(0, rows_tb[:, 0])
    return x_sbgd[rows_tb, torch.arange(x_sbgd.shape[1], device=x_sbgd.device)]


def _put(rows_tb: Tensor, values_tbgd: Tensor, into_sbgd: Tensor) -> None:
    """Write values to rows of each sample; no row may occur twice."""
    if rows_tb.shape[1] == 1:
        into_sbgd.index_copy_(0, rows_tb[:, 0], values_tbgd)
    else:
        into_sbgd[rows_tb, torch.arange(into_sbgd.shape[1], device=into_sbgd.device)] = values_tbgd


def merge(o_sbad: Tensor, lse_sba: Tensor, more_sbad: Tensor, more_sba: Tensor) -> tuple[Tensor, Tensor]:
    """Merge outputs and log-sum-exps of the same queries over two sets of keys; the second set may be empty.

    The softmax over all keys is the sum of the parts' softmaxes, weighted by their shares of the total sum.
    """
    weight_sba1 = torch.sigmoid(more_sba - lse_sba).unsqueeze(-1)
    wide = weight_sba1.dtype
    merged = torch.lerp(o_sbad.to(wide), more_sbad.to(wide), weight_sba1).to(o_sbad.dtype)
    return merged, torch.logaddexp(lse_sba, more_sba)


class _ContextAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_rbad: Tensor, k_rbgd: Tensor, v_rbgd: Tensor, sink_a: Tensor | None, bias_ar: Tensor | None,
        context: ContextAttention, scores: Scores,
    ) -> Tensor:  # fmt: skip
        keys_and_values = _KeysAndValues(k_rbgd, v_rbgd, context.group, context.plan.gathered)
        queries = q_rbad.contiguous()
        o_rbad = queries.new_empty(*queries.shape[:3], v_rbgd.shape[-1])
        lse_rba = q_rbad.new_empty(q_rbad.shape[:3], dtype=torch.promote_types(q_rbad.dtype, torch.float32))
        written = 0
        for call in context.plan.calls:
            rows = call.rows
            k, v = keys_and_values.for_call(call)
            q = queries[rows]
            attention.record_largest(q, k, call.mask, scores)
            o, lse = attention.forward(q, k, v, call.mask, scores)
            if rows.stop <= written:
                o, lse = merge(o_rbad[rows], lse_rba[rows], o, lse)
            o_rbad[rows], lse_rba[rows] = o, lse
            written = max(written, rows.stop)
        if sink_a is not None:
            o_rbad, lse_rba = with_sink(o_rbad, lse_rba, sink_a)
        # q, k and v are views, and their base is kept anyway.
        ctx.save_for_backward(q_rbad, k_rbgd, v_rbgd, o_rbad, lse_rba, bias_ar)
        ctx.context, ctx.sink_a, ctx.scores = context, sink_a, replace(scores, distance_bias_ar=None)
        return o_rbad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_rbad: Tensor) -> tuple[Tensor | None, ...]:
        q_rbad, k_rbgd, v_rbgd, o_rbad, lse_rba, bias_ar = ctx.saved_tensors
        scores, bias_grad = replace(ctx.scores, distance_bias_ar=bias_ar), ctx.needs_input_grad[4]
        context: ContextAttention = ctx.context
        group, gathered = context.group, context.plan.gathered
        keys_and_values = _KeysAndValues(k_rbgd, v_rbgd, group, gathered)
        q_rbad, do_rbad = q_rbad.contiguous(), do_rbad.contiguous()
        dq_rbad = torch.zeros_like(q_rbad)
        wide = torch.promote_types(k_rbgd.dtype, torch.float32)
        own_grads = [x.new_zeros(x.shape) for x in (k_rbgd, v_rbgd)]
        summed_grads = [x.new_zeros(gathered * group.size(), *x.shape[1:], dtype=wide) for x in (k_rbgd, v_rbgd)]
        dbias_ar: Tensor | None = None
        for call in context.plan.calls:
            do, q, o, lse = (x[call.rows] for x in (do_rbad, q_rbad, o_rbad, lse_rba))
            k, v = keys_and_values.for_call(call)
            dq, dk, dv, dbias = attention.backward(do, q, k, v, o, lse, call.mask, scores, bias_grad=bias_grad)
            if dbias is not None:
                dbias_ar = dbias if dbias_ar is None else dbias_ar + dbias
            dq_rbad[call.rows] += dq
            for mine, total, part in zip(own_grads, summed_grads, (dk, dv), strict=True):
                if call.keys_tb is None:
                    mine[call.rows] += part
                    continue
                # Adding one block after the other fixes the order of sums.
                for keys, values in zip(call.keys_tb.split(call.blocks), part.split(call.blocks), strict=True):
                    _put(keys, _take(total, keys) + values, total)
        if gathered:
            for total, mine in zip(summed_grads, own_grads, strict=True):
                mine[len(mine) - gathered :] += reduce_scatter(total.to(k_rbgd.dtype), group)
        dk, dv = own_grads
        dsink = None if ctx.sink_a is None else sink_gradient(do_rbad, o_rbad, lse_rba, ctx.sink_a)
        return dq_rbad, dk, dv, dsink, None if dbias_ar is None else dbias_ar.to(bias_ar.dtype), None, None
