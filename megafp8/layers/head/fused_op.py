"""Implementation of `megafp8.layers.head.op` with fused kernels, for logits of 16 or 32 bits on CUDA.

It computes the same loss with the same collectives, but without an fp32 copy of the logits or any other tensor of their
size. It saves the logits and two values per token for backward: the maximum, and the weight (1 + 2·z·log Z) / Σ, which
turns exp(x - maximum) into the softmax's part of the gradient. Saving only log Z would not be enough: exp(x - log Z)
would lose the digits that rounding removes from log Z if the maximum is large.

**Backward writes the gradient over the logits**, into the caller's memory if the logits are contiguous. It increments
autograd's version counter, so a second backward, or another function that saved the logits, raises an error.

Shapes: s sequence, b micro-batch, v vocabulary, t tensor-parallel size, n = s·b tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from megafp8.layers.head.kernel import gradient_, statistics
from megafp8.parallel.collectives import all_reduce


class FusedVocabParallelLosses(Function):
    """Fused implementation of `megafp8.layers.head.op.vocab_parallel_losses`; backward overwrites the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_sbv: Tensor, labels_sb: Tensor, group: ProcessGroup, vocab_size: int, z_loss: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return each label's cross-entropy and z-loss, `[s, b]` fp32, from this rank's logits `[s, b, v/t]`."""
        logits_sbv = logits_sbv.contiguous()
        columns = logits_sbv.shape[-1]
        ctx.first = group.rank() * columns
        ctx.valid = min(max(vocab_size - ctx.first, 0), columns)
        labels_n, ctx.softcap = labels_sb.flatten(), softcap
        own_maximum_n, own_total_n, label_logit_n = statistics(
            logits_sbv.view(-1, columns), labels_n, first=ctx.first, valid=ctx.valid, softcap=softcap
        )
        maximum_n = all_reduce(own_maximum_n.clone(), group, "max")
        own_total_n = own_total_n * (own_maximum_n - maximum_n).exp()
        total_n, label_logit_n = all_reduce(torch.stack([own_total_n, label_logit_n]), group).unbind()

        log_total_n = total_n.log()
        # The label's logit is zero on all ranks but one, so its sum is exact. The maximum is subtracted first.
        loss_n = log_total_n - (label_logit_n - maximum_n)
        weight_n, z_loss_n = total_n.reciprocal(), torch.zeros_like(loss_n)
        if z_loss:
            log_z_n = log_total_n + maximum_n
            z_loss_n = z_loss * log_z_n.square()
            weight_n = (1.0 + 2.0 * z_loss * log_z_n) * weight_n
        ctx.save_for_backward(logits_sbv, labels_n, maximum_n, weight_n)
        losses_sb = loss_n.view(labels_sb.shape), z_loss_n.view(labels_sb.shape)
        ctx.mark_non_differentiable(losses_sb[1])
        ctx.set_materialize_grads(False)
        return losses_sb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_sb: Tensor, _: None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, written over the logits themselves."""
        logits_sbv, labels_n, maximum_n, weight_n = ctx.saved_tensors
        dlogits_sbv = logits_sbv.detach()
        dlogits_nv = dlogits_sbv.view(-1, dlogits_sbv.shape[-1])
        dloss_n = dloss_sb.flatten().contiguous()
        where = {"first": ctx.first, "valid": ctx.valid}
        gradient_(dlogits_nv, labels_n, maximum_n, weight_n, dloss_n, **where, softcap=ctx.softcap)
        increment_version(logits_sbv)
        return dlogits_sbv, None, None, None, None, None
