"""All weights in one file, under our names, that any language reads: a source and a sink.

    consolidated.safetensors     the weights, whole, as `safetensors.torch.load_file` loads them
    consolidated.json            the model's config, a CRC-32 of each tensor, and what the checkpoint said of itself
    tokenizer/                   the tokenizer's files, if there are any

The header of the file says where each tensor lies, and is written first: shapes and dtypes are known before any value.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megafp8.checkpoint.store import write_text
from megafp8.config import ModelConfig
from megafp8.conversion.base import Source, TensorInfo
from megafp8.conversion.safetensors_format import DTYPES, header, read_header, read_rows, write_at
from megafp8.conversion.target import Target, tokenizer_files

WEIGHTS_FILE, ABOUT_FILE = "consolidated.safetensors", "consolidated.json"
FORMAT_VERSION = 1


class ConsolidatedSource:
    """The folder `path`. Raises ValueError naming the file that is missing or damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / ABOUT_FILE
        try:
            described = json.loads(file.read_text(encoding="utf-8"))
            if described["format_version"] > FORMAT_VERSION:
                raise ValueError(f"format version {described['format_version']}, and this is for {FORMAT_VERSION}")
            self.model = ModelConfig.model_validate(described["model"])
            self.about: Mapping[str, Any] = described["about"]
            self._crcs: Mapping[str, str] = described["crc32"]
        except FileNotFoundError:
            raise ValueError(f"{self.path} is no consolidated checkpoint: it has no {ABOUT_FILE}") from None
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
        self._entries = read_header(self.path / WEIGHTS_FILE)
        if self._entries.keys() != self._crcs.keys():
            raise ValueError(f"{self.path / WEIGHTS_FILE} and {file} are of different checkpoints")
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(entry.shape, DTYPES[entry.dtype]) for name, entry in self._entries.items()
        }
        self.tokenizer_files: Collection[Path] = tokenizer_files(self.path)

    def read(self, name: str) -> Tensor:
        """A whole tensor. Raises ValueError naming file and tensor where its data are damaged."""
        entry = self._entries[name]
        tensor = read_rows(entry, name, 0, entry.shape[0])
        if _crc(tensor) != self._crcs[name]:
            raise ValueError(f"{entry.file} is damaged at {name}: its CRC-32 is not that of what was written")
        return tensor


class ConsolidatedSink:
    """Writes the folder `path`: of the source only its weights."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._target = Target(self.path)

    def begin(self, source: Source) -> Collection[str]:
        self._source = source
        weights = {name: info for name, info in source.tensors.items() if name.startswith("model.")}
        largest_first = sorted(weights, key=lambda name: -weights[name].dtype.itemsize)  # so all are aligned
        first, self._starts = header({name: (weights[name].dtype, weights[name].shape) for name in largest_first})
        self._journal = self._target.begin(source, "consolidated")
        self._crcs = dict(line.rsplit(" ", 1) for line in self._journal.done)
        self._stream = (self._target.hidden / WEIGHTS_FILE).open("r+b" if self._crcs else "w+b", buffering=0)
        write_at(self._stream, 0, torch.frombuffer(bytearray(first), dtype=torch.uint8))
        return [name for name in weights if name not in self._crcs]

    def write(self, name: str, tensor: Tensor) -> None:
        write_at(self._stream, self._starts[name], tensor)
        self._crcs[name] = _crc(tensor)
        self._journal.add(f"{name} {self._crcs[name]}")

    def finish(self) -> None:
        self._stream.close()
        described = {
            "format_version": FORMAT_VERSION,
            "model": self._source.model.model_dump(mode="json"),
            "crc32": self._crcs,
            "about": {**self._source.about, "converted_from": str(self._source.path)},
        }
        write_text(self._target.hidden / ABOUT_FILE, json.dumps(described, indent=2) + "\n")
        self._target.publish(self._source.tokenizer_files)


def _crc(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data):08x}"
