"""Linear layers compute with the form of their weights that a processor multiplies fastest with a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.models.gpt import GPTStage
from megafp8.ops.onednn_weight import OneDnnInt8Weight, OneDnnWeight, packs
from megafp8.ops.packed_weight import PackedWeight, VectorWeight
from megafp8.ops.quantized_weight import QuantizedWeight
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


@torch.no_grad()
def pack_weights(stages: Sequence[GPTStage]) -> None:
    """Pack the weights of all linear layers, and free the parameters that are copied and that no embedding reads.

    On CPUs into oneDNN's order: weights in int8 stay so; those in FP8 or int4, which processors do not multiply, become
    bf16. On GPUs weights in bf16 stay where they are. Layers in FP8, experts, and what `_packed` does not know stay as
    they are.
    """
    for stage in stages:
        looked_up = None if stage.embedding is None else stage.embedding.word.weight
        for layer in stage.modules():
            if not isinstance(layer, ColumnParallelLinear | RowParallelLinear) or layer.state.plan.fp8:
                continue
            weight = layer.weight
            packed = _packed(layer.state.packed_weight, weight)
            if packed is None:
                continue
            layer.state.set_packed_weight(packed)
            if weight is not looked_up and not isinstance(packed, VectorWeight):
                weight.data = weight.data.new_empty(0)


def _packed(given: PackedWeight | None, parameter: Tensor) -> PackedWeight | None:
    """The weight in another form; None where it stays as it is."""
    if parameter.is_cuda:
        return VectorWeight(parameter.detach()) if given is None and parameter.dtype == torch.bfloat16 else None
    if not packs(parameter.dtype):
        return None
    if given is None:
        return OneDnnWeight(parameter)
    if not isinstance(given, QuantizedWeight) or parameter.dtype != torch.bfloat16:
        return None
    if given.format.kind == "int8":
        return OneDnnInt8Weight(given.data, given.scale_inv_gn[0])
    return OneDnnWeight(given.dequantize(parameter.dtype))
