"""fp8.param_gather: which weights are gathered in FP8, and what that saves.

Weights of FP8 layers with one scale per tensor; embeddings, the output layer, norms, biases and layers in high
precision are gathered as values. All other code that reads a weight reads the fp32 masters: a checkpoint's
`model.<name>` is each rank's shard of them, rounded, so that it holds what a checkpoint of any other run holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megafp8.data_parallel.fp8_weight_shards import WeightShard, gathered_format
from megafp8.data_parallel.param_buffer import JointParamBuffer, ParamBuffer
from megafp8.fp8.formats import Format
from megafp8.fp8.linear_state import LinearState
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def fp8_weights(model: nn.Module) -> dict[nn.Parameter, tuple[LinearState, Format]]:
    """The weights of `model` that are gathered in FP8, with their layers and formats. Call it after `materialize`."""
    found: dict[nn.Parameter, tuple[LinearState, Format]] = {}
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            fmt = gathered_format(module.state)
            if fmt is not None:
                found[module.weight] = module.state, fmt
    return found


def weight_shards(
    weights: Mapping[nn.Parameter, tuple[LinearState, Format]],
    buffer: ParamBuffer | JointParamBuffer,
    optimizer: MixedPrecisionAdamW,
) -> list[WeightShard]:
    """This rank's shard of each weight; empty for those that other ranks own."""
    owned = {shard.param: shard for shard in optimizer.shards}
    found = []
    for param, (state, _) in weights.items():
        shard = owned.get(param)
        start = 0 if shard is None else shard.start
        master_f = torch.empty(0, device=param.device) if shard is None else optimizer.master_of(shard)
        found.append(WeightShard(state, buffer.fp8_data[param], start, master_f, param.dtype))
    return found


def report(buffer: ParamBuffer | JointParamBuffer, ranks: int) -> str:
    """Memory and traffic of the weights in `buffer`, sharded over `ranks`, against gathering values; for the log."""
    gib = 2**30
    rowwise = sum(data.nbytes for data in buffer.fp8_data.values())
    held, without = buffer.nbytes + rowwise, buffer.nbytes_unquantized + 2 * rowwise  # with the columnwise copies
    received, instead = (size * (ranks - 1) // ranks for size in (buffer.nbytes, buffer.nbytes_unquantized))
    return (
        f"FP8 parameters: {len(buffer.fp8_data)} weights are gathered in FP8; this rank holds {held / gib:.3f} GiB of "
        f"weights and their FP8 copies instead of {without / gib:.3f}, and receives {received / gib:.3f} GiB of "
        f"weights a step instead of {instead / gib:.3f}"
    )
