"""Derive the tensors of a model from its config, and check that a source has them."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection
from typing import cast

import torch
from torch.distributed import ProcessGroup

from megafp8.config import with_keys
from megafp8.conversion.base import CheckpointSource, TensorInfo
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext, PlannedGroup
from megafp8.models.build import build_stage
from megafp8.models.gpt import GPTStage
from megafp8.parallel.sharding import Shape, spec_of
from megafp8.spec import ModelSpec

logger = logging.getLogger(__name__)


def is_mtp(model: ModelSpec, name: str) -> bool:
    """Return whether the tensor `name` belongs to a layer of multi-token prediction."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= model.num_blocks


def without_mtp(source: CheckpointSource) -> ModelSpec:
    """Return the model of `source` without multi-token prediction, and log that its layers are left out."""
    if not source.model.num_prediction_layers:
        return source.model
    logger.info(f"{source.path}: the layers of multi-token prediction are left out, because the target cannot have any")
    return with_keys(source.model, mtp_num_layers=0)


def check_size(model: ModelSpec, shapes: Collection[Shape], stacked: int = 0) -> None:
    """Raise ValueError if `model` needs more values than stored tensors of these shapes have. Call it before building.

    A config can state any size, but the stored shapes have been compared with file sizes. `stacked` is the number of
    layers that a single tensor may hold.
    """
    values, count = sum(map(math.prod, shapes)), len(shapes)
    parts = [part for layer in model.distinct_layers for part in (layer.mixer, layer.ffn)]
    keys = ("num_experts", "num_attention_heads", "ffn_hidden_size", "head_dim")
    most = {
        "num_layers": (len(model.layers), max(count, stacked)),
        **{key: (max(getattr(part, key, None) or 0 for part in parts), values) for key in keys},
        "hidden_size": (model.hidden_size, values),
        "vocab_size · hidden_size": ((model.stem.vocab_size or 0) * model.hidden_size, values),
    }
    for key, (size, limit) in most.items():
        if size > limit:
            stored = f"{count:,} tensors" if limit < values else f"{values:,} values"
            raise ValueError(f"{key} is {size:,} in the config, but there are only {stored}")


def check_size_of(source: CheckpointSource) -> None:
    """Raise ValueError if the model of `source` needs more values than its tensors have."""
    try:
        check_size(source.model, [tuple(info.shape) for info in source.tensors.values()])
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from None


def model_tensors(model: ModelSpec) -> dict[str, Shape]:
    """Return the global shape of each weight by name, such as `model.layers.0.attention.q.weight`, in forward order."""
    return {name: info.shape for name, info in _tensor_infos(model, torch.float32).items()}


def training_dtypes(source: CheckpointSource, precision: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each weight of `source` in a run in `precision`, by name.

    Most weights have the dtype `precision`. A few tensors always have the dtype in which their layer creates them: a
    router's selection bias, a layer's scalar, and a table of experts.
    """
    rows, positions = source.model.stem.vocab_size or 1, _positions(source) or 1
    infos = _tensor_infos(with_keys(source.model, vocab_size=rows, max_position_embeddings=positions), precision)
    return {name: info.dtype for name, info in infos.items()}


def _positions(source: CheckpointSource) -> int | None:
    """Return the number of positions in the model of `source`. If the model does not state it, use the run's data."""
    table = source.tensors.get("model.embedding.position.weight")
    return source.model.stem.max_position_embeddings or (seq_length(source) if table is None else table.shape[0])


def _tensor_infos(model: ModelSpec, precision: torch.dtype) -> dict[str, TensorInfo]:
    """Return the global shape of each weight, and its dtype in a run in `precision`, by name.

    The model must have `vocab_size`, and `max_position_embeddings` if positions are learned.
    """
    assert model.stem.max_position_embeddings is not None or model.stem.position_embedding != "learned"
    stage = build_on_meta(model, Fp8Manager(None, amax_group=None), precision)
    weights = {
        shard.name: TensorInfo(shard.global_shape, x.dtype) for x in stage.parameters() for shard in spec_of(x).shards
    }
    weights |= {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in stage.constants.items()}
    return {f"model.{name}": info for name, info in weights.items()}


def build_on_meta(
    model: ModelSpec, fp8: Fp8Manager, dtype: torch.dtype, tensor: int = 1, expert_tensor: int = 1
) -> GPTStage:
    """Build a model on torch's meta device, as the first of `tensor` tensor-parallel ranks has it.

    All experts are on this rank, or their slices for `expert_tensor` ranks.
    """
    ranks, experts = (cast(ProcessGroup, PlannedGroup(size)) for size in (tensor, expert_tensor))
    context = BuildContext(
        ranks, fp8, dtype, torch.device("meta"), sequence_parallel=False, expert=experts, expert_tensor=experts
    )
    positions = model.stem.max_position_embeddings or 1
    return build_stage(model, context, layers=range(len(model.layers)), positions=positions)


def seq_length(source: CheckpointSource) -> int | None:
    """Return the sequence length of the run that saved `source`, or None if it is unknown."""
    length: int | None = source.about.get("config", {}).get("training", {}).get("seq_length")
    return length


def common_dtype(source: CheckpointSource, names: Collection[str]) -> torch.dtype:
    """Return the most common dtype of the tensors `names`."""
    return Counter(source.tensors[name].dtype for name in names).most_common(1)[0][0]


def check_source(source: CheckpointSource) -> tuple[ModelSpec, dict[str, Shape]]:
    """Return the model to write to a foreign format, and the global shapes of its weights by name.

    The model's number of positions is filled in, and multi-token prediction is left out, because no foreign format has
    it. Raises ValueError if the size of the vocabulary is unknown, or if a tensor is missing or has another shape or
    dtype.
    """
    model = without_mtp(source)
    if model.stem.vocab_size is None:
        raise ValueError(f"{source.path} does not state model.vocab_size")
    model = with_keys(model, max_position_embeddings=_positions(source))
    check_size_of(source)
    infos = _tensor_infos(model, torch.float32)
    for name, (shape, dtype) in infos.items():
        info = source.tensors.get(name)
        if info is None:
            raise ValueError(f"{source.path} has no tensor {name}, which its model has")
        if tuple(info.shape) != shape or info.dtype.is_floating_point != dtype.is_floating_point:
            wanted = f"{'floats' if dtype.is_floating_point else 'integers'} {list(shape)}"
            raise ValueError(f"{source.path}: {name} is {info.dtype} {list(info.shape)}, but its model has {wanted}")
    return model, {name: info.shape for name, info in infos.items()}
