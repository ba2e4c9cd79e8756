"""What is left to do to the gradients between their data-parallel sum and the optimizer.

Two kinds of parameters live on several ranks of one model, and each rank has seen only a part of their gradient: norms
under sequence parallelism (each tensor-parallel rank has its share of the sequence) and the tied embedding (the first
stage looks words up in it, the last multiplies by it; where a rank holds both, still as two parameters, so that their
gradients are summed in one order under every pipeline schedule). Their gradients are summed here, once a step.

The norm of the whole model's gradient then has to count each distinct parameter once. Parameters that this rank must
not count still enter, times zero: zero times a non-finite number is NaN, so a broken gradient on any rank shows on
all of them and all take the same decision.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8 import collectives
from megafp8.optimizer.grad_buffer import main_grad_of
from megafp8.sharding import spec_of


def finalize_gradients(
    params: Sequence[nn.Parameter],
    *,
    tensor_group: ProcessGroup | None,
    embedding_group: ProcessGroup | None,
    shared_params: Sequence[nn.Parameter],
) -> None:
    """Complete, in place, the gradients of parameters that several ranks of one model hold.

    Sums those with `spec.reduce_over_tp` over `tensor_group`, and those of `shared_params` (this stage's side of the
    tied weights; empty elsewhere) over `embedding_group`, or with each other where one rank holds both sides.
    """
    partial = [main_grad_of(param) for param in params if spec_of(param).reduce_over_tp]
    collectives.coalesced_all_reduce(partial, tensor_group)
    shared = [main_grad_of(param) for param in shared_params]
    if len(shared) == 2:
        shared[1].copy_(shared[0].add_(shared[1]))
    else:
        collectives.coalesced_all_reduce(shared, embedding_group)


def global_norm(
    params: Sequence[nn.Parameter], *, tensor_group: ProcessGroup | None, model_group: ProcessGroup | None
) -> Tensor:
    """The 2-norm of the whole model's gradient, the same on every rank: fp32 scalar on the device of the gradients.

    `model_group` spans pipeline × tensor. Parameters replicated over tensor parallel count on its rank 0 only, copies
    of tied weights never. Squares are summed in float64, so the result depends on the layout only in its last bit.
    A NaN or infinity in any gradient of any rank makes the norm non-finite on all.
    """
    first_tensor_rank = tensor_group is None or tensor_group.rank() == 0
    counted: list[Tensor] = []
    uncounted: list[Tensor] = []
    for param in params:
        spec = spec_of(param)
        counts = not spec.is_copy and (first_tensor_rank or not spec.replicated_over_tp)
        (counted if counts else uncounted).append(main_grad_of(param))
    device = main_grad_of(params[0]).device
    total = _sum_of_squares(counted, device) + 0 * _sum_of_squares(uncounted, device)
    return collectives.all_reduce(total, model_group).sqrt().float()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Float64 scalar."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum()


def clip_(flat: Tensor, norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in `flat` by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    `norm` stays on the device. A NaN norm makes all gradients NaN: do not step on them.
    """
    flat.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
