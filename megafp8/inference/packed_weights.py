"""Packing of linear weights into the form that the processor multiplies fastest with a few tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.linear.onednn_weight import OneDnnInt8Weight, OneDnnWeight, packs, packs_int8
from megafp8.linear.packed_weight import PackedWeight, VectorWeight
from megafp8.linear.quantized_weight import QuantizedWeight
from megafp8.models.gpt import GPTStage
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


@torch.no_grad()
def pack_weights(stages: Sequence[GPTStage]) -> None:
    """Pack the weights of all linear layers, and free parameters that were copied and that no embedding reads.

    On CPUs, weights are packed into oneDNN's order. int8 weights stay int8; FP8 and int4 weights, which CPUs do not
    multiply, become bf16. bf16 weights are also kept in row-major order, for steps of one text, if all processes of the
    host together need at most half of its memory for both copies. On GPUs, bf16 weights are used in place. Layers that
    compute in FP8, experts, and weights that `_packed` does not handle stay unchanged.
    """
    layers = [
        (layer, stage.embedding is not None and layer.weight is stage.embedding.word.weight)
        for stage in stages
        for layer in stage.modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and not layer.state.plan.fp8
    ]
    elements = sum(math.prod((layer.state.packed_weight or layer.weight).shape) for layer, _ in layers)
    both = 2 * torch.bfloat16.itemsize * elements * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    keeps_rows = both <= _host_memory() / 2
    for layer, is_looked_up in layers:
        weight = layer.weight
        packed = _packed(layer.state.packed_weight, weight, keeps_rows)
        if packed is None:
            continue
        layer.state.set_packed_weight(packed)
        if not is_looked_up and not isinstance(packed, VectorWeight):
            weight.data = weight.data.new_empty(0)


def _packed(given: PackedWeight | None, parameter: Tensor, keeps_rows: bool) -> PackedWeight | None:
    """Return the packed form of a weight, or None if it stays unchanged."""
    if parameter.is_cuda:
        return VectorWeight(parameter.detach()) if given is None and parameter.dtype == torch.bfloat16 else None
    if not packs(parameter.dtype):
        return None
    keeps_rows = keeps_rows and parameter.dtype == torch.bfloat16
    if given is None:
        return OneDnnWeight(parameter, keeps_rows=keeps_rows)
    if not isinstance(given, QuantizedWeight) or parameter.dtype != torch.bfloat16:
        return None
    if given.format.kind == "int8":
        return OneDnnInt8Weight(given.data, given.scale_inv_gn[0]) if packs_int8() else None
    return OneDnnWeight(given.dequantize(parameter.dtype), keeps_rows=keeps_rows)


def _host_memory() -> int:
    """Return the size of this host's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
