"""Divergence of vocabulary-sharded logits from a distribution that is sharded in the same way.

    KL(p ‖ q) = Σ p · (log p - log q)        q = softmax(logits / temperature), with the gradient (q - p) / temperature

As in the cross-entropy (`megafp8.layers.head.op`), a maximum and sums are reduced over the ranks, and columns that pad
the vocabulary have no probability and no gradient.

Shapes: s sequence, b micro-batch, v vocabulary, k most likely tokens, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_gather, all_reduce


def vocab_parallel_log_softmax(
    logits_sbv: Tensor, group: ProcessGroup, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return this rank's log softmax(logits / temperature), `[s, b, v/t]`, float32 or wider, without a gradient.

    Padding columns are -inf.
    """
    x_sbv = _scaled(logits_sbv.detach(), group, vocab_size, temperature)
    x_sbv -= all_reduce(x_sbv.amax(dim=-1), group, "max").unsqueeze(-1)
    return x_sbv.sub_(all_reduce(x_sbv.exp().sum(dim=-1), group).log().unsqueeze(-1))


def vocab_parallel_top_k(logits_sbv: Tensor, k: int, group: ProcessGroup, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each token and their ids, `[s, b, k]`, which are the same on all ranks."""
    columns = logits_sbv.shape[-1]
    x_sbv = _scaled(logits_sbv.detach(), group, vocab_size, 1.0)
    values, ids = x_sbv.topk(min(k, columns), dim=-1)
    gathered = [
        all_gather(x.contiguous().unsqueeze(0), group).movedim(0, -2).flatten(-2)
        for x in (values, ids + group.rank() * columns)
    ]
    largest, places = gathered[0].topk(k, dim=-1)
    return largest, gathered[1].gather(-1, places)


def _scaled(logits_sbv: Tensor, group: ProcessGroup, vocab_size: int, temperature: float) -> Tensor:
    """Return a copy in float32 or wider, divided by the temperature, with -inf in padding columns."""
    compute = torch.float64 if logits_sbv.dtype == torch.float64 else torch.float32
    columns = logits_sbv.shape[-1]
    x_sbv = logits_sbv.to(compute, copy=True).div_(temperature)
    x_sbv[..., min(max(vocab_size - group.rank() * columns, 0), columns) :] = -torch.inf
    return x_sbv


class _VocabParallelDivergence(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_sbv: Tensor, p_sbv: Tensor, group: ProcessGroup, vocab_size: int, temperature: float
    ) -> Tensor:
        log_q_sbv = vocab_parallel_log_softmax(logits_sbv, group, vocab_size=vocab_size, temperature=temperature)
        terms_sbv = torch.where(p_sbv > 0, p_sbv * (p_sbv.log() - log_q_sbv), 0.0)
        ctx.save_for_backward(log_q_sbv.exp_().sub_(p_sbv).div_(temperature))
        ctx.dtype = logits_sbv.dtype
        return all_reduce(terms_sbv.sum(dim=-1), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sb: Tensor) -> tuple[Tensor | None, ...]:
        (slope_sbv,) = ctx.saved_tensors
        return (slope_sbv * d_sb.unsqueeze(-1)).to(ctx.dtype), None, None, None, None


def vocab_parallel_divergence(
    logits_sbv: Tensor, p_sbv: Tensor, group: ProcessGroup, *, vocab_size: int, temperature: float = 1.0
) -> Tensor:
    """Return KL(p ‖ softmax(logits / temperature)) of each token, `[s, b]`, float32 or wider.

    `logits_sbv` and `p_sbv` are this rank's `[s, b, v/t]`. `p_sbv` must sum to 1 over the columns of all ranks, and be
    0 from column `vocab_size` on.
    """
    return _VocabParallelDivergence.apply(logits_sbv, p_sbv, group, vocab_size, temperature)
