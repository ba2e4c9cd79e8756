"""parallel.fsdp: the model's weights in shares, gathered block by block, as values or as FP8 codes.

With `fp8.param_gather` each rank casts its rows after the step, and what torch gathers are codes: half the bytes, the
same bits, and nothing to cast in between. Without, an FP8 layer casts what was gathered, its rows in forward and its
columns in backward. Neither leaves copies behind: these would be as large as what sharding saves.

The embedding is needed in forward alone, and the output layer right from its forward to its backward. Where both have
one weight, that stays gathered meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megafp8.data_parallel.fp8_weight_gather import (
    Collective,
    Fp8Weight,
    Fp8WeightGather,
    SymmetricMemory,
    Transport,
)
from megafp8.data_parallel.fp8_weight_shards import WeightShard
from megafp8.data_parallel.fsdp import FullySharded
from megafp8.fp8 import Fp8Linear
from megafp8.fp8.formats import Format
from megafp8.models.gpt import GPTStage
from megafp8.parallel_state import ParallelState
from megafp8.tensor_parallel.random import initialize
from megafp8.training.overlap import on_one_host


def shard(
    stages: Sequence[GPTStage], parallel: ParallelState, *, dtype: torch.dtype, reduce_dtype: torch.dtype, seed: int
) -> FullySharded:
    """Shard the weights of `stages`, with blocks on the meta device, and give them initial values."""
    tied = [stage.shared_weight is not None for stage in stages]
    sharded = FullySharded(
        [(stage, stage.blocks if is_tied else stage.units) for stage, is_tied in zip(stages, tied)],
        group=parallel.data_context.group,
        reduce_group=parallel.data_context_backward.group,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        device=parallel.device,
    )
    for rows in sharded.row_shards.values():
        rounded = torch.empty(rows.values.shape, dtype=dtype, device=parallel.device)
        initialize(rows.param, rounded, seed)
        with torch.no_grad():
            rows.values.copy_(rounded)
    for stage in stages:
        if isinstance(stage.embedding, FSDPModule):
            stage.embedding.set_unshard_in_backward(False)
        if isinstance(stage.head, FSDPModule):
            stage.head.set_reshard_after_forward(False)
        for module in stage.modules():
            op = getattr(module, "op", None)
            if isinstance(op, Fp8Linear):
                op.transient = True
    return sharded


class Coded(NamedTuple):
    """Weights gathered as codes: what this rank casts of each, between two `synchronize`s of `gather`."""

    shares: list[WeightShard]
    gather: Fp8WeightGather


def gather_as_codes(
    weights: Mapping[nn.Parameter, tuple[Fp8Linear, Format]],
    sharded: FullySharded,
    parallel: ParallelState,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Coded:
    """Have `weights`, with their layers and formats, gathered as codes. Collective; `say` hears of it where GPUs of one
    host cannot fetch them from each other."""
    units = [[param for param in unit if param in weights] for unit in sharded.units]
    params = [param for unit in units for param in unit]
    blocks = [
        [Fp8Weight(sharded.row_shards[param], weights[param][1].dtype, _handed_to(weights[param][0])) for param in unit]
        for unit in units
    ]
    transport = _transport([weight.nbytes for block in blocks for weight in block], parallel, environment, say)
    gather = Fp8WeightGather(blocks, transport, parallel.data_context.size, parallel.device)
    shares = []
    for param, own in zip(params, gather.own, strict=True):
        rows, (op, fmt) = sharded.row_shards[param], weights[param]
        codes_mk = own.view(fmt.dtype).view(-1, rows.global_shape[1])
        shares.append(WeightShard(op, codes_mk, 0, rows.values.view(-1), rows.param.dtype))
    return Coded(shares, gather)


def _handed_to(op: Fp8Linear) -> Callable[[Tensor], None]:
    def arrived(codes_nk: Tensor) -> None:
        assert op.gathered_weight is not None, "gathered before it was cast"
        op.gathered_weight = op.gathered_weight._replace(data=codes_nk)

    return arrived


def _transport(
    sizes: Sequence[int], parallel: ParallelState, environment: Mapping[str, str], say: Callable[[str], None]
) -> Transport:
    group, device = parallel.data_context.group, parallel.device
    if sizes and device.type == "cuda" and group.size() > 1 and on_one_host(parallel.data_context, environment):
        try:
            return SymmetricMemory(sizes, group, device)
        except RuntimeError as error:
            say(f"fp8.param_gather: {error}; codes are gathered by collectives")
    return Collective(sizes, group, device)


def report(sharded: FullySharded, as_codes: Collection[nn.Parameter], ranks: int) -> str:
    """For the log: what a rank holds of the weights, and receives of `ranks` when it gathers all; `as_codes`: those of
    `sharded.params` that are gathered so."""
    gib, held, values, codes = 2**30, 0, 0, 0
    for rows in sharded.row_shards.values():
        elements, coded = rows.global_shape.numel(), rows.param in as_codes
        held += rows.values.nbytes + rows.padded_rows * rows.global_shape[1:].numel() * coded
        values += elements * rows.param.element_size()
        codes += elements * (1 if coded else rows.param.element_size())
    received, plainly = (size * (ranks - 1) / ranks / gib for size in (codes, values))
    instead = f", {len(as_codes)} of them as FP8 codes, instead of {plainly:.3f} as values" if as_codes else ""
    return (
        f"parallel.fsdp: this rank holds {held / gib:.3f} GiB of {len(sharded.row_shards)} weights; all of them "
        f"gathered are {received:.3f} GiB received{instead}"
    )
