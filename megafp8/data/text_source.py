"""Files of text whose documents are tokenized while a run trains, in an order that does not depend on the layout.

    files       what a path names, sorted: JSON lines, parquet, plain text, compressed or not, on disk or at a URL
    parts       whole files; where they are few, row groups of parquet, and blocks of JSON lines; where these are too
                few, several parts of one file take turns with its records
    streams     a fixed number of *canonical streams*. Each epoch permutes the parts by (seed, epoch) and deals them to
                the streams, the next part to the stream with the fewest bytes
    documents   of a stream: those of its parts, one part after the other, epoch after epoch. Within a part, windows of
                at most `WINDOW_RECORDS` records are shuffled by (seed, epoch, part, window)

All of this is a function of the files, the seed and the number of streams. A `TextPosition` says where a stream is. To
go there, the part is opened again, and what is before it in the part is skipped: a block or a row group is small, of a
compressed file all that comes before is decompressed again.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data import DataError
from megafp8.data.documents import InputFile, find_files, read_part, row_groups
from megafp8.data.styles import Document
from megafp8.host.object_store import AnyPath, ObjectPath

WINDOW_RECORDS, WINDOW_CHARACTERS = 256, 2**20
"""A window ends with whichever comes first."""
_PARTS_OF_STREAM = 8
"""Files are split where there are fewer for each stream."""
_SMALLEST_BLOCK = 2**16
_BLOCKS, _BLOCK_BYTES = 16, 4096  # of a file that are compared
_THREADS = 16


class FilePart(NamedTuple):
    """A part of a file: a range for `documents.read_part`, and of its records those with `remainder` by `modulus`."""

    file: int
    start: int
    stop: int | None
    bytes: int
    remainder: int = 0
    modulus: int = 1


class FileVersion(NamedTuple):
    """A file as it was when the run first read it: size, and a hash of parts of its content, or its ETag."""

    name: str
    size: int
    tag: str


class TextPosition(NamedTuple):
    """Where a stream is: the epoch, the number of the part in it, the records of the part before the present window,
    the document's number in the shuffled window, and the tokens of the document that were given."""

    epoch: int = 0
    part: int = 0
    record: int = 0
    document: int = 0
    token: int = 0


