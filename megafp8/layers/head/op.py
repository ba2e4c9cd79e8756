"""Cross-entropy of logits that are sharded over the vocabulary.

Gathering the logits would create the largest tensor of the model. Instead, three values per token are reduced: the
maximum (for stability), the sum of exponentials, and the label's logit, which one rank has. The gradient softmax −
onehot is then local. Columns that pad the vocabulary have no probability and no gradient, so the padding does not
change a model.

The z-loss `z·log²Z` (PaLM, Chowdhery et al. 2022, arXiv:2204.02311) keeps the normalizer near 1; its gradient is
`2·z·log Z·softmax`. It is a separate value, so that a reported cross-entropy is in nats per token. The gradient of the
cross-entropy includes the gradient of the z-loss, and one pass over the logits computes both.

With a soft cap, logits become `cap·tanh(x / cap)` with the derivative `1 - tanh²` (Gemma 2, arXiv:2408.00118).

Shapes: s sequence, b micro-batch, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_reduce


class LabelLosses(NamedTuple):
    """Losses of each label, `[s, b]` float32 or wider.

    Attributes:
        cross_entropy: Negative log-likelihood in nats. Its gradient is the gradient of `cross_entropy + z_loss`.
        z_loss: Weighted z-loss, or zero without one. It has no separate gradient.
    """

    cross_entropy: Tensor
    z_loss: Tensor


class _VocabParallelLosses(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_sbv: Tensor, labels_sb: Tensor, group: ProcessGroup, vocab_size: int, z_loss: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        compute = torch.float64 if logits_sbv.dtype == torch.float64 else torch.float32
        columns = logits_sbv.shape[-1]
        first = group.rank() * columns
        valid = min(max(vocab_size - first, 0), columns)
        x_sbv = logits_sbv.to(compute, copy=True)
        slope_sbv: Tensor | None = None
        if softcap is not None:
            x_sbv.div_(softcap).tanh_()
            slope_sbv = 1.0 - x_sbv * x_sbv
            x_sbv *= softcap
        x_sbv[..., valid:] = -torch.inf
        maximum_sb = all_reduce(x_sbv.amax(dim=-1), group, "max")
        x_sbv -= maximum_sb.unsqueeze(-1)

        local_sb = labels_sb - first
        foreign_sb = (local_sb < 0) | (local_sb >= columns)
        local_sb = local_sb.masked_fill(foreign_sb, 0)
        label_logit_sb = x_sbv.gather(-1, local_sb.unsqueeze(-1)).squeeze(-1).masked_fill(foreign_sb, 0.0)
        exp_sbv = x_sbv.exp_()
        sums = all_reduce(torch.stack([exp_sbv.sum(dim=-1), label_logit_sb]), group)
        log_sum_sb = sums[0].log()
        log_z_sb = log_sum_sb + maximum_sb
        loss_sb = log_sum_sb - sums[1]
        z_loss_sb = z_loss * log_z_sb.square() if z_loss else torch.zeros_like(loss_sb)

        softmax_sbv = exp_sbv.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax_sbv, local_sb, foreign_sb, log_z_sb, slope_sbv)
        ctx.z_loss, ctx.dtype = z_loss, logits_sbv.dtype
        ctx.mark_non_differentiable(z_loss_sb)
        ctx.set_materialize_grads(False)
        return loss_sb, z_loss_sb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_sb: Tensor, _: None) -> tuple[Tensor | None, ...]:
        softmax_sbv, local_sb, foreign_sb, log_z_sb, slope_sbv = ctx.saved_tensors
        weight_sb = 1.0 + 2.0 * ctx.z_loss * log_z_sb if ctx.z_loss else torch.ones_like(log_z_sb)
        dx_sbv = softmax_sbv * (weight_sb * dloss_sb).unsqueeze(-1)
        own_sb = dloss_sb.masked_fill(foreign_sb, 0.0)
        dx_sbv.scatter_add_(-1, local_sb.unsqueeze(-1), -own_sb.unsqueeze(-1).to(dx_sbv.dtype))
        if slope_sbv is not None:
            dx_sbv *= slope_sbv
        return dx_sbv.to(ctx.dtype), None, None, None, None, None


def at_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the logits divided by the sampling temperature, float32 or wider.

    A temperature tensor is broadcast, and gives the same bits as a number.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # CUDA divides by a Python number by multiplying with its reciprocal, which rounds twice.
    return wide / torch.as_tensor(temperature, dtype=wide.dtype, device=wide.device)


def vocab_parallel_losses(
    logits_sbv: Tensor, labels_sb: Tensor, group: ProcessGroup, *, vocab_size: int, z_loss: float = 0.0,
    softcap: float | None = None,
) -> LabelLosses:  # fmt: skip
    """Compute the cross-entropy and the z-loss of each label from this rank's logits `[s, b, v/t]`.

    On CUDA the function is fused unless logits are float64, and backward then overwrites the logits (`fused_op`). To
    mask labels, multiply the results.

    Args:
        logits_sbv: This rank's logits.
        labels_sb: Labels, int64 in `[0, vocab_size)`.
        group: Tensor-parallel ranks.
        vocab_size: Size of the vocabulary. Columns from `vocab_size` on are padding and ignored.
        z_loss: Weight of log²Z.
        softcap: Soft cap of the logits; None means no cap.
    """
    losses: type[Function] = _VocabParallelLosses
    if logits_sbv.is_cuda and logits_sbv.dtype != torch.float64:
        from megafp8.layers.head import (
            fused_op as fused_cross_entropy,
        )  # needs Triton, which comes with torch's CUDA builds

        losses = fused_cross_entropy.FusedVocabParallelLosses
    return LabelLosses(*losses.apply(logits_sbv, labels_sb, group, vocab_size, z_loss, softcap))


def vocab_parallel_cross_entropy(
    logits_sbv: Tensor, labels_sb: Tensor, group: ProcessGroup, *, vocab_size: int, softcap: float | None = None
) -> Tensor:
    """Compute the cross-entropy of each label in nats, like `vocab_parallel_losses` without a z-loss."""
    return vocab_parallel_losses(logits_sbv, labels_sb, group, vocab_size=vocab_size, softcap=softcap).cross_entropy
