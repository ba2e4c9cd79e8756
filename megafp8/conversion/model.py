"""Which tensors a model has, from its config alone."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed import ProcessGroup

from megafp8.config import ModelConfig
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.sharding import Shape, spec_of


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
    return {f"model.{piece.name}": piece.global_shape for x in stage.parameters() for piece in spec_of(x).pieces}
