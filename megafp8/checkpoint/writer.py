"""Write a checkpoint tensor by tensor in one process. An interrupted writer can be continued.

A converter produces one tensor, or one part of a tensor, at a time, and may be killed at any point. So data files are
only appended to, and `add` returns a record of where the tensor lies. To continue, pass the records of the tensors that
are safely on disk (the caller keeps a journal of them); all other data is truncated. The index, which
torch.distributed.checkpoint writes in one piece, is made from the records at the end.

The result has the format that `save` writes: rectangles under global names, each in a `torch.save` archive. Large
tensors are cut into rectangles of whole rows, which limits a reader's memory. When a data file has become large, the
writer begins a new one. This module does not flush data files to disk; the caller does.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megafp8.checkpoint.dcp import write_index
from megafp8.checkpoint.files import BUFFER_BYTES, EMPTY, WRITTEN_BYTES, Checksum, ChecksummedFile, DropBehind
from megafp8.parallel.sharding import Shape

RECTANGLE_BYTES = 64 * 2**20
FILE_BYTES = 4 * 2**30
"""Size in bytes at which a data file is closed and the next one begins."""


class _Rectangle(NamedTuple):
    """Rectangle of a tensor, and the byte range of the data file that holds it."""

    offset: Shape
    shape: Shape
    file: str
    start: int
    length: int


class _Record(NamedTuple):
    """Location of a tensor, or of the part of it that begins at `low`. As text, it is one line of JSON."""

    name: str
    low: Shape
    shape: Shape
    """Shape of the whole tensor."""
    dtype: torch.dtype
    rectangles: list[_Rectangle]
    sums: dict[str, Checksum]
    """Checksums of the data files that hold the tensor, up to its end."""

    def __str__(self) -> str:
        return json.dumps(
            [self.name, self.low, self.shape, str(self.dtype).removeprefix("torch."), self.rectangles, self.sums]
        )

    @classmethod
    def from_text(cls, text: str) -> _Record:
        """Parse the text of a record."""
        name, low, shape, dtype, rectangles, sums = json.loads(text)
        parsed = [_Rectangle(tuple(offset), tuple(size), *where) for offset, size, *where in rectangles]
        checksums = {file: Checksum(*s) for file, s in sums.items()}
        return cls(name, tuple(low), tuple(shape), getattr(torch, dtype), parsed, checksums)


class CheckpointWriter:
    """Writer that appends tensors to data files in an existing folder.

    Args:
        folder: Folder of the data files.
        records: Records that `add` of an interrupted writer returned for the tensors to keep. All other data in the
            folder is deleted.
    """

    def __init__(self, folder: Path, records: Iterable[str] = ()) -> None:
        self.folder = folder
        self._records = {(record.name, record.low): record for record in map(_Record.from_text, records)}
        self._sums: dict[str, Checksum] = {}
        self._behind = DropBehind(WRITTEN_BYTES, written=True)
        for record in self._records.values():
            for name, checksum in record.sums.items():
                self._sums[name] = max(checksum, self._sums.get(name, checksum))  # the checksum of the longer content
        for file in folder.glob(f"*{DEFAULT_SUFFIX}"):
            if file.name in self._sums:
                os.truncate(file, self._sums[file.name].size)
            else:
                file.unlink()
        self._open(max(0, len(self._sums) - 1))

    @property
    def names(self) -> set[str]:
        """Names of the tensors written so far."""
        return {name for name, _ in self._records}

    @property
    def parts(self) -> set[tuple[str, Shape]]:
        """Names and first indices of the tensors, and parts of tensors, written so far."""
        return set(self._records)

    def add(self, name: str, tensor: Tensor, low: Shape | None = None, shape: Shape | None = None) -> str:
        """Append a tensor, or a part of a tensor, and return its record as a line of text.

        Python's buffers are flushed afterwards.

        Args:
            name: Global name of the tensor.
            tensor: Values, contiguous and on the CPU.
            low: If `tensor` is a part, its first index in the whole tensor; it has the same number of dims.
            shape: If `tensor` is a part, the shape of the whole tensor.
        """
        first = (0,) * tensor.dim() if low is None else low
        assert (name, first) not in self._records, f"{name} is written already"
        rectangles = []
        for offset, view in self._rows(tensor):
            if self._stream.tell() >= FILE_BYTES:
                self._flush()
                self._stream.close()
                self._open(self._number + 1)
            start = self._stream.tell()
            with self._raw.raising_failure():
                torch.save(view if view.untyped_storage().nbytes() == view.nbytes else view.clone(), self._stream)
            length = self._stream.tell() - start
            self._behind.add(self._file, start, length)
            at = tuple(o + n for o, n in zip(first, offset))
            rectangles.append(_Rectangle(at, tuple(view.shape), self._file.name, start, length))
        self._flush()
        sums = {rectangle.file: self._sums[rectangle.file] for rectangle in rectangles}
        record = _Record(name, first, shape or tuple(tensor.shape), tensor.dtype, rectangles, sums)
        self._records[name, first] = record
        return str(record)

    def finish(self) -> dict[str, Checksum]:
        """Write the index and flush it to disk; return the checksums of the index and of the data files by name."""
        self._stream.close()
        tensors: dict[str, TensorStorageMetadata] = {}
        stored = []
        for record in self._records.values():
            chunks = [ChunkStorageMetadata(torch.Size(r.offset), torch.Size(r.shape)) for r in record.rectangles]
            if record.name not in tensors:
                properties = TensorProperties(dtype=record.dtype)
                tensors[record.name] = TensorStorageMetadata(properties, torch.Size(record.shape), [])
            tensors[record.name].chunks.extend(chunks)
            for r in record.rectangles:
                index = MetadataIndex(record.name, torch.Size(r.offset))
                stored.append(WriteResult(index, r.length, _StorageInfo(r.file, r.start, r.length)))
        return self._sums | write_index(self.folder, Metadata(dict(tensors)), [stored])

    def _open(self, number: int) -> None:
        """Open the data file with this number to append to it."""
        self._number, self._file = number, self.folder / f"__0_{number}{DEFAULT_SUFFIX}"
        self._raw = ChecksummedFile(self._file, "ab", self._sums.get(self._file.name, EMPTY))
        self._stream = io.BufferedWriter(self._raw, BUFFER_BYTES)

    def _flush(self) -> None:
        self._stream.flush()
        self._sums[self._file.name] = self._raw.checksum

    def _rows(self, tensor: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Yield the first index and a view of rectangles of whole rows. The first dims of `tensor` may have size 1."""
        if tensor.dim() == 0:
            yield (), tensor
            return
        dim = next((d for d, n in enumerate(tensor.shape) if n > 1), 0)
        rows = max(1, RECTANGLE_BYTES * tensor.shape[dim] // max(1, tensor.nbytes))
        for i, view in enumerate(tensor.split(rows, dim)):
            yield tuple(i * rows if d == dim else 0 for d in range(tensor.dim())), view
