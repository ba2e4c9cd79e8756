"""Source that reads a Hugging Face folder.

    config.json                            the model (`config`)
    model.safetensors, or                  the weights in one file,
    model.safetensors.index.json           or the file of each weight
    tokenizer.json, generation_config.json, ...

The constructor reads headers and checks everything that can be checked without reading weights: the model is supported,
each of its tensors is present with the right shape and in floating point, no file is truncated, and no tensor would
silently be left out. safetensors has no checksums, so flipped bits in the data are not detected.

One check does read weights: config.json has tie_word_embeddings = true, but the files also have an output layer. If the
output layer equals the embedding, it is left out. If it differs, the folder is refused, because readers disagree:
transformers 5 uses both tensors and does not tie them, and transformers 4 drops the output layer.

Layers of multi-token prediction (deepseek_v3) are numbered after the other layers. transformers neither reads nor
writes them, so config.json may announce layers that the files do not have. Their copies of the embedding and the output
layer are left out.

A tensor is read when it is requested, and only the requested rows are read. q, k and v of GPT-2 are parts of one
transposed tensor, which is read completely for each of them. The same applies to parts of a tensor with alternating
rows. Quantized weights are dequantized while they are read (`quantized_folder`).
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megafp8.checkpoint.files import BLOCK_BYTES, parse_object, read_file
from megafp8.config import with_keys
from megafp8.conversion.base import CheckpointSource, TensorInfo, without_padding
from megafp8.conversion.huggingface import quantized_folder
from megafp8.conversion.huggingface.config import read_config
from megafp8.conversion.huggingface.names import (
    Location,
    TensorNames,
    is_buffer,
    is_copy,
    is_of_shared_keys,
    present_name,
)
from megafp8.conversion.huggingface.traits import MTP_LAYERS
from megafp8.conversion.model import check_size, is_mtp, model_tensors
from megafp8.conversion.safetensors_format import DTYPES, Entry, read_header, read_rows
from megafp8.conversion.target import TOKENIZER_NAMES, own_files
from megafp8.data.tokenizer_files import CODE_FILES, GENERATION_FILE
from megafp8.host.messages import join_names, name_text
from megafp8.parallel.sharding import Shape
from megafp8.spec import ModelSpec

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"


class HfSource(CheckpointSource):
    """Source that reads the model in a Hugging Face folder.

    `about` has config.json under the key `huggingface`, without its quantization and multi-token prediction. Raises
    ValueError, with the file and the key or tensor, if the model is not supported.

    Args:
        path: Folder of the model.
        vocab_multiple: The vocabulary is padded with zeros to a multiple of this number (model.vocab_multiple).
    """

    #: File that describes the model.
    config_file: ClassVar[str] = CONFIG_FILE

    def __init__(self, path: str | Path, vocab_multiple: int = 128) -> None:
        self.path = Path(path)
        config = read_config_file(self.path)
        quantization = config.pop(quantized_folder.KEY, None)
        try:
            family, model = read_config(config)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG_FILE}: {error}") from None
        self.about = {"huggingface": config | ({MTP_LAYERS: 0} if MTP_LAYERS in config else {})}
        code = sorted(file.name for file in self.path.glob(CODE_FILES))  # states the pattern of tiktoken.model
        self.tokenizer_files = own_files(self.path, (*TOKENIZER_NAMES, GENERATION_FILE, *code))
        entries = quantized_folder.dequantized(self.path, quantization, _entries(self.path))
        self._open(family.model_type, family.names, model, entries, vocab_multiple)

    def _open(
        self, family: str, names: TensorNames, model: ModelSpec, entries: dict[str, Entry], vocab_multiple: int
    ) -> None:
        """Set `model` and `tensors`, after checking that the stored tensors `entries` are the ones of the model."""
        self._family, self._names = family, names
        self._entries = self._names.stored(model, self._with_prefix(entries))
        if not model.head.binary:
            unused = re.compile(names.other_heads)
            self._entries = {name: entry for name, entry in self._entries.items() if not unused.fullmatch(name)}
        try:
            check_size(model, [entry.shape for entry in self._entries.values()])
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        depths = model.num_prediction_layers if any(is_mtp(model, name) for name in self._entries) else 0
        self.model = with_keys(model, vocab_multiple=vocab_multiple, mtp_num_layers=depths)
        self.tensors = self._check()

    def _with_prefix(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Return the entries with the prefix of models with an output layer, without constants."""
        prefix, head = self._names.prefix, self._names.output.partition(".")[0]
        has_it = any(name.startswith(prefix) for name in entries)
        full = {present_name(n if has_it or n.split(".")[0] == head else prefix + n): e for n, e in entries.items()}
        return {name: entry for name, entry in full.items() if not is_buffer(name)}

    def _check(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of our tensors, after checking that the files have all of them and nothing else."""
        tensors: dict[str, TensorInfo] = {}
        used: set[str] = set()
        largest = max((math.prod(entry.shape) for entry in self._entries.values()), default=0)
        for name, shape in model_tensors(self.model).items():
            # Check first, because `location` makes a list of rows.
            if math.prod(without_padding(self.model, name, shape)) > largest:
                raise ValueError(
                    f"{self.path}: {name} has shape {list(shape)} by {self.config_file}, but the largest tensor in its "
                    f"files has {largest:,} values"
                )
            location = self.location(name, shape)
            entry = self._entries.get(location.name)
            if entry is None and re.fullmatch(self._names.zeros, location.name):
                tensors[name] = TensorInfo(shape, torch.float32)
                continue
            if entry is None:
                raise ValueError(f"{self.path} has no tensor {location.name}, which {self.config_file} requires")
            if entry.dtype not in DTYPES:
                raise ValueError(f"{entry.file}: {location.name} is {entry.dtype}; supported: {', '.join(DTYPES)}")
            if entry.shape != location.shape:
                shapes = f"{list(entry.shape)}, but {list(location.shape)} by {self.config_file}"
                raise ValueError(f"{entry.file}: {location.name} has shape {shapes}")
            tensors[name] = TensorInfo(shape, DTYPES[entry.dtype])
            used.add(location.name)
        if self.model.head.tied and (output := self._names.output) in self._entries:
            ours = "model.embedding.word.weight"
            word = self.location(ours, model_tensors(self.model)[ours]).name
            if not self._is_equal(output, word):
                raise ValueError(
                    f"{self.path}: {self.config_file} has tie_word_embeddings = true, but {output} in "
                    f"{self._entries[output].file.name} is not {word}, and releases of transformers differ in which "
                    "they use. Set tie_word_embeddings to false to use both tensors (as transformers 5 does), or "
                    f"remove {output} to tie them (as transformers 4 does)"
                )
            used.add(output)
        for name, original in self._names.copies.items():
            if {name, original} <= self._entries.keys() and self._is_equal(name, original):
                used.add(name)
        used |= self._constants()
        if self.model.num_prediction_layers:
            used |= {name for name in self._entries if is_mtp(self.model, name) and is_copy(name)}
        used |= {name for name in self._entries if is_of_shared_keys(self.model, name)}
        if unknown := sorted(self._entries.keys() - used):
            remainder = f" and {len(unknown) - 1:,} more" if len(unknown) > 1 else ""
            raise ValueError(
                f"{self._entries[unknown[0]].file} has a tensor {name_text(unknown[0])}{remainder}, which megafp8 "
                f"does not know in a {self._family} model: {join_names(unknown)}"
            )
        return tensors

    def _constants(self) -> set[str]:
        """Return the names of stored constants. Raises ValueError if one has another value in bf16."""
        expected = {name: x for name, x in self._names.constants_of(self.model).items() if name in self._entries}
        for name, value in expected.items():
            entry = self._entries[name]
            stored = read_rows(entry._replace(shape=(1,)), name, 0, 1) if not entry.shape else None
            if stored is None or stored.bfloat16() != torch.tensor(value).bfloat16():
                is_there = f"a tensor of shape {list(entry.shape)}" if stored is None else f"{stored.item():g}"
                raise ValueError(f"{entry.file}: {name} is {is_there}, but {value:g} in every {self._family} model")
        return {*expected}

    def _is_equal(self, copy: str, original: str) -> bool:
        """Return whether one stored tensor is a copy of another."""
        one, other = self._entries[copy], self._entries[original]
        if one.shape != other.shape or one.dtype not in DTYPES:
            return False
        step = max(1, BLOCK_BYTES // max(1, math.prod(other.shape[1:]) * DTYPES[other.dtype].itemsize))
        for first in range(0, other.shape[0], step):
            last = min(first + step, other.shape[0])
            a, b = read_rows(one, copy, first, last), read_rows(other, original, first, last)
            if not torch.equal(a.double(), b.double()):
                return False
        return True

    def location(self, name: str, shape: Shape) -> Location:
        """Return the location of our tensor `name` of `shape`. It has no rows for the padding of the vocabulary."""
        return self._names.locate(self.model, name, without_padding(self.model, name, shape))

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, dequantized if it is quantized."""
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` of a tensor, dequantized if it is quantized."""
        location = self.location(name, self.tensors[name].shape)
        if location.name not in self._entries:
            return torch.zeros(last - first)
        entry, rows = self._entries[location.name], location.rows[first:last]
        if location.outer is not None:
            entry = entry.element(location.outer)
        if location.flat:
            entry = entry._replace(shape=(math.prod(entry.shape),))
        if location.transposed:
            return read_rows(entry, location.name, 0, entry.shape[0])[:, rows].t().contiguous()
        padding = last - first - len(rows)
        if not len(rows):
            return read_rows(entry, location.name, 0, 0, padding)
        begin, end = int(rows.min()), int(rows.max()) + 1
        rows_of_entry = read_rows(entry, location.name, begin, end, padding)
        return rows_of_entry if torch.equal(rows, torch.arange(begin, end)) else rows_of_entry[rows - begin]

    @cached_property
    def fp8_weights(self) -> frozenset[str]:
        """Names of our tensors that are stored in E4M3."""
        locations = {name: self.location(name, info.shape) for name, info in self.tensors.items()}
        entries = {name: self._entries.get(location.name) for name, location in locations.items()}
        return frozenset(name for name, x in entries.items() if x is not None and quantized_folder.is_fp8(x))

    def fp8_rows(self, name: str, first: int, last: int) -> tuple[Tensor, Tensor] | None:
        """Return rows `[first, last)` of a tensor as stored: E4M3 data, and the scale of each row in fp32.

        Return None if they are not stored in E4M3 with one scale per row.
        """
        location = self.location(name, self.tensors[name].shape)
        rows = location.rows[first:last]
        if location.transposed or location.outer is not None or location.flat or len(rows) < last - first:
            return None
        begin, end = int(rows.min()), int(rows.max()) + 1
        stored = quantized_folder.fp8_rows(self._entries[location.name], begin, end)
        if stored is None:
            return None
        data, scales = stored
        return data.view(torch.uint8)[rows - begin].view(data.dtype), scales[rows - begin]


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the config.json of the folder `path`. Raises ValueError if it is missing or damaged."""
    file = path / CONFIG_FILE
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; a Hugging Face model is a folder with {CONFIG_FILE} in it")
    if not file.is_file():
        raise ValueError(f"{path} is not a Hugging Face model: it has no {CONFIG_FILE}")
    # transformers 4 writes infinite limits as JSON constants; convert them to the form that transformers 5 writes.
    return parse_object(file, read_file(file), lambda text: {"__float__": text})


def _entries(path: Path) -> dict[str, Entry]:
    """Return all tensors in the weight files of the folder `path`, by name."""
    if (path / INDEX_FILE).is_file():
        return _indexed(path)
    if (path / WEIGHTS_FILE).is_file():
        return read_header(path / WEIGHTS_FILE)
    bins = sorted(file.name for file in path.glob("pytorch_model*.bin*"))
    if bins:
        load = f"m = transformers.AutoModelForCausalLM.from_pretrained({str(path)!r})"
        save = f"m.save_pretrained({str(path) + '-safetensors'!r})"
        raise ValueError(
            f"{path} has its weights in {bins[0]}, a pickle, which can run arbitrary code when it is read; if you "
            f'trust it, convert it: python -c "import transformers; {load}; {save}"'
        )
    raise ValueError(f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _indexed(path: Path) -> dict[str, Entry]:
    """Return the tensors of several files with an index. Raises ValueError if files and index contradict each other."""
    index = path / INDEX_FILE
    files = parse_object(index, read_file(index)).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) and Path(f).name == f for f in files.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map from names to files")
    if (path / WEIGHTS_FILE).is_file() and WEIGHTS_FILE not in files.values():
        raise ValueError(f"{path} has both {WEIGHTS_FILE} and {INDEX_FILE}, which are two models; remove one")
    headers = {}
    for file, name in {file: name for name, file in reversed(files.items())}.items():
        if not (path / file).is_file():
            raise ValueError(f"{path / file} is missing; by {index.name} it holds {name}")
        headers[file] = read_header(path / file)
    for name, file in files.items():
        if name not in headers[file]:
            raise ValueError(f"{path / file} has no tensor {name}, but by {index.name} it holds it")
    for file, header in headers.items():  # transformers would load unlisted tensors, too
        if unlisted := [name for name in header if files.get(name) != file and not is_buffer(name)]:
            raise ValueError(f"{path / file} holds {join_names(unlisted)}, which {index.name} does not list there")
    return {name: headers[file][name] for name, file in files.items()}
