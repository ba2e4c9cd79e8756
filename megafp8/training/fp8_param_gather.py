"""fp8.param_gather: which weights are FP8 codes on all ranks, and what that saves.

Weights of FP8 layers whose codes have one factor; embeddings, the output layer, norms, biases and layers that stay in
high precision are gathered as values. What of a weight is read elsewhere is read from the fp32 masters: a checkpoint's
`model.<name>` is each rank's share of them, rounded, so that it holds what that of any other run holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megafp8.data_parallel.fp8_weight_shards import WeightShard, fp8_data_format
from megafp8.data_parallel.param_buffer import ParamBuffer
from megafp8.fp8 import Fp8Linear
from megafp8.fp8.formats import Format
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def weights_as_codes(model: nn.Module) -> dict[nn.Parameter, tuple[Fp8Linear, Format]]:
    """The weights of `model`, with FP8 set up, that can be codes, with their layers and formats."""
    found: dict[nn.Parameter, tuple[Fp8Linear, Format]] = {}
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and isinstance(module.op, Fp8Linear):
            fmt = fp8_data_format(module.op)
            if fmt is not None:
                found[module.weight] = module.op, fmt
    return found


def shares(
    weights: Mapping[nn.Parameter, tuple[Fp8Linear, Format]], buffer: ParamBuffer, optimizer: MixedPrecisionAdamW
) -> list[WeightShard]:
    """What this rank casts of each; nothing of those that others own."""
    owned = {fragment.param: fragment for fragment in optimizer.shards}
    found = []
    for param, (op, _) in weights.items():
        fragment = owned.get(param)
        start = 0 if fragment is None else fragment.start
        master_f = torch.empty(0, device=param.device) if fragment is None else optimizer.master_of(fragment)
        found.append(WeightShard(op, buffer.fp8_data[param], start, master_f, param.dtype))
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