class TextSource:
    """The documents that `path`, a file, folder, glob or URL, names, in `canonical_streams` streams.

    `seq_length`: labels of a sample. Raises ValueError with `key` where there is nothing that can be read.
    """

    def __init__(
        self, path: str, *, text_key: str, seq_length: int, seed: int, canonical_streams: int, key: str = "data.train"
    ) -> None:
        self.prefix, self.seq_length, self.seed, self.canonical_streams = path, seq_length, seed, canonical_streams
        self.files, _ = find_files([path], json_keys=[text_key], flag=f"{key},")
        with ThreadPoolExecutor(_THREADS) as threads:
            self.versions = list(threads.map(_version, (file.path for file in self.files)))
        self._seen = [_stamp(file.path, version) for file, version in zip(self.files, self.versions)]
        content = [(text_key, [(x.size, x.tag) for x in self.versions])]
        self.contents = self.fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()
        self._dealt: OrderedDict[int, list[list[int]]] = OrderedDict()

    def in_streams(self, count: int) -> TextSource:
        """The same text in `count` canonical streams."""
        if count == self.canonical_streams:
            return self
        other = copy.copy(self)
        other.canonical_streams, other._dealt = count, OrderedDict()
        other.__dict__.pop("parts", None)
        return other

    @property
    def is_known_in_full(self) -> bool:
        """Whether `contents` covers all that the files have: their ETags, or all bytes of small files."""
        pairs = zip(self.files, self.versions)
        return all(isinstance(file.path, ObjectPath) or x.size <= _BLOCKS * _BLOCK_BYTES for file, x in pairs)

    def identified_as(self, fingerprint: str) -> TextSource:
        """Return the same text under another name in the record of a run."""
        other = copy.copy(self)
        other.fingerprint = fingerprint
        return other

    @cached_property
    def parts(self) -> list[FilePart]:
        """What is dealt to the streams."""
        with ThreadPoolExecutor(_THREADS) as threads:
            return _parts(self.files, [x.size for x in self.versions], self.canonical_streams, threads)

    def index_checksum(self, sample: int) -> str:
        """SHA-256 of what decides which documents are in which stream."""
        return hashlib.sha256(repr((self.canonical_streams, self.parts)).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Of all files, as they are stored."""
        return sum(version.size for version in self.versions)

    def documents(self, stream: int, at: TextPosition) -> Iterator[tuple[TextPosition, Document]]:
        """Yield the documents of a stream from a position on, each with its position, epoch after epoch.

        Raises:
            DataError: An epoch has no documents, or a file has changed since the run opened it.
        """
        epoch, place, record, first, _ = at
        while True:
            dealt, is_empty = self._deal(epoch)[stream], True
            whole = (place, record, first) == (0, 0, 0)
            for number in range(place, len(dealt)):
                part = dealt[number]
                for start, window in self._windows(part, record):
                    order = self._permutation(len(window), epoch, 1 + part, start)
                    for i in range(first, len(window)):
                        is_empty = False
                        yield TextPosition(epoch, number, start, i), window[order[i]]
                    first = 0
                record = first = 0
            if is_empty and whole:
                raise self.no_text(stream)
            epoch, place = epoch + 1, 0

    def no_text(self, stream: int, reason: str = "") -> DataError:
        """Return the error for a stream that has no usable text in a whole epoch; `reason` says why."""
        return DataError(
            f"{self.prefix}: there is no text for canonical stream {stream} of {self.canonical_streams}{reason}; add "
            "data, or set data.streams.canonical_streams to less in a new run"
        )

    def _windows(self, number: int, record: int) -> Iterator[tuple[int, list[Document]]]:
        """Windows of a part from a record on, each with the number of its first record."""
        part = self.parts[number]
        path = self.files[part.file].path
        if _stamp(path) != self._seen[part.file]:
            raise DataError(f"{path} has changed since the run opened it; restore it")
        records = itertools.islice(
            read_part(self.files[part.file], part.start, part.stop), part.remainder, None, part.modulus
        )
        window, characters = list[Document](), 0
        for document in itertools.islice(records, record, None):
            window.append(document)
            characters += len(document.text or "")
            if len(window) == WINDOW_RECORDS or characters >= WINDOW_CHARACTERS:
                yield record, window
                record, window, characters = record + len(window), [], 0
        if window:
            yield record, window

    def _permutation(self, count: int, *key: int) -> NDArray[np.int64]:
        seed = hashlib.sha256(repr((self.seed, *key)).encode()).digest()[:16]
        return np.random.Generator(np.random.Philox(key=np.frombuffer(seed, np.uint64))).permutation(count)

    def _deal(self, epoch: int) -> list[list[int]]:
        """Numbers of the parts of each stream in an epoch."""
        if epoch in self._dealt:
            return self._dealt[epoch]
        dealt: list[list[int]] = [[] for _ in range(self.canonical_streams)]
        fullness = [(0, stream) for stream in range(self.canonical_streams)]
        for part in self._permutation(len(self.parts), epoch).tolist():
            bytes_before, stream = fullness[0]
            dealt[stream].append(part)
            heapq.heapreplace(fullness, (bytes_before + max(1, self.parts[part].bytes), stream))
        self._dealt[epoch] = dealt
        if len(self._dealt) > 2:  # streams of a rank are hardly ever further apart
            self._dealt.popitem(last=False)
        return dealt


def _parts(
    files: Sequence[InputFile], sizes: Sequence[int], streams: int, threads: ThreadPoolExecutor
) -> list[FilePart]:
    """Parts of the files, at least as many as streams."""
    wanted = _PARTS_OF_STREAM * streams
    if len(files) >= wanted:
        return [FilePart(i, 0, None, size) for i, size in enumerate(sizes)]
    block = max(_SMALLEST_BLOCK, -(-sum(sizes) // wanted))
    groups = list(threads.map(lambda file: row_groups(file) if file.content == "parquet" else [], files))
    parts: list[FilePart] = []
    for i, (file, size) in enumerate(zip(files, sizes)):
        if file.content == "parquet":
            parts += [FilePart(i, group, group + 1, count) for group, count in enumerate(groups[i])]
        elif file.content == "json_lines" and not file.compression:
            starts = range(0, size, block)
            parts += [FilePart(i, start, min(start + block, size), min(block, size - start)) for start in starts]
        else:
            parts.append(FilePart(i, 0, None, size))
    if len(parts) >= streams:
        return parts
    if not parts:
        raise ValueError(f"{files[0].path} has no records")
    modulus = -(-2 * streams // len(parts))
    return [
        part._replace(bytes=part.bytes // modulus, remainder=remainder, modulus=modulus)
        for remainder in range(modulus)
        for part in parts
    ]


def _version(path: AnyPath) -> FileVersion:
    """Of a local file the tag is a hash of 16 evenly spaced blocks of 4 KiB, so that copies are the same."""
    if isinstance(path, ObjectPath):
        version = path.version()
        return FileVersion(str(path), version.size, version.tag)
    count, block, digest = _BLOCKS, _BLOCK_BYTES, hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for i in range(count):
            file.seek(i * max(0, size - block) // (count - 1))
            digest.update(file.read(block))
    return FileVersion(str(path), size, digest.hexdigest()[:16])


def _stamp(path: AnyPath, known: FileVersion | None = None) -> object:
    """What changes when a file is written while a run reads it: its version if it is at a URL, which may be `known`, or
    size and time of modification."""
    if isinstance(path, ObjectPath):
        known = known or _version(path)
        return known.size, known.tag
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns
