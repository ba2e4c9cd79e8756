"""A Hugging Face folder as a sink: config.json and safetensors files that `transformers` loads without our code.

Shapes and dtypes are known before the first tensor, so `begin` distributes the tensors over files, writes their headers
and allocates them. Tensors may then come in any order; each is written to its place, a few rows at a time, so that
casting or transposing needs no second copy of it.

config.json is the source's own where the source came from Hugging Face and the file still describes the model; else it
is made from our config for the first family that has such a model. The tokenizer is written so that AutoTokenizer loads
it (`hf_tokenizer`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import BLOCK_BYTES, allocate, to_json, write_at
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.config import ModelConfig
from megafp8.conversion.base import Source, TensorInfo, is_vocabulary
from megafp8.conversion.hf_config import choose, differences, read_config, write_config
from megafp8.conversion.hf_names import Place, names_of
from megafp8.conversion.hf_source import CONFIG_FILE, GENERATION_FILE, INDEX_FILE, WEIGHTS_FILE
from megafp8.conversion.hf_tokenizer import TokenizerExport, export_tokenizer
from megafp8.conversion.model import check_source
from megafp8.conversion.safetensors_format import header
from megafp8.conversion.target import Sink

_TORCH_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Stored(NamedTuple):
    """A tensor of theirs: file, first byte, shape and dtype."""

    file: str
    start: int
    info: TensorInfo


class HfSink(Sink):
    """Writes the folder `path`. `file_bytes`: size above which another safetensors file is begun."""

    def __init__(self, path: str | Path, file_bytes: int = 5 * 10**9) -> None:
        super().__init__(path)
        self._file_bytes = file_bytes

    def begin(self, source: Source, options: Mapping[str, Any]) -> Collection[str]:
        model, shapes = check_source(source)
        dtypes = Counter(info.dtype for name, info in source.tensors.items() if name.startswith("model."))
        self._config = _config(model, source.about, max(dtypes, key=dtypes.__getitem__, default=torch.float32))
        self._tokenizer = export_tokenizer(source, self._config["model_type"])
        self._config |= {key: i for key, i in _token_ids(self._tokenizer).items() if key not in self._config}
        assert model.vocab_size is not None
        self._shapes = {n: (model.vocab_size, *s[1:]) if is_vocabulary(n) else s for n, s in shapes.items()}
        place = names_of(self._config["model_type"], model)
        self._places = {name: place(name) for name in shapes}
        headers = self._plan(source)
        layout = [self._config, {file: first.hex() for file, (first, _) in headers.items()}]
        if self._open_journal(source, shapes, options, layout):
            for name, (first, size) in headers.items():
                (self.hidden / name).write_bytes(first)
                allocate(self.hidden / name, size)
        return [name for name in shapes if name not in self._journal.done]

    def _plan(self, source: Source) -> dict[str, tuple[bytes, int]]:
        """Header and size of each file; where each tensor of theirs lies goes to `self._stored`."""
        theirs: dict[str, TensorInfo] = {}
        for name, there in self._places.items():
            stored = TensorInfo(there.stored_shape(self._shapes[name]), source.tensors[name].dtype)
            theirs.setdefault(there.name, stored)
        files: list[dict[str, TensorInfo]] = [{}]
        filled = 0
        for name, info in sorted(theirs.items(), key=lambda item: -item[1].dtype.itemsize):  # aligns all
            if files[-1] and filled + info.nbytes > self._file_bytes:
                files.append({})
                filled = 0
            files[-1][name] = info
            filled += info.nbytes
        self._stored: dict[str, Stored] = {}
        headers = {}
        for i, tensors in enumerate(files, 1):
            file = WEIGHTS_FILE if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
            first, starts = header(tensors)
            self._stored |= {name: Stored(file, starts[name], info) for name, info in tensors.items()}
            headers[file] = first, len(first) + sum(info.nbytes for info in tensors.values())
        return headers

    def write(self, name: str, tensor: Tensor) -> None:
        there, shape = self._places[name], self._shapes[name]
        stored = self._stored[there.name]
        assert len(tensor) >= shape[0], f"{name}: {tuple(tensor.shape)}"
        assert tensor.shape[1:] == shape[1:], f"{name}: {tuple(tensor.shape)}"
        with (self.hidden / stored.file).open("r+b", buffering=0) as stream:
            for start, block in _blocks(tensor[: shape[0]], there, stored):
                write_at(stream, start, as_bytes(block))
        self._journal.add(name)

    def finish(self) -> None:
        self._check_done(self._shapes)
        files = dict(self._tokenizer.files)
        by_name = {name: stored.file for name, stored in self._stored.items()}
        if set(by_name.values()) != {WEIGHTS_FILE}:
            total = sum(stored.info.nbytes for stored in self._stored.values())
            files[INDEX_FILE] = to_json({"metadata": {"total_size": total}, "weight_map": by_name})
        files[CONFIG_FILE] = to_json(self._config)
        if GENERATION_FILE not in files and (ids := _token_ids(self._tokenizer)):
            pad = {} if self._tokenizer.pad_id is None else {"pad_token_id": self._tokenizer.pad_id}
            files[GENERATION_FILE] = to_json(ids | pad)
        for name, content in files.items():
            (self.hidden / name).write_bytes(content)


def _token_ids(tokenizer: TokenizerExport) -> dict[str, int]:
    """Ids of the tokens that begin and end a text: a document of a run begins after the end of another."""
    return {} if tokenizer.eod_id is None else {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}


def _config(model: ModelConfig, about: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json. Raises ValueError where no family has such a model."""
    named = {"torch_dtype": _TORCH_DTYPES[dtype]} if dtype in _TORCH_DTYPES else {}
    theirs = about.get("huggingface")
    if theirs is not None and _describes(theirs, model):
        return {key: value for key, value in theirs.items() if key not in ("dtype", "torch_dtype")} | named
    return write_config(choose(model), model) | named


def _describes(config: Mapping[str, Any], model: ModelConfig) -> bool:
    """Whether a config.json that the model was converted from still describes it."""
    try:
        return not differences(model, read_config(config)[1])
    except ValueError:  # converted by an earlier release, which knew fewer keys
        return False


def _blocks(values: Tensor, there: Place, stored: Stored) -> Iterator[tuple[int, Tensor]]:
    """`values`, one of our tensors, as contiguous blocks of the file: first byte and values of each."""
    (shape, dtype), part = stored.info, there.skip + there.part * values.shape[0]
    if there.transposed:
        values = values.t()
    row_bytes = math.prod(values.shape[1:]) * dtype.itemsize
    rows = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for first in range(0, values.shape[0], rows):
        block = values[first : first + rows].to(dtype).contiguous()
        if there.transposed and there.parts > 1:  # our columns within each row of theirs
            for i, line in enumerate(block):
                yield stored.start + ((first + i) * shape[1] + part) * dtype.itemsize, line
        else:
            yield stored.start + first * row_bytes + (0 if there.transposed else part * row_bytes), block
