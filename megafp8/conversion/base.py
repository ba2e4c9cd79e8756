"""Interface of a source, which provides whole tensors under megafp8's names.

A conversion is one loop, `sink.write(name, source.read(name))`, so n formats need n readers and n writers. Names and
shapes are the ones defined by `training.state`:

    model.layers.3.attention.q.weight     one tensor per projection, no matter how a format fuses them
    optimizer.exp_avg.<the same name>     only if the format has it; a sink only needs `model`

A tensor is whole, contiguous, on the CPU, in its stored dtype, and has the shape that it has in a native checkpoint:
the vocabulary is padded to a multiple of `model.vocab_multiple`, and rows from `model.vocab_size` on are ignored. If a
format has no padding, its source adds rows of zeros, and its sink removes the padding.

One tensor at a time is in memory. So a format that fuses tensors (Megatron-LM's query_key_value, GPT-2's c_attn) reads
and writes parts of a stored tensor, and cannot hash or compress whole files while it writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import Tensor

from megafp8.checkpoint.rectangles import TensorInfo
from megafp8.host.messages import value_text
from megafp8.parallel.sharding import Shape
from megafp8.spec import ModelSpec


class CheckpointSource(Protocol):
    """Checkpoint to read. Its constructor reads only headers, and raises ValueError if they have another format.

    Attributes:
        path: File or folder of the checkpoint.
        model: Config of the network.
        tensors: Shape and dtype of each tensor, by megafp8's name, in an order that is fast to read.
        about: Content of a native checkpoint's metadata.json, as far as the format has it.
        tokenizer_files: Files of the model's tokenizer.
    """

    path: Path
    model: ModelSpec
    tensors: Mapping[str, TensorInfo]
    about: Mapping[str, Any]
    tokenizer_files: Collection[Path]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor. Raises ValueError, with the names of file and tensor, if its data is damaged."""
        ...

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` of `read(name)`. If the format allows, nothing else is read from the disk."""
        return self.read(name)[first:last]

    def why_without(self, name: str) -> str:
        """Return a message for the user that explains why the tensor `name` cannot be read."""
        return f"{self.path} has no {name}"


def optimizer_key(key: str, weight: str) -> str:
    """Return the name of optimizer state in a checkpoint: state `key` (`master`, `exp_avg`, ...) of tensor `weight`."""
    return f"optimizer.{key}.{weight.removeprefix('model.')}"


class RenamedSource(CheckpointSource):
    """Source that provides tensors of another source, some of them under other names.

    Args:
        source: Source of the tensors.
        stored_names: Name of each tensor in `source`, by its name here.
    """

    def __init__(self, source: CheckpointSource, stored_names: Mapping[str, str]) -> None:
        self._source, self._stored_names = source, stored_names
        self.path, self.model, self.about = source.path, source.model, source.about
        self.tokenizer_files = source.tokenizer_files
        self.tensors = {name: source.tensors[stored] for name, stored in stored_names.items()}

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, which may have another name in the source."""
        return self._source.read(self._stored_names[name])

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` of `read(name)`."""
        return self._source.read_rows(self._stored_names[name], first, last)


class MasterWeights(RenamedSource):
    """Source that returns the fp32 masters as weights, if they are saved, for the tensors for which `where` is true."""

    def __init__(self, source: CheckpointSource, where: Callable[[str], bool] = lambda name: True) -> None:
        masters = {name: optimizer_key("master", name) for name in source.tensors if is_weight(name) and where(name)}
        saved = {name: master for name, master in masters.items() if master in source.tensors}
        super().__init__(source, {name: saved.get(name, name) for name in source.tensors})


def refuse(key: str, value: object, supported: str) -> NoReturn:
    """Raise ValueError for a key of a foreign config that has a value megafp8 does not support."""
    raise ValueError(f"{key} = {value_text(value)}: megafp8 has no such model; supported: {supported}")


def is_weight(name: str) -> bool:
    """Return whether the tensor `name` is a weight of the model, as opposed to optimizer state."""
    return name.startswith("model.")


def without_padding(model: ModelSpec, name: str, shape: Shape) -> Shape:
    """Return the shape of the tensor `name` of `shape` without padding, if each of its rows belongs to a token."""
    tables = ("embedding.word.weight", "per_layer_embedding.word.weight", "output.weight", "output.bias")
    return (model.stem.known_vocab_size, *shape[1:]) if name.removeprefix("model.") in tables else shape
