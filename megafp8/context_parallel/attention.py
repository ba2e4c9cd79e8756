"""Causal attention of sequences that are sharded over context-parallel ranks.

A rank computes the outputs of its own queries and needs all ranks' keys and values. It all-gathers them, in forward and
again in backward, and reduce-scatters their gradients. It saves its own shard of q, k, v and the output only.

A ring, which passes blocks of k and v on while others are computed with, moves the same bytes, saves memory that is
small with grouped queries, and would hide a transfer that takes 1/18 of the time of the attention in Llama-3-8B. It
needs n small kernels in place of each large one (docs/decisions/0011-context-parallelism.md). Here the triangles of a
rank's own chunks overlap the gather. Llama 3 was trained with the all-gather too (Dubey et al. 2024, arXiv:2407.21783,
section 3.3.2).

Where two calls share queries or keys, results are added: outputs through their log-sum-exps (`lse_attention`), dk and
dv in fp32 on a rank and in the model's dtype over ranks.

Shapes: s sequence, n ranks, r = s/n tokens of this rank's shard; b micro-batch, a query heads, g key-value heads of
width d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.context_parallel import lse_attention
from megafp8.context_parallel.blocks import Block, plan, visible
from megafp8.context_parallel.split import to_rank_order, to_sequence_order
from megafp8.distributed.collectives import all_gather_async, reduce_scatter

MAX_MASK = 2**26
"""Elements: 64 MiB as booleans, 128 as cuDNN wants them."""


@dataclass(frozen=True)
class ContextAttention:
    """softmax(q·kᵀ/√d + mask)·v of a micro-batch on this rank of `group`; collective, as is its backward.

    `blocks`: what this rank computes (`blocks.plan`). `document_ids_bs` of the whole sequence; None where attention
    crosses documents.
    """

    group: ProcessGroup
    blocks: tuple[Block, ...]
    window: int | None
    document_ids_bs: Tensor | None

    def __call__(self, q_rbad: Tensor, k_rbgd: Tensor, v_rbgd: Tensor) -> Tensor:
        """`[r, b, a, d]` from this rank's shards of q, k and v."""
        return _ContextAttention.apply(q_rbad, k_rbgd, v_rbgd, self)

    def mask(self, block: Block, device: torch.device) -> Tensor | None:
        if block.kind != "masked":
            return None
        return visible(block.queries, block.keys, self.window, self.document_ids_bs, device)


def context_attention(
    group: ProcessGroup, s: int, *, window: int | None, document_ids_bs: Tensor | None
) -> ContextAttention:
    """The attention of a micro-batch of sequences of s tokens that are sharded over `group`."""
    blocks = plan(
        s,
        group.rank(),
        group.size(),
        window=window,
        documents=document_ids_bs is not None,
        max_mask=MAX_MASK // (1 if document_ids_bs is None else document_ids_bs.shape[0]),
    )
    return ContextAttention(group, blocks, window, document_ids_bs)


class _KeysAndValues:
    """k and v of this rank, and those of all ranks, whose all-gather is waited for when they are first needed."""

    def __init__(self, k_rbgd: Tensor, v_rbgd: Tensor, group: ProcessGroup) -> None:
        self.group = group
        self.own = k_rbgd.contiguous(), v_rbgd.contiguous()
        self._gathered, self._work = all_gather_async(self.own, group)
        self._in_order: list[Tensor] | None = None

    def of(self, block: Block) -> list[Tensor]:
        """k and v `[keys, b, g, d]` of a block."""
        if block.kind == "causal":
            return [x[_slice(block.rows)] for x in self.own]
        if self._in_order is None:
            self._work.wait()
            self._in_order = [to_sequence_order(x, self.group.size()) for x in self._gathered]
            self._gathered = []
        return [x[_slice(block.keys)] for x in self._in_order]


def _slice(r: range) -> slice:
    return slice(r.start, r.stop)


class _ContextAttention(Function):
    @staticmethod
    def forward(ctx: Any, q_rbad: Tensor, k_rbgd: Tensor, v_rbgd: Tensor, attention: ContextAttention) -> Tensor:
        keys_and_values = _KeysAndValues(k_rbgd, v_rbgd, attention.group)
        r, b, a, _ = q_rbad.shape
        o_rbad = torch.empty_like(q_rbad, memory_format=torch.contiguous_format)
        lse_bar1 = q_rbad.new_empty(b, a, r, 1, dtype=torch.promote_types(q_rbad.dtype, torch.float32))
        for block in attention.blocks:
            rows, mask = _slice(block.rows), attention.mask(block, q_rbad.device)
            k, v = keys_and_values.of(block)
            o, lse = lse_attention.forward(q_rbad[rows].contiguous(), k, v, mask, causal=block.kind == "causal")
            if block.kind == "whole":
                o, lse = lse_attention.merge(o_rbad[rows], lse_bar1[:, :, rows], o, lse)
            o_rbad[rows], lse_bar1[:, :, rows] = o, lse
        ctx.save_for_backward(q_rbad, k_rbgd, v_rbgd, o_rbad, lse_bar1)
        ctx.attention = attention
        return o_rbad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_rbad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_rbad, k_rbgd, v_rbgd, o_rbad, lse_bar1 = ctx.saved_tensors
        attention: ContextAttention = ctx.attention
        group = attention.group
        keys_and_values = _KeysAndValues(k_rbgd, v_rbgd, group)
        do_rbad = do_rbad.contiguous()
        dq_rbad = torch.zeros_like(q_rbad, memory_format=torch.contiguous_format)
        wide = torch.promote_types(k_rbgd.dtype, torch.float32)
        r, *rest = k_rbgd.shape
        own = [k_rbgd.new_zeros(r, *rest) for _ in range(2)]
        of_all_ranks = [k_rbgd.new_zeros(r * group.size(), *rest, dtype=wide) for _ in range(2)]
        for block in attention.blocks:
            rows, causal = _slice(block.rows), block.kind == "causal"
            q, lse = q_rbad[rows].contiguous(), lse_bar1[:, :, rows].contiguous()
            k, v = keys_and_values.of(block)
            mask = attention.mask(block, q_rbad.device)
            dq, *dkv = lse_attention.backward(do_rbad[rows], q, k, v, o_rbad[rows], lse, mask, causal=causal)
            dq_rbad[rows] += dq
            for total, partial in zip(own if causal else of_all_ranks, dkv, strict=True):
                total[rows if causal else _slice(block.keys)] += partial
        dk, dv = (
            reduce_scatter(to_rank_order(total.to(k_rbgd.dtype), group.size()), group).add_(mine)
            for total, mine in zip(of_all_ranks, own, strict=True)
        )
        return dq_rbad, dk, dv, None
