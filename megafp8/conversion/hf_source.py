"""A Hugging Face folder as a source of tensors under our names.

    config.json                            the model (`hf_config`)
    model.safetensors, or                  the weights in one file,
    model.safetensors.index.json           or which shard has which of them
    tokenizer.json, generation_config.json, ...

At the start headers are read and everything is checked that can be without reading weights: that the model is one of
ours, that each of its tensors is there, of its shape and in floating point, that no file is cut off, and that there is
no tensor we would silently leave out. safetensors has no checksums, so flipped bits in the data go unnoticed.

One check reads weights: a folder whose config.json has tie_word_embeddings = true, but whose files hold an output layer
beside the embedding. If the two are equal the copy is left out. If they differ the folder is refused, because what it
means depends on who reads it: transformers 5 uses both tensors and does not tie them, transformers 4 drops the output
layer.

A tensor is read when it is asked for, by rows where only some are wanted. q, k and v of GPT-2 are parts of one
transposed tensor; that is read whole for each of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.conversion.base import TensorInfo
from megafp8.conversion.hf_config import read_config
from megafp8.conversion.hf_names import base_prefix, is_buffer, place
from megafp8.conversion.model import model_tensors
from megafp8.conversion.safetensors_format import DTYPES, Entry, read_header, read_rows
from megafp8.conversion.target import TOKENIZER_NAMES
from megafp8.distributed.sharding import Shape

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
OTHER_FILES = (*TOKENIZER_NAMES, GENERATION_FILE)
"""What a model brings along besides config and weights."""
_OUTPUT = "lm_head.weight"
_BLOCK = 1 << 25  # bytes of a tensor that are compared at a time


class HfSource:
    """The model in the folder `path`. Raises ValueError naming file, and key or tensor, where it is none that we read.

    `vocab_multiple`: of what the vocabulary is padded to, with zeros, as `ModelConfig.vocab_multiple`. `about` has the
    whole config.json under the key `huggingface`.
    """

    def __init__(self, path: str | Path, vocab_multiple: int = 128) -> None:
        self.path = Path(path)
        config = read_config_file(self.path)
        try:
            family, model = read_config(config)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG_FILE}: {error}") from None
        self.model = model.model_copy(update={"vocab_multiple": vocab_multiple})
        self.about: Mapping[str, Any] = {"huggingface": config}
        self.tokenizer_files: Collection[Path] = [
            self.path / name for name in OTHER_FILES if (self.path / name).is_file()
        ]
        self._model_type = family.model_type
        self._entries = self._with_prefix(_entries(self.path))
        self.tensors: Mapping[str, TensorInfo] = self._check()

    def _with_prefix(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Names as a model with an output layer has them, without constants."""
        prefix = base_prefix(self._model_type)
        has_it = any(name.startswith(prefix) for name in entries)
        full = {n if has_it or n.startswith("lm_head.") else prefix + n: e for n, e in entries.items()}
        return {name: entry for name, entry in full.items() if not is_buffer(name)}

    def _check(self) -> dict[str, TensorInfo]:
        """Our tensors, all of which are found in the files and use all that is in them."""
        tensors: dict[str, TensorInfo] = {}
        used: set[str] = set()
        for name, shape in model_tensors(self.model).items():
            there = place(self._model_type, name)
            entry = self._entries.get(there.name)
            if entry is None:
                raise ValueError(f"{self.path} has no tensor {there.name}, which {CONFIG_FILE} promises")
            if entry.dtype not in DTYPES:
                raise ValueError(f"{entry.file}: {there.name} is {entry.dtype}; supported: {', '.join(DTYPES)}")
            expected = there.stored_shape(self._stored(name, shape))
            if entry.shape != expected:
                shapes = f"{list(entry.shape)}, and {list(expected)} by {CONFIG_FILE}"
                raise ValueError(f"{entry.file}: {there.name} has shape {shapes}")
            tensors[name] = TensorInfo(shape, DTYPES[entry.dtype])
            used.add(there.name)
        if self.model.tie_embeddings and _OUTPUT in self._entries:
            self._check_copy(self._entries[_OUTPUT])
            used.add(_OUTPUT)
        unknown = sorted(self._entries.keys() - used)
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            file = self._entries[unknown[0]].file
            raise ValueError(
                f"{file} has a tensor {unknown[0]}{more}, which no {self._model_type} model of ours has: "
                + ", ".join(unknown)
            )
        return tensors

    def _check_copy(self, output: Entry) -> None:
        """Raise ValueError where the output layer of a tied model is not a copy of its embedding."""
        name = place(self._model_type, "model.embedding.word.weight").name
        word = self._entries[name]
        equal = output.shape == word.shape and output.dtype in DTYPES
        step = max(1, _BLOCK // max(1, math.prod(word.shape[1:]) * DTYPES[word.dtype].itemsize))
        for first in range(0, word.shape[0] if equal else 0, step):
            last = min(first + step, word.shape[0])
            one, other = (read_rows(e, n, first, last) for e, n in ((word, name), (output, _OUTPUT)))
            equal = equal and torch.equal(one.double(), other.double())
        if not equal:
            raise ValueError(
                f"{self.path}: {CONFIG_FILE} has tie_word_embeddings = true, but {_OUTPUT} in {output.file.name} is "
                f"not {name}, and releases of transformers differ in what they use. Set tie_word_embeddings to false "
                f"to use both tensors (as transformers 5 does), or remove {_OUTPUT} to tie them (as 4 does)"
            )

    def _stored(self, name: str, shape: Shape) -> Shape:
        """`shape` without the padding of the vocabulary."""
        assert self.model.vocab_size is not None
        padded = name in ("model.embedding.word.weight", "model.output.weight")
        return (self.model.vocab_size, *shape[1:]) if padded else shape

    def read(self, name: str) -> Tensor:
        """The whole tensor, `[v, h]` with zeros for padding, in the dtype of the file."""
        return self.read_rows(name, 0, self.tensors[name].shape[0])

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `[first, last)` of `read(name)`, of which nothing else is read from the disk if the layout allows."""
        shape, there = self._stored(name, self.tensors[name].shape), place(self._model_type, name)
        entry, start = self._entries[there.name], there.part * shape[0]
        if there.transposed:
            stored = read_rows(entry, there.name, 0, entry.shape[0])
            return stored[:, start + first : start + last].t().contiguous()
        begin, end = min(first, shape[0]), min(last, shape[0])
        return read_rows(entry, there.name, start + begin, start + end, padding=last - first - (end - begin))


def read_config_file(path: Path) -> dict[str, Any]:
    """config.json of the folder `path`. Raises ValueError."""
    file = path / CONFIG_FILE
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; a Hugging Face model is one, with {CONFIG_FILE} in it")
    if not file.is_file():
        raise ValueError(f"{path} is no Hugging Face model: it has no {CONFIG_FILE}")
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no JSON object")
    return found


def _entries(path: Path) -> dict[str, Entry]:
    """All tensors in the weight files of `path`."""
    if (path / INDEX_FILE).is_file():
        if (path / WEIGHTS_FILE).is_file() and WEIGHTS_FILE not in _weight_map(path).values():
            raise ValueError(f"{path} has both {WEIGHTS_FILE} and {INDEX_FILE}, which are two models; remove one")
        return _indexed(path)
    if (path / WEIGHTS_FILE).is_file():
        return read_header(path / WEIGHTS_FILE)
    bins = sorted(file.name for file in path.glob("pytorch_model*.bin*"))
    if bins:
        load = f"m = transformers.AutoModelForCausalLM.from_pretrained({str(path)!r})"
        save = f"m.save_pretrained({str(path) + '-safetensors'!r})"
        raise ValueError(
            f"{path} has its weights in {bins[0]}, a pickle, which can run any code when it is read; if you trust it, "
            f'convert it: python -c "import transformers; {load}; {save}"'
        )
    raise ValueError(f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, by the index."""
    index = path / INDEX_FILE
    files = _read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) and Path(f).name == f for f in files.values()):
        raise ValueError(f"{index} is damaged: it has no weight_map of names to files")
    return files


def _indexed(path: Path) -> dict[str, Entry]:
    index, files = path / INDEX_FILE, _weight_map(path)
    first = {file: name for name, file in reversed(files.items())}
    headers = {}
    for file, name in first.items():
        if not (path / file).is_file():
            raise ValueError(f"{path / file} is missing; {index.name} says that it holds {name}")
        headers[file] = read_header(path / file)
    for name, file in files.items():
        if name not in headers[file]:
            raise ValueError(f"{path / file} has no tensor {name}, which {index.name} says it holds")
    for file, header in headers.items():  # transformers would load these too
        if unlisted := [name for name in header if files.get(name) != file and not is_buffer(name)]:
            raise ValueError(f"{path / file} holds {', '.join(unlisted)}, and {index.name} does not say so")
    return {name: headers[file][name] for name, file in files.items()}
