"""A Hugging Face folder as a sink: config.json and safetensors shards that `transformers` loads with no code of ours.

Everything about the files is known before the first tensor: the source says shapes and dtypes, so `begin` cuts the
tensors into shards, writes their headers and allocates the files, all in the hidden folder `.<name>.incomplete`. Then
tensors may come in any order; each goes to its place, GPT-2's q, k and v into the columns of theirs, a few rows at a
time so that changing the dtype or transposing never needs a second tensor. The journal notes what is safe (`journal`).
A conversion that was killed and is started again with the same source, files and dtype finds the folder, and goes on;
with anything else it begins anew. `finish` adds what is small and renames the folder.

config.json is the source's own where it came from Hugging Face and still describes the model, to the last key; else it
is made from our config, as the first family that has such a model. The tokenizer is written so that AutoTokenizer loads
it (`hf_tokenizer`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.config import ModelConfig
from megafp8.conversion.base import Source
from megafp8.conversion.hf_config import choose, differences, read_config, write_config
from megafp8.conversion.hf_names import Place, place
from megafp8.conversion.hf_source import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, WEIGHTS_FILE
from megafp8.conversion.hf_tokenizer import TokenizerExport, export_tokenizer
from megafp8.conversion.journal import Journal
from megafp8.conversion.model import check_source, resolved
from megafp8.conversion.safetensors_format import header, write_at
from megafp8.conversion.target import check_free, publish
from megafp8.distributed.sharding import Shape

_BLOCK = 1 << 25  # bytes of a tensor that are converted at a time
_TORCH_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Stored(NamedTuple):
    """A tensor of theirs in the files."""

    file: str
    start: int
    shape: Shape
    dtype: torch.dtype


class HfSink:
    """The folder `path`, which must not exist or be empty. `dtype`: of all weights; None: as the source has them.

    `shard_size`: bytes of a file, above which another is begun.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype | None = None, shard_size: int = 5 * 10**9) -> None:
        self.path, self.dtype, self.shard_size = Path(path), dtype, shard_size

    def begin(self, source: Source) -> Collection[str]:
        """Prepare the hidden folder; which of `source.tensors` are yet to be written.

        Raises ValueError where no Hugging Face family has the model, a tensor is missing or of another shape, `path`
        holds something, or another process is writing it; OSError where the disk has no room.
        """
        check_free(self.path)
        self._source, model = source, resolved(source)
        self._config = _config(model, source.about, self._weights_dtype(source))
        self._tokenizer = export_tokenizer(source, self._config["model_type"])
        self._config |= {key: i for key, i in _token_ids(self._tokenizer).items() if key not in self._config}
        self._tensors = check_source(source, model)
        self._rows = model.vocab_size
        self._places = {name: place(self._config["model_type"], name) for name in self._tensors}
        headers = self._plan(source)
        text = json.dumps([str(source.path.resolve()), self._config, {f: h.hex() for f, (h, _) in headers.items()}])
        hidden = self.path.with_name(f".{self.path.name}.incomplete")
        hidden.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(hidden, hashlib.sha256(text.encode()).hexdigest())
        if not self._journal.done:
            _allocate(hidden, headers)
        return [name for name in self._tensors if name not in self._journal.done]

    def _weights_dtype(self, source: Source) -> torch.dtype:
        """The dtype of config.json: that of the largest share of the tensors."""
        dtypes = [info.dtype for name, info in source.tensors.items() if name.startswith("model.")]
        return self.dtype or max(dtypes, key=dtypes.count, default=torch.float32)

    def _plan(self, source: Source) -> dict[str, tuple[bytes, int]]:
        """Header and size of each file; where each tensor of theirs lies goes to `self._stored`."""
        theirs: dict[str, tuple[torch.dtype, Shape]] = {}
        for name, shape in self._tensors.items():
            there = self._places[name]
            stored = there.stored_shape(self._without_padding(name, shape))
            theirs.setdefault(there.name, (self.dtype or source.tensors[name].dtype, stored))
        shards: list[dict[str, tuple[torch.dtype, Shape]]] = [{}]
        filled = 0
        for name, (dtype, shape) in sorted(
            theirs.items(), key=lambda item: -item[1][0].itemsize
        ):  # aligned all through
            size = math.prod(shape) * dtype.itemsize
            if shards[-1] and filled + size > self.shard_size:
                shards.append({})
                filled = 0
            shards[-1][name] = (dtype, shape)
            filled += size
        count = len(shards)
        self._stored: dict[str, Stored] = {}
        headers = {}
        for i, tensors in enumerate(shards, 1):
            file = WEIGHTS_FILE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
            first, starts = header(tensors)
            self._stored |= {name: Stored(file, starts[name], tensors[name][1], tensors[name][0]) for name in tensors}
            headers[file] = first, len(first) + sum(math.prod(s) * d.itemsize for d, s in tensors.values())
        return headers

    def _without_padding(self, name: str, shape: Shape) -> Shape:
        padded = name in ("model.embedding.word.weight", "model.output.weight")
        return (self._rows or 0, *shape[1:]) if padded else shape

    def write(self, name: str, tensor: Tensor) -> None:
        """Store the whole tensor `name` in its place. `begin` says, of a later attempt, whether it is safe."""
        there, shape = self._places[name], self._without_padding(name, self._tensors[name])
        stored = self._stored[there.name]
        assert tuple(tensor.shape) == self._tensors[name], f"{name}: {tuple(tensor.shape)}"
        with (self._journal.folder / stored.file).open("r+b", buffering=0) as stream:
            for start, values in _blocks(tensor[: shape[0]], there, stored):
                write_at(stream, start, values)
        self._journal.add(name)

    def finish(self) -> None:
        """Write index, config.json and what lies beside, flush everything, and show the folder under its name."""
        hidden = self._journal.folder
        self._journal.flush()
        missing = sorted(self._tensors.keys() - self._journal.done)
        assert not missing, f"finish() before {missing[0]} was written"
        files = {name: stored.file for name, stored in self._stored.items()}
        if set(files.values()) != {WEIGHTS_FILE}:
            total = sum(math.prod(stored.shape) * stored.dtype.itemsize for stored in self._stored.values())
            _write(hidden / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
        _write(hidden / CONFIG_FILE, self._config)
        for name, content in self._tokenizer.files.items():
            (hidden / name).write_bytes(content)
        if GENERATION_FILE not in self._tokenizer.files and (ids := _token_ids(self._tokenizer)):
            pad = {} if self._tokenizer.pad_id is None else {"pad_token_id": self._tokenizer.pad_id}
            _write(hidden / GENERATION_FILE, ids | pad)
        publish(self._journal, self.path)


def _token_ids(tokenizer: TokenizerExport) -> dict[str, int]:
    """What starts and ends a text: a document of ours begins after the end of another."""
    return {} if tokenizer.eod_id is None else {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}


def _config(model: ModelConfig, about: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json. Raises ValueError where no family has such a model."""
    named = {"torch_dtype": _TORCH_DTYPES[dtype]} if dtype in _TORCH_DTYPES else {}
    theirs = about.get("huggingface")
    if theirs is not None and _describes(theirs, model):
        return {key: value for key, value in theirs.items() if key not in ("dtype", "torch_dtype")} | named
    return write_config(choose(model), model) | named


def _describes(config: Mapping[str, Any], model: ModelConfig) -> bool:
    """Whether a config.json that was read once still is that of `model`."""
    try:
        return not differences(model, read_config(config)[1])
    except ValueError:  # of a checkpoint that an earlier release converted, which knew fewer keys
        return False


def _allocate(folder: Path, headers: Mapping[str, tuple[bytes, int]]) -> None:
    """Make the files anew, each with its header and all the room it will need."""
    for old in folder.iterdir():
        if old.suffix in (".safetensors", ".json"):
            old.unlink()
    for name, (first, size) in headers.items():
        with (folder / name).open("wb") as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, size)
            except OSError as error:
                needed = sum(size for _, size in headers.values())
                text = f"{error.strerror}: {needed:,} bytes are needed in {folder}"
                raise OSError(error.errno, text) from error
            stream.write(first)


def _blocks(values: Tensor, there: Place, stored: Stored) -> Iterator[tuple[int, Tensor]]:
    """`values`, one of ours, in runs of bytes of the file: where each starts, and what it is."""
    size, part = stored.dtype.itemsize, there.part * values.shape[0]
    if there.transposed:
        values = values.t()
    row = math.prod(values.shape[1:]) * size
    rows = max(1, _BLOCK // max(row, 1))
    for first in range(0, values.shape[0], rows):
        block = values[first : first + rows].to(stored.dtype).contiguous()
        if there.transposed and there.parts > 1:  # in each row of theirs, our columns
            for i, line in enumerate(block):
                yield stored.start + ((first + i) * stored.shape[1] + part) * size, line
        else:
            yield stored.start + first * row + (0 if there.transposed else part * row), block


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
