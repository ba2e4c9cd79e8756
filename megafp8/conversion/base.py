"""What every format is made of: a source of whole tensors under megafp8's names, or a sink of them.

A conversion is one loop, `sink.write(name, source.read(name))`, so n formats take n readers and n writers and no
pair needs code of its own. In the middle stand megafp8's own names and shapes, as `training.state` lists them:

    model.layers.3.attention.q.weight     one tensor a projection, however a format fuses them
    optimizer.exp_avg.<the same name>     only where the format has it; `model` alone is enough for a sink

A tensor is whole (no rank's part), contiguous, on the CPU, in the dtype in which it is stored, and of the shape of a
native checkpoint: the vocabulary is padded to a multiple of `model.vocab_multiple`, and rows past `model.vocab_size`
mean nothing. Sources that have no padding add zeros, sinks whose format has none cut it off.

One tensor at a time is in memory. What that costs: a format that fuses (Megatron-LM's query_key_value, GPT-2's c_attn)
reads parts of a stored tensor, or writes into parts of it, and cannot hash or compress whole files as it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.config import ModelConfig
from megafp8.distributed.sharding import Shape


class TensorInfo(NamedTuple):
    """What a tensor is, without its values."""

    shape: Shape
    dtype: torch.dtype


class Source(Protocol):
    """A checkpoint to read. Its constructor reads headers only, and raises ValueError where they are no such format."""

    path: Path
    model: ModelConfig
    tensors: Mapping[str, TensorInfo]
    """By megafp8's names, in an order that is good to read."""
    about: Mapping[str, Any]
    """As in a native checkpoint's metadata.json, as far as the format says it; empty where it says nothing."""
    tokenizer_files: Collection[Path]
    """Files that lie beside the weights and belong to the model, such as tokenizer.json."""

    def read(self, name: str) -> Tensor:
        """A whole tensor. Raises ValueError naming file and tensor where its data are damaged."""
        ...


class Sink(Protocol):
    """A checkpoint to write. Nothing is visible under its final name before `finish`.

    A sink that was killed goes on: made again for the same source and path, it says in `begin` what it holds already.
    """

    path: Path

    def begin(self, source: Source) -> Collection[str]:
        """Prepare the files for what of `source` the format can hold; the names that are yet to be written.

        Raises ValueError where the format cannot express the model, or `path` is taken by something else.
        """
        ...

    def write(self, name: str, tensor: Tensor) -> None:
        """Store a whole tensor. Durable once `finish`, or a later `begin`, says so."""
        ...

    def finish(self) -> None:
        """Write what describes the tensors, flush everything, and make the checkpoint visible in one step."""
        ...
