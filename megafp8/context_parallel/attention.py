"""Causal attention of sequences that are sharded over context-parallel ranks.

A rank computes the outputs of its own queries and needs all ranks' keys and values. It all-gathers them, in forward and
again in backward, and reduce-scatters their gradients. It saves its own shard of q, k, v and the output only.

A ring, which passes blocks of k and v on while others are computed with, moves the same bytes, saves memory that is
small with grouped queries, and would hide a transfer that takes 1/18 of the time of the attention in Llama-3-8B. It
needs n small kernels in place of each large one (docs/decisions/0011-context-parallelism.md). Here the triangles of a
rank's own pieces overlap the gather. Llama 3 was trained with the all-gather too (Dubey et al. 2024, arXiv:2407.21783,
section 3.3.2).

A rank has two slots of pieces of documents (`context_parallel.split`). Queries attend to their own piece through a
causal triangle, which needs no other rank's keys, and to all of their document's keys in earlier slots: calls whose
results are merged by their log-sum-exps. With a sliding window one call has both, aligned at the ends of its segments.
The keys of a call are copied from the gathered shards in the order of the sequence.

Where two calls share queries or keys, results are added: dk and dv in fp32 on a rank and in the model's dtype over
ranks.

Shapes: s sequence, n ranks, r = s/n tokens of this rank's shard, c = r/2 of a slot; b micro-batch, a query heads, g
key-value heads of width d; m documents of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.context_parallel.split import (
    offsets,
    one_document,
    piece_lengths,
    rows_of_earlier,
    slots_of,
    token_slots,
)
from megafp8.distributed.collectives import all_gather_async, reduce_scatter
from megafp8.ops import attention
from megafp8.ops.attention import CAUSAL, AttentionMask


class Call(NamedTuple):
    """Queries and the keys that they attend to in one kernel call.

    `rows`: the queries' rows in the rank's shard. `keys_tb`: the keys' rows in rank order, each sample's; None: the
    queries' own tokens. `mask`: which of them.
    """

    rows: slice
    keys_tb: Tensor | None
    mask: AttentionMask


def plan(
    s: int, rank: int, ranks: int, *, window: int | None, cu_seqlens_bm: Tensor | None, device: torch.device
) -> tuple[Call, ...]:
    """The calls of `rank` in the order to make them. Does not synchronize the host.

    `window`: a token attends to that many latest tokens, itself included. `cu_seqlens_bm`: int32 `[b, m + 1]`, the
    first token of each document of the whole sequence, and s; attention stays within documents.
    """
    c, slots = s // (2 * ranks), 2 * ranks
    whole = one_document(s, device) if cu_seqlens_bm is None else cu_seqlens_bm
    lengths, slot_bs = piece_lengths(whole, slots), token_slots(whole, slots, s)
    mine = [(slot, slice(i * c, (i + 1) * c)) for i, slot in enumerate(slots_of(rank, ranks))]

    def keys(end: int) -> Tensor:
        return rows_of_earlier(slot_bs, ranks, end).T

    if window is not None and window < s:
        return tuple(
            Call(
                rows,
                keys(slot + 1),
                AttentionMask(offsets(lengths[..., slot]), offsets(lengths[..., : slot + 1].sum(-1)), window=window),
            )
            for slot, rows in mine
        )
    if cu_seqlens_bm is None:  # plain triangles and rectangles have faster kernels
        own = [Call(rows, None, CAUSAL) for _, rows in mine]
        return (*own, *(Call(rows, keys(slot), AttentionMask(causal=False)) for slot, rows in mine if slot))
    pieces = offsets(torch.cat([lengths[..., slot] for slot, _ in mine], dim=1))
    earlier = [
        Call(
            rows,
            keys(slot),
            AttentionMask(offsets(lengths[..., slot]), offsets(lengths[..., :slot].sum(-1)), causal=False),
        )
        for slot, rows in mine
        if slot
    ]
    return (Call(slice(0, 2 * c), None, AttentionMask(pieces, pieces)), *earlier)


@dataclass(frozen=True)
class ContextAttention:
    """softmax(q·kᵀ/√d)·v of a micro-batch on this rank of `group`; collective, as is its backward.

    `calls`: what this rank computes (`plan`).
    """

    group: ProcessGroup
    calls: tuple[Call, ...]

    def __call__(self, q_rbad: Tensor, k_rbgd: Tensor, v_rbgd: Tensor) -> Tensor:
        """`[r, b, a, d]` from this rank's shards of q, k and v."""
        return _ContextAttention.apply(q_rbad, k_rbgd, v_rbgd, self)

    @property
    def tensors(self) -> list[Tensor]:
        """What every block's attention reads besides its own inputs."""
        indices = [call.keys_tb for call in self.calls if call.keys_tb is not None]
        return [*indices, *(x for call in self.calls for x in call.mask.tensors)]


