"""Writing a checkpoint tensor by tensor in one process; an interrupted writer can be continued.

A converter has one tensor, or one part of it, after the other, and may be killed in between. So data files are only
appended to, and `add` returns a record of where a tensor lies. To continue, pass in the records of the tensors that are
safe on disk (the caller keeps a journal); all other data is truncated. The index, which torch.distributed.checkpoint
writes in one piece, is made from the records at the end.

The result is what `save` writes: rectangles under global names, each an archive of `torch.save`. Large tensors are cut
into rectangles of whole rows, which bounds a reader's memory, and a data file that has become large is followed by
another. Data files are not flushed to disk here; the caller does that.
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
"""Size in bytes from which on a data file gets no further rectangle."""


class _Rectangle(NamedTuple):
    """A rectangle, and the bytes of the data file that holds it."""

    offset: Shape
    shape: Shape
    file: str
    start: int
    length: int


class _Record(NamedTuple):
    """Where a tensor, or the part of it that begins at `low`, lies; as text one line of JSON."""

    name: str
    low: Shape
    shape: Shape
    """Shape of the whole tensor."""
    dtype: torch.dtype
    rectangles: list[_Rectangle]
    sums: dict[str, Checksum]
    """Checksums of the data files that hold it, up to its end."""

    def __str__(self) -> str:
        return json.dumps(
            [self.name, self.low, self.shape, str(self.dtype).removeprefix("torch."), self.rectangles, self.sums]
        )

    @classmethod
    def from_text(cls, text: str) -> _Record:
        name, low, shape, dtype, rectangles, sums = json.loads(text)
        parsed = [_Rectangle(tuple(offset), tuple(size), *where) for offset, size, *where in rectangles]
        checksums = {file: Checksum(*s) for file, s in sums.items()}
        return cls(name, tuple(low), tuple(shape), getattr(torch, dtype), parsed, checksums)


class CheckpointWriter:
    """Appends tensors to data files in the existing folder `folder`.

    `records`: what `add` of an interrupted writer returned for the tensors that are to stay; all other data in the
    folder is deleted.
    """

    def __init__(self, folder: Path, records: Iterable[str] = ()) -> None:
        self.folder = folder
        self._records = {(record.name, record.low): record for record in map(_Record.from_text, records)}
        self._sums: dict[str, Checksum] = {}
        self._behind = DropBehind(WRITTEN_BYTES, written=True)
        for record in self._records.values():
            for name, checksum in record.sums.items():
                self._sums[name] = max(checksum, self._sums.get(name, checksum))  # of the longer content
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
        """Name and first index of the tensors, and parts of tensors, written so far."""
        return set(self._records)

    def add(self, name: str, tensor: Tensor, low: Shape | None = None, shape: Shape | None = None) -> str:
        """Append a tensor, contiguous and on the CPU, and return its record, a line of text.

        `low`, `shape`: it is the part from index `low` on of a tensor of `shape`, and has as many dims. Python's
        buffers are flushed afterwards.
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
        """Write the index, flushed to disk; returns the checksums of it and of the data files by name."""
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
        """Open the data file of this number to append to it."""
        self._number, self._file = number, self.folder / f"__0_{number}{DEFAULT_SUFFIX}"
        self._raw = ChecksummedFile(self._file, "ab", self._sums.get(self._file.name, EMPTY))
        self._stream = io.BufferedWriter(self._raw, BUFFER_BYTES)

    def _flush(self) -> None:
        self._stream.flush()
        self._sums[self._file.name] = self._raw.checksum

    def _rows(self, tensor: Tensor) -> Iterator[tuple[Shape, Tensor]]:
        """Rectangles of whole rows of `tensor`, whose first dims may have size 1: first index and view."""
        if tensor.dim() == 0:
            yield (), tensor
            return
        dim = next((d for d, n in enumerate(tensor.shape) if n > 1), 0)
        rows = max(1, RECTANGLE_BYTES * tensor.shape[dim] // max(1, tensor.nbytes))
        for i, view in enumerate(tensor.split(rows, dim)):
            yield tuple(i * rows if d == dim else 0 for d in range(tensor.dim())), view
