"""Which tensors a model has, from its config alone, and whether a source has them."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed import ProcessGroup

from megafp8.config import ModelConfig
from megafp8.conversion.base import Source
from megafp8.distributed.sharding import Shape, spec_of
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage


class _Alone:
    """As much of a process group of one rank as constructors ask for."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def model_tensors(model: ModelConfig) -> dict[str, Shape]:
    """Name (`model.layers.0.attention.q.weight`) and whole shape of each weight, from the embedding to the output.

    Asked of the real constructors, on torch's meta device. `vocab_size`, and `max_position_embeddings` where positions
    are learned, must be given.
    """
    assert model.max_position_embeddings is not None or model.position_embedding != "learned"
    context = BuildContext(
        tensor=cast(ProcessGroup, _Alone()),
        fp8=Fp8Manager(None, amax_group=None),
        dtype=torch.float32,
        device=torch.device("meta"),
        sequence_parallel=False,
    )
    layers = range(model.num_layers)
    stage = GPTStage(model, context, layers=layers, positions=model.max_position_embeddings or 1)
    return {f"model.{piece.name}": piece.global_shape for x in stage.parameters() for piece in spec_of(x).shards}


def seq_length(source: Source) -> int | None:
    """That of the run the source was saved by, if it says."""
    run = source.about.get("config", {}).get("training", {})
    return run.get("seq_length")


def resolved(source: Source) -> ModelConfig:
    """The source's model with its number of positions, which other formats want to know and ours may leave to the run.

    Raises ValueError where the size of the vocabulary is unknown.
    """
    model = source.model
    if model.vocab_size is None:
        raise ValueError(f"{source.path} does not say model.vocab_size")
    if model.max_position_embeddings is not None:
        return model
    table = source.tensors.get("model.embedding.position.weight")
    rows = seq_length(source) if table is None else table.shape[0]
    return model.model_copy(update={"max_position_embeddings": rows})


def check_source(source: Source, model: ModelConfig) -> dict[str, Shape]:
    """The tensors to write. Raises ValueError where the source lacks one, or has it with another shape or dtype."""
    tensors = model_tensors(model)
    for name, shape in tensors.items():
        info = source.tensors.get(name)
        if info is None:
            raise ValueError(f"{source.path} has no tensor {name}, which its model has")
        if tuple(info.shape) != shape or not info.dtype.is_floating_point:
            raise ValueError(
                f"{source.path}: {name} is {info.dtype} {list(info.shape)}, and its model has {list(shape)}"
            )
    return tensors
