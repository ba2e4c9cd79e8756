"""The interface of a source: whole tensors under megafp8's names.

A conversion is one loop, `sink.write(name, source.read(name))`, so n formats take n readers and n writers. Names and
shapes in between are those of `training.state`:

    model.layers.3.attention.q.weight     one tensor a projection, however a format fuses them
    optimizer.exp_avg.<the same name>     only where the format has it; `model` alone is enough for a sink

A tensor is whole, contiguous, on the CPU, in its stored dtype, and of the shape in a native checkpoint: the vocabulary
is padded to a multiple of `model.vocab_multiple`, and rows from `model.vocab_size` on are ignored. Sources without
padding add zeros, sinks without it cut it off.

One tensor at a time is in memory. So a format that fuses tensors (Megatron-LM's query_key_value, GPT-2's c_attn) reads
and writes parts of a stored tensor, and cannot hash or compress whole files on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor

from megafp8.checkpoint.rectangles import TensorInfo
from megafp8.host.messages import value_text
from megafp8.spec import ModelSpec


class CheckpointSource(Protocol):
    """A checkpoint to read. Its constructor reads headers only, and raises ValueError where they are of another format.

    `tensors`: by megafp8's names, in an order that is fast to read. `about`: as in a native checkpoint's metadata.json,
    as far as the format has it. `tokenizer_files`: files beside the weights that belong to the model.
    """

    path: Path
    model: ModelSpec
    tensors: Mapping[str, TensorInfo]
    about: Mapping[str, Any]
    tokenizer_files: Collection[Path]

    def read(self, name: str) -> Tensor:
        """A whole tensor. Raises ValueError naming file and tensor where its data is damaged."""
        ...

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `[first, last)` of `read(name)`, of which nothing else is read from the disk if the format allows."""
        return self.read(name)[first:last]

    def why_without(self, name: str) -> str:
        """Why the tensor `name` cannot be read, for a user."""
        return f"{self.path} has no {name}"


def optimizer_key(key: str, weight: str) -> str:
    """Name of the optimizer's state `key` (`master`, `exp_avg`, ...) of the tensor `weight` in a checkpoint."""
    return f"optimizer.{key}.{weight.removeprefix('model.')}"


class MasterWeights(CheckpointSource):
    """`source` with the fp32 masters as weights where it has them, of the tensors for which `where` is true."""

    def __init__(self, source: CheckpointSource, where: Callable[[str], bool] = lambda name: True) -> None:
        self._source, self._where = source, where
        self.path, self.model, self.about = source.path, source.model, source.about
        self.tokenizer_files = source.tokenizer_files
        self.tensors = {name: source.tensors[self._most_precise(name)] for name in source.tensors}

    def _most_precise(self, name: str) -> str:
        master = optimizer_key("master", name)
        is_saved = is_weight(name) and master in self._source.tensors
        return master if is_saved and self._where(name) else name

    def read(self, name: str) -> Tensor:
        return self._source.read(self._most_precise(name))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        return self._source.read_rows(self._most_precise(name), first, last)


def refuse(key: str, value: object, supported: str) -> NoReturn:
    """Raise ValueError for a key of a foreign config whose value megafp8 does not support."""
    raise ValueError(f"{key} = {value_text(value)}: megafp8 has no such model; supported: {supported}")


def is_weight(name: str) -> bool:
    """Whether the tensor `name` is one of the model."""
    return name.startswith("model.")


def is_vocabulary(name: str) -> bool:
    """Whether rows of the tensor `name` are tokens, the last of them padding."""
    tables = ("embedding.word.weight", "per_layer_embedding.word.weight", "output.weight", "output.bias")
    return name.removeprefix("model.") in tables
