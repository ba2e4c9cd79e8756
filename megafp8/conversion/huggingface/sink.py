"""Sink for Hugging Face folders, with config.json and safetensors files that `transformers` loads without our code.

Shapes and dtypes are known before the first tensor arrives, so `begin` distributes the tensors over files, writes the
headers and allocates the files. Tensors may then arrive in any order. Each one is written to its place, a few rows at a
time, so casting or transposing it does not need a second copy.

If the source came from Hugging Face and its config.json still describes the model, this config.json is written.
Otherwise it is made from our config for the first family that has such a model. The tokenizer is written such that
AutoTokenizer loads it (`tokenizer`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import BLOCK_BYTES, WRITTEN_BYTES, DropBehind, allocate, read_into, to_json, write_at
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.conversion.base import CheckpointSource, TensorInfo, without_padding
from megafp8.conversion.flat import differences
from megafp8.conversion.huggingface.config import FAMILIES, choose, read_config, write_config
from megafp8.conversion.huggingface.names import Location
from megafp8.conversion.huggingface.quantized_export import QuantizedExport, Write
from megafp8.conversion.huggingface.quantized_folder import KEY as QUANTIZATION
from megafp8.conversion.huggingface.source import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from megafp8.conversion.huggingface.tokenizer import TokenizerExport, export_tokenizer
from megafp8.conversion.model import check_source, common_dtype
from megafp8.conversion.safetensors_format import header
from megafp8.conversion.target import Sink
from megafp8.data.tokenizer_files import GENERATION_FILE
from megafp8.spec import ModelSpec

_TORCH_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Stored(NamedTuple):
    """Place of a Hugging Face tensor: its file, first byte, shape and dtype."""

    file: str
    start: int
    info: TensorInfo


class HfSink(Sink):
    """Sink that writes a Hugging Face folder.

    Args:
        path: Folder to write.
        file_bytes: Largest size of a safetensors file that holds more than one tensor.
        quantized: Plan of the weights to write in FP8, or None.
    """

    def __init__(self, path: str | Path, file_bytes: int = 5 * 10**9, quantized: QuantizedExport | None = None) -> None:
        super().__init__(path)
        self._file_bytes, self._quantized = file_bytes, quantized
        self._behind = DropBehind(WRITTEN_BYTES, written=True)

    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Plan and allocate the files, and return the names of the weights yet to be written.

        Raises ValueError if no Hugging Face family has the model.
        """
        model, shapes = check_source(source)
        dtype = common_dtype(source, shapes)
        self._config = _config(model, source.about, dtype)
        self._tokenizer = export_tokenizer(source, self._config["model_type"])
        self._config |= {key: i for key, i in _token_ids(self._tokenizer).items() if key not in self._config}
        self._shapes = {name: without_padding(model, name, shape) for name, shape in shapes.items()}
        names = FAMILIES[self._config["model_type"]].names
        self._constants = names.constants_of(model)
        self._locations = {name: names.locate(model, name, shape) for name, shape in self._shapes.items()}
        fp8 = {} if self._quantized is None else self._quantized.plan(self._locations)
        if self._quantized is not None:
            self._config[QUANTIZATION] = self._quantized.config()
        headers = self._plan(source, {**fp8, **{name: TensorInfo((), dtype) for name in self._constants}})
        layout = [self._config, {file: first.hex() for file, (first, _) in headers.items()}]
        if self._open_journal(source, shapes, options, layout):
            for name, (first, size) in headers.items():
                (self.hidden / name).write_bytes(first)
                allocate(self.hidden / name, size)
        return [name for name in shapes if name not in self._journal.done]

    def _plan(self, source: CheckpointSource, planned: Mapping[str, TensorInfo]) -> dict[str, tuple[bytes, int]]:
        """Return the header and size of each file, and store the place of each Hugging Face tensor in `self._stored`.

        `planned` holds shape and dtype of constants and of the tensors of quantized weights.
        """
        theirs = dict(planned)
        for name, location in self._locations.items():
            theirs.setdefault(location.name, TensorInfo(location.shape, source.tensors[name].dtype))
        files: list[dict[str, TensorInfo]] = [{}]
        filled = 0
        for name, info in sorted(theirs.items(), key=lambda item: -item[1].dtype.itemsize):  # aligns every tensor
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
        """Write our weight `name` to its rows of the Hugging Face tensor, quantized if planned."""
        location, shape = self._locations[name], self._shapes[name]
        stored = self._stored[location.name]
        assert len(tensor) >= shape[0], f"{name}: {tuple(tensor.shape)}"
        assert tensor.shape[1:] == shape[1:], f"{name}: {tuple(tensor.shape)}"
        if self._quantized is not None and location.name in self._quantized.weights:
            for part in self._quantized.writes(location.name, name, tensor):
                self._write_part(part)
        else:
            self._write_rows(tensor[: shape[0]], location, stored)
        self._journal.add(name)

    def _write_part(self, part: Write) -> None:
        """Write a part of a quantized weight, or of its scales."""
        stored = self._stored[part.name]
        rows = torch.arange(stored.info.shape[0]) if part.rows is None else part.rows
        location = Location(part.name, stored.info.shape, rows, transposed=False, outer=None)
        self._write_rows(part.values, location, stored)

    def _write_rows(self, values: Tensor, location: Location, stored: Stored) -> None:
        """Write one of our tensors to its rows of a Hugging Face tensor, in blocks."""
        dtype, start, shape, rows = stored.info.dtype, stored.start, location.shape, location.rows
        if location.outer is not None:
            shape = shape[1:]
            start += location.outer * math.prod(shape) * dtype.itemsize
        if location.flat:
            shape = (math.prod(shape),)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        # Our rows are rows of theirs, in runs of successive ones, or some of the columns in all rows of theirs.
        breaks = [] if location.transposed else ((rows.diff() != 1).nonzero().flatten() + 1).tolist()
        runs = torch.arange(shape[0] if location.transposed else len(rows)).tensor_split(breaks)
        blocks = [block for run in runs for block in run.split(max(1, BLOCK_BYTES // max(row_bytes, 1)))]
        with (self.hidden / stored.file).open("r+b", buffering=0) as stream:
            for block in blocks:
                first, last = int(block[0]), int(block[-1]) + 1
                if location.transposed:
                    at = start + first * row_bytes
                    theirs = torch.empty(last - first, shape[1], dtype=dtype)
                    if len(rows) < shape[1]:
                        read_into(stream, at, as_bytes(theirs))
                    theirs[:, rows] = values[:, first:last].t().to(dtype)
                else:
                    at = start + int(rows[first]) * row_bytes
                    theirs = values[first:last].to(dtype).contiguous()
                write_at(stream, at, as_bytes(theirs))
                self._behind.add(self.hidden / stored.file, at, theirs.nbytes)

    def finish(self) -> None:
        """Write constants, scales of the cache, the index, config.json, generation_config.json and the tokenizer."""
        for name, value in self._constants.items():
            self._write_part(Write(name, torch.tensor([0]), torch.tensor([value])))
        for part in [] if self._quantized is None else self._quantized.kv_cache_scales:
            self._write_part(part)
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
    """Return the ids of the tokens that begin and end a text."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eod_id}
    return {key: number for key, number in ids.items() if number is not None}


def _config(model: ModelSpec, about: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of `model`. Raises ValueError if no family has such a model."""
    named = {"torch_dtype": _TORCH_DTYPES[dtype]} if dtype in _TORCH_DTYPES else {}
    if (original := about.get("huggingface")) is not None:
        with suppress(ValueError):  # an earlier release, which knew fewer keys, converted the model
            if not differences(model, read_config(original)[1]):
                return {key: value for key, value in original.items() if key not in ("dtype", "torch_dtype")} | named
    return write_config(choose(model), model) | named
