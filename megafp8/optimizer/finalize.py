"""Gradients between their data-parallel sum and the optimizer: shared parameters, norm and clipping.

Two kinds of parameters are held by several ranks of one model, each of which has a part of their gradient: norms under
sequence parallelism (a tensor-parallel rank has its slice of the sequence) and the tied embedding (the first stage
looks words up in it, the last multiplies by it; where a rank holds both, still as two parameters, so that their
gradients are summed in one order under every pipeline schedule). Their gradients are summed here, once a step.

The norm of the whole model's gradient counts each distinct parameter once. Parameters that this rank must not count
still enter, times zero: zero times a non-finite number is NaN, so a non-finite gradient on any rank shows on all of
them and all take the same decision.

Where gradients are sharded over data parallelism, all of this applies to the shards that a rank owns: sums over tensor
parallelism and between stages are of equal shards there (`buckets` ensures it), and the norm is summed over data
parallelism too. Nothing here waits for the device; clipping comes after the norm has been waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.data_parallel.grad_buffer import gradient_of
from megafp8.distributed import collectives
from megafp8.distributed.sharding import FlatShard, spec_of


def finalize_gradients(
    shards: Sequence[FlatShard],
    *,
    tensor_group: ProcessGroup | None,
    embedding_group: ProcessGroup | None,
    shared_params: Sequence[nn.Parameter],
) -> None:
    """Complete, in place, the gradients of parameters that several ranks of one model hold.

    Sums those with `spec.reduce_over_tp` over `tensor_group`, and those of `shared_params` (this stage's side of the
    tied weights; empty elsewhere) over `embedding_group`, or with each other where one rank holds both sides.
    """
    partial = [gradient_of(shard) for shard in shards if spec_of(shard.param).reduce_over_tp]
    collectives.coalesced_all_reduce(partial, tensor_group)
    shared = [gradient_of(shard) for param in shared_params for shard in shards if shard.param is param]
    if len(shared_params) == 2:  # sharded alike
        sides = len(shared) // 2
        for first, last in zip(shared[:sides], shared[sides:], strict=True):
            last.copy_(first.add_(last))
    else:
        collectives.coalesced_all_reduce(shared, embedding_group)


def global_norm(
    shards: Sequence[FlatShard],
    *,
    tensor_group: ProcessGroup | None,
    model_group: ProcessGroup | None,
    shard_group: ProcessGroup | None = None,
    device: torch.device,
) -> Tensor:
    """The 2-norm of the whole model's gradient, the same on every rank: fp32 scalar on the device of the gradients.

    `model_group` spans pipeline × tensor; `shard_group` the ranks over which gradients are sharded, None where each has
    all of them. Two all-reduces of eight bytes: a single one would need a communicator of the whole job. Parameters
    replicated over tensor parallelism count on its rank 0 only, copies of tied weights never. Squares are summed in
    float64, so the result depends on the layout only in its last bit. A NaN or infinity in any gradient of any rank
    makes the norm non-finite on all.
    """
    first_tensor_rank = tensor_group is None or tensor_group.rank() == 0
    counted: list[Tensor] = []
    uncounted: list[Tensor] = []
    for shard in shards:
        spec = spec_of(shard.param)
        counts = not spec.is_copy and (first_tensor_rank or not spec.replicated_over_tp)
        (counted if counts else uncounted).append(gradient_of(shard))
    total = _sum_of_squares(counted, device) + 0 * _sum_of_squares(uncounted, device)
    collectives.all_reduce(total, shard_group)
    return collectives.all_reduce(total, model_group).sqrt().float()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Float64 scalar."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum()


def clip_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `gradients` by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    `norm` is on the host by now, so a factor of 1 costs nothing.
    """
    assert norm.device.type == "cpu"
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
