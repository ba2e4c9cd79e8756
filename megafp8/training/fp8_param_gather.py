"""fp8.param_gather: which weights are gathered in FP8, and what that saves.

Weights of FP8 layers with one scale per tensor; embeddings, the output layer, norms, biases and layers in high
precision
are gathered as values. Whoever else reads a weight reads the fp32 masters: a checkpoint's `model.<name>` is each rank's
shard of them, rounded, so that it holds what a checkpoint of any other run holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megafp8.data_parallel.fp8_weight_shards import WeightShard, gathered_format
from megafp8.data_parallel.param_buffer import ParamBuffer
from megafp8.fp8.formats import Format
from megafp8.fp8.linear_state import LinearState
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def weights_as_codes(model: nn.Module) -> dict[nn.Parameter, tuple[LinearState, Format]]:
    """The weights of `model`, with FP8 set up, that can be codes, with their layers and formats."""
    found: dict[nn.Parameter, tuple[LinearState, Format]] = {}
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            fmt = gathered_format(module.state)
            if fmt is not None:
                found[module.weight] = module.state, fmt
    return found


def shares(
    weights: Mapping[nn.Parameter, tuple[LinearState, Format]], buffer: ParamBuffer, optimizer: MixedPrecisionAdamW
) -> list[WeightShard]:
    """What this rank casts of each; nothing of those that others own."""
    owned = {fragment.param: fragment for fragment in optimizer.shards}
    found = []
    for param, (state, _) in weights.items():
        fragment = owned.get(param)
        start = 0 if fragment is None else fragment.start
        master_f = torch.empty(0, device=param.device) if fragment is None else optimizer.master_of(fragment)
        found.append(WeightShard(state, buffer.fp8_data[param], start, master_f, param.dtype))
    return found


def report(buffer: ParamBuffer, ranks: int) -> str:
    """For the log: what a rank holds and receives, where `ranks` share the weights in `buffer`, against values."""
    gib = 2**30
    copies = 2 * sum(codes.nbytes for codes in buffer.fp8_data.values())  # rows and columns, in both cases
    rows = copies // 2
    held, plain = buffer.nbytes + copies - rows, buffer.nbytes_unquantized + copies
    received, plainly = (size * (ranks - 1) // ranks for size in (buffer.nbytes, buffer.nbytes_unquantized))
    return (
        f"FP8 parameters: {len(buffer.fp8_data)} weights are codes; this rank holds {held / gib:.3f} GiB of weights "
        f"and their FP8 copies instead of {plain / gib:.3f}, and receives {received / gib:.3f} GiB of weights a step "
        f"instead of {plainly / gib:.3f}"
    )
