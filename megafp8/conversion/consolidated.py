"""Source and sink of consolidated checkpoints, which hold all weights in one safetensors file under megafp8's names.

consolidated.safetensors     whole weights, for `safetensors.torch.load_file`
consolidated.json            the model's config, a CRC-32 of each tensor, and metadata of the source checkpoint
tokenizer/                   the tokenizer's files, if any
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from megafp8.checkpoint.files import parse_object, read_file, to_json, write_at, write_file
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.config import model_spec
from megafp8.conversion.base import CheckpointSource, TensorInfo
from megafp8.conversion.safetensors_format import DTYPES, header, read_header, read_rows
from megafp8.conversion.target import Sink, tokenizer_files

WEIGHTS_FILE, ABOUT_FILE = "consolidated.safetensors", "consolidated.json"
FORMAT_VERSION = 1


class ConsolidatedSource(CheckpointSource):
    """Source that reads a consolidated folder. Raises ValueError with the name of a file that is missing or damaged."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / ABOUT_FILE
        if not file.is_file():
            raise ValueError(f"{self.path} is not a consolidated checkpoint: it has no {ABOUT_FILE}")
        described = parse_object(file, read_file(file))
        try:
            if described["format_version"] > FORMAT_VERSION:
                raise ValueError(f"format version {described['format_version']}; megafp8 reads {FORMAT_VERSION}")
            self.model = model_spec(described["model"])
            self.about, self._crcs = described["about"], described["crc32"]
            if not isinstance(self.about, dict) or not isinstance(self._crcs, dict):
                raise TypeError("about and crc32 must be mappings")
            run = self.about.get("config", {})
            if not isinstance(run, dict) or not isinstance(run.get("training", {}), dict):
                raise TypeError("about.config and its section training must be mappings")
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
        self._entries = read_header(self.path / WEIGHTS_FILE)
        for name, entry in self._entries.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"{self.path / WEIGHTS_FILE}: {name} is {entry.dtype}; supported: {', '.join(DTYPES)}")
        if self._entries.keys() != self._crcs.keys():
            raise ValueError(f"{self.path / WEIGHTS_FILE} and {file} belong to different checkpoints")
        self.tensors = {name: TensorInfo(entry.shape, DTYPES[entry.dtype]) for name, entry in self._entries.items()}
        self.tokenizer_files = tokenizer_files(self.path)

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, after comparing its CRC-32."""
        entry = self._entries[name]
        tensor = read_rows(entry, name, 0, entry.shape[0])
        if _crc(tensor) != self._crcs[name]:
            raise ValueError(f"{entry.file} is damaged at {name}: its bytes do not match their CRC-32")
        return tensor


class ConsolidatedSink(Sink):
    """Sink that writes a consolidated folder. It holds only the weights of the source."""

    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Write the header of the weights file, and return the names of the weights yet to be written."""
        names = [name for name in source.tensors if name.startswith("model.")]
        largest_first = sorted(names, key=lambda name: -source.tensors[name].dtype.itemsize)  # aligns every tensor
        first, self._starts = header({name: source.tensors[name] for name in largest_first})
        fresh = self._open_journal(source, names, options)
        self._crcs = dict(line.rsplit(" ", 1) for line in self._journal.done)
        self._stream = (self.hidden / WEIGHTS_FILE).open("w+b" if fresh else "r+b", buffering=0)
        write_at(self._stream, 0, memoryview(first))
        return [name for name in names if name not in self._crcs]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a weight to its place in the weights file, and record its CRC-32."""
        write_at(self._stream, self._starts[name], as_bytes(tensor))
        self._crcs[name] = _crc(tensor)
        self._journal.add(f"{name} {self._crcs[name]}")

    def finish(self) -> None:
        """Write the model's config, the checksums and the tokenizer."""
        self._stream.close()
        described = {
            "format_version": FORMAT_VERSION,
            "model": dict(self._source.model.keys),
            "crc32": self._crcs,
            "about": {**self._source.about, "converted_from": str(self._source.path)},
        }
        write_file(self.hidden / ABOUT_FILE, to_json(described))
        self._copy_tokenizer()


def _crc(tensor: Tensor) -> str:
    return f"{zlib.crc32(as_bytes(tensor)):08x}"
