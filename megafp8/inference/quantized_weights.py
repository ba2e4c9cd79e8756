"""Quantization of the weights of a model's linear layers for generation.

All linear layers of the blocks and the output layer are quantized. Embeddings, norms, biases, routers and the latents
of latent attention are not: they are small or looked up. The output layer is always in int8, because its errors are
errors of the logits (E4M3 in this layer alone raises the perplexity of SmolLM2-135M by 3 %).

With the format fp8, a folder that stores weights in FP8 keeps its precision. E4M3 weights with a scale for each row, or
one for the whole weight, keep their data and scales. Weights with a scale for each block are cast again. Layers that
the folder stores in floating point, or only partly in FP8, compute in the model's dtype, including the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.huggingface.source import HfSource
from megafp8.linear.quantized_weight import (
    WEIGHT_FORMATS,
    QuantizedWeight,
    QuantizedWeightFormat,
    check_columns,
    quantize_weight,
)
from megafp8.models.gpt import GPTStage
from megafp8.parallel.collectives import all_gather_objects, size
from megafp8.parallel.sharding import spec_of
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear

Linear = ColumnParallelLinear | RowParallelLinear


def weight_format(name: str, *, experts: bool) -> QuantizedWeightFormat:
    """Return the weight format with this name. Raises ValueError if it is unknown or the model has experts."""
    form = WEIGHT_FORMATS.get(name)  # type: ignore[call-overload]
    if form is None:
        raise ValueError(f"weights = {name}: must be one of {', '.join(WEIGHT_FORMATS)}")
    if experts:
        raise ValueError(
            f"weights = {name}: the weights of experts cannot be quantized; leave it out to generate in the "
            "checkpoint's precision"
        )
    return form


def stored_fp8(source: CheckpointSource, form: QuantizedWeightFormat) -> frozenset[str]:
    """Return the names of the weights that a folder stores in FP8; empty if all layers are to be quantized."""
    return source.fp8_weights if isinstance(source, HfSource) and form.kind == "fp8" else frozenset()


def check_stages(stages: Sequence[GPTStage], form: QuantizedWeightFormat, world: ProcessGroup | None) -> None:
    """Raise ValueError on all ranks of `world` if a layer of any rank does not have whole groups. Collective."""
    error = ""
    try:
        for stage in stages:
            for layer, layer_form in _layers(stage, form):
                ranks = size(_sharing(layer))
                check_columns(layer.state.site.name, layer.weight.shape[1] * ranks, ranks, layer_form)
    except ValueError as found:
        error = str(found)
    for message in all_gather_objects(error, world):
        if message:
            raise ValueError(message)


@torch.no_grad()
def quantize_stages(
    stages: Sequence[GPTStage],
    form: QuantizedWeightFormat,
    source: CheckpointSource | None = None,
    only: frozenset[str] = frozenset(),
) -> None:
    """Quantize layer by layer, and free the parameter of each layer unless an embedding reads it. Collective.

    Args:
        stages: Stages of this rank.
        form: Format of the weights.
        source: Checkpoint of the weights, which may store them in this format already.
        only: Names of the weights to quantize; empty means all.
    """
    for stage in stages:
        looked_up = None if stage.embedding is None else stage.embedding.word.weight
        for layer, layer_form in _layers(stage, form):
            weight = layer.weight
            if only and not only.issuperset(f"model.{shard.name}" for shard in spec_of(weight).shards):
                continue
            packed = _stored(layer, source) if layer_form.kind == "fp8" else None
            layer.state.set_packed_weight(packed or quantize_weight(weight.detach(), layer_form, _sharing(layer)))
            if weight is not looked_up:
                weight.data = weight.data.new_empty(0)


def _stored(layer: Linear, source: CheckpointSource | None) -> QuantizedWeight | None:
    """Return a layer's weight as stored in E4M3 with a scale for each row, or None if it is not stored so."""
    if not isinstance(source, HfSource):
        return None
    parts = []
    for shard in spec_of(layer.weight).shards:
        first, column = shard.offset
        part = source.fp8_rows(f"model.{shard.name}", first, first + shard.shape[0])
        if part is None:
            return None
        data, scale_inv = part
        parts.append((data.view(torch.uint8)[:, column : column + shard.shape[1]], scale_inv))
    device = layer.weight.device
    data = torch.cat([data for data, _ in parts]).to(device).view(WEIGHT_FORMATS["fp8"].dtype)
    scale_inv = torch.cat([scale_inv for _, scale_inv in parts]).to(device)
    return QuantizedWeight(WEIGHT_FORMATS["fp8"], data, scale_inv.unsqueeze(0))


def _layers(stage: GPTStage, form: QuantizedWeightFormat) -> Iterator[tuple[Linear, QuantizedWeightFormat]]:
    """Yield the linear layers of a stage, and the format of each."""
    output = None if stage.head is None else stage.head.output
    for module in stage.modules():
        if isinstance(module, Linear):
            yield module, WEIGHT_FORMATS["int8"] if module is output else form


def _sharing(layer: Linear) -> ProcessGroup | None:
    """Return the group of ranks that have other columns of the same rows, or None."""
    return layer.group if isinstance(layer, RowParallelLinear) else None