class _KeysAndValues:
    """k and v of this rank, and those of all ranks, whose all-gather is waited for when they are first needed."""

    def __init__(self, k_rbgd: Tensor, v_rbgd: Tensor, group: ProcessGroup) -> None:
        self.own = k_rbgd.contiguous(), v_rbgd.contiguous()
        self._gathered, self._work = all_gather_async(self.own, group)
        self._waits = True

    def of(self, call: Call) -> list[Tensor]:
        """k and v `[t, b, g, d]` of a call."""
        if call.keys_tb is None:
            return [x[call.rows] for x in self.own]
        if self._waits:
            self._work.wait()
            self._waits = False
        return [_take(x, call.keys_tb) for x in self._gathered]


def _take(x_sbgd: Tensor, rows_tb: Tensor) -> Tensor:
    """Rows of each sample, `[t, b, g, d]`; the same of all samples if there is one column."""
    if rows_tb.shape[1] == 1:
        return x_sbgd.index_select(0, rows_tb[:, 0])
    return x_sbgd[rows_tb, torch.arange(x_sbgd.shape[1], device=x_sbgd.device)]


def _add(total_sbgd: Tensor, rows_tb: Tensor, part_tbgd: Tensor) -> None:
    """Add to rows of each sample, none of them twice, so that the order of sums is that of calls."""
    if rows_tb.shape[1] == 1:
        total_sbgd.index_copy_(0, rows_tb[:, 0], total_sbgd.index_select(0, rows_tb[:, 0]) + part_tbgd)
        return
    sample = torch.arange(total_sbgd.shape[1], device=total_sbgd.device)
    total_sbgd[rows_tb, sample] = total_sbgd[rows_tb, sample] + part_tbgd


def merge(o_sbad: Tensor, lse_sba: Tensor, more_sbad: Tensor, more_sba: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the outputs and log-sum-exps of the same queries over two sets of keys, the second perhaps empty.

    A softmax over all keys is the parts' softmaxes, weighted by their parts of the total sum.
    """
    weight_sba1 = torch.sigmoid(more_sba - lse_sba).unsqueeze(-1)
    wide = weight_sba1.dtype
    merged = torch.lerp(o_sbad.to(wide), more_sbad.to(wide), weight_sba1).to(o_sbad.dtype)
    return merged, torch.logaddexp(lse_sba, more_sba)


class _ContextAttention(Function):
    @staticmethod
    def forward(ctx: Any, q_rbad: Tensor, k_rbgd: Tensor, v_rbgd: Tensor, context: ContextAttention) -> Tensor:
        keys_and_values = _KeysAndValues(k_rbgd, v_rbgd, context.group)
        queries = q_rbad.contiguous()
        o_rbad = torch.empty_like(queries)
        lse_rba = q_rbad.new_empty(q_rbad.shape[:3], dtype=torch.promote_types(q_rbad.dtype, torch.float32))
        written = 0
        for rows, keys_tb, mask in context.calls:
            k, v = keys_and_values.of(Call(rows, keys_tb, mask))
            o, lse = attention.forward(queries[rows], k, v, mask)
            if rows.stop <= written:
                o, lse = merge(o_rbad[rows], lse_rba[rows], o, lse)
            o_rbad[rows], lse_rba[rows] = o, lse
            written = max(written, rows.stop)
        ctx.save_for_backward(q_rbad, k_rbgd, v_rbgd, o_rbad, lse_rba)  # views: their base is kept anyway
        ctx.context = context
        return o_rbad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_rbad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_rbad, k_rbgd, v_rbgd, o_rbad, lse_rba = ctx.saved_tensors
        context: ContextAttention = ctx.context
        group = context.group
        keys_and_values = _KeysAndValues(k_rbgd, v_rbgd, group)
        q_rbad, do_rbad = q_rbad.contiguous(), do_rbad.contiguous()
        dq_rbad = torch.zeros_like(q_rbad)
        wide = torch.promote_types(k_rbgd.dtype, torch.float32)
        r, *rest = k_rbgd.shape
        own = [k_rbgd.new_zeros(r, *rest) for _ in range(2)]
        of_all_ranks = [k_rbgd.new_zeros(r * group.size(), *rest, dtype=wide) for _ in range(2)]
        for call in context.calls:
            rows = call.rows
            k, v = keys_and_values.of(call)
            dq, *dkv = attention.backward(do_rbad[rows], q_rbad[rows], k, v, o_rbad[rows], lse_rba[rows], call.mask)
            dq_rbad[rows] += dq
            for mine, total, part in zip(own, of_all_ranks, dkv, strict=True):
                if call.keys_tb is None:
                    mine[rows] += part
                else:
                    _add(total, call.keys_tb, part)
        dk, dv = (
            reduce_scatter(total.to(k_rbgd.dtype), group).add_(mine)
            for total, mine in zip(of_all_ranks, own, strict=True)
        )
        return dq_rbad, dk, dv, None
