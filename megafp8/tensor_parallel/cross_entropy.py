"""Cross-entropy of logits that are sharded over the vocabulary.

Gathering the logits would cost the largest tensor of the model. Three values per token are reduced instead: the maximum
(for stability), the sum of exponentials, and the label's logit, which one rank has. The gradient softmax − onehot is
then local. Columns that pad the vocabulary get no probability and no gradient, so the padding does not change a model.

The z-loss `z·log²Z` (PaLM, Chowdhery et al. 2022, arXiv:2204.02311) keeps the normalizer near 1; its gradient is
`2·z·log Z·softmax`.

With a soft cap logits become `cap·tanh(x / cap)`, whose derivative is `1 - tanh²` (Gemma 2, arXiv:2408.00118).

Shapes: s sequence, b micro-batch, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_sbv: Tensor, labels_sb: Tensor, group: ProcessGroup, vocab_size: int, z_loss: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
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
        if z_loss:
            loss_sb = loss_sb + z_loss * log_z_sb.square()

        softmax_sbv = exp_sbv.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax_sbv, local_sb, foreign_sb, log_z_sb, slope_sbv)
        ctx.z_loss, ctx.dtype = z_loss, logits_sbv.dtype
        return loss_sb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_sb: Tensor) -> tuple[Tensor | None, ...]:
        softmax_sbv, local_sb, foreign_sb, log_z_sb, slope_sbv = ctx.saved_tensors
        weight_sb = 1.0 + 2.0 * ctx.z_loss * log_z_sb if ctx.z_loss else torch.ones_like(log_z_sb)
        dx_sbv = softmax_sbv * (weight_sb * dloss_sb).unsqueeze(-1)
        own_sb = dloss_sb.masked_fill(foreign_sb, 0.0)
        dx_sbv.scatter_add_(-1, local_sb.unsqueeze(-1), -own_sb.unsqueeze(-1).to(dx_sbv.dtype))
        if slope_sbv is not None:
            dx_sbv *= slope_sbv
        return dx_sbv.to(ctx.dtype), None, None, None, None, None


def at_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits of the distribution that is sampled at a temperature, float32 or wider. A temperature in a tensor is
    broadcast, and gives the same bits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # CUDA divides by a number as a product with its reciprocal, which rounds twice.
    return wide / torch.as_tensor(temperature, dtype=wide.dtype, device=wide.device)


def vocab_parallel_cross_entropy(
    logits_sbv: Tensor, labels_sb: Tensor, group: ProcessGroup, *, vocab_size: int, z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Negative log-likelihood of each token, `[s, b]` float32 or wider, from this rank's logits `[s, b, v/t]`.

    `labels_sb` int64 in `[0, vocab_size)`; columns from `vocab_size` on are padding and ignored. `z_loss` adds `z_loss
    · log²Z`. `softcap`: that of the logits. Mask unwanted labels by multiplying the result. On CUDA it is fused unless
    logits are float64, and the backward overwrites the logits (`fused_cross_entropy`).
    """
    if logits_sbv.is_cuda and logits_sbv.dtype != torch.float64:
        from megafp8.tensor_parallel import fused_cross_entropy  # needs Triton, which comes with torch's CUDA builds

        return fused_cross_entropy.vocab_parallel_cross_entropy(
            logits_sbv, labels_sb, group, vocab_size=vocab_size, z_loss=z_loss, softcap=softcap
        )
    return _VocabParallelCrossEntropy.apply(logits_sbv, labels_sb, group, vocab_size, z_loss, softcap)
