"""Text files that are tokenized during training, in an order that does not depend on the parallel layout.

    files       the sorted files of a path: JSON lines, parquet, plain text, compressed or not, on disk or at a URL
    parts       whole files. If there are few files, row groups of parquet and blocks of JSON lines. If these are also
                too few, several parts share the records of one block or file in turn
    streams     a fixed number of *canonical streams*. Each epoch permutes the parts by (seed, epoch) and assigns each
                part to the stream with the fewest bytes so far
    documents   a stream reads the documents of its parts, part by part, epoch by epoch. Within a part, windows of at
                most `WINDOW_RECORDS` records are shuffled by (seed, epoch, part, window)

All of this is a function of the files, the seed and the number of streams. A `TextPosition` is a position in a stream.
To resume from it, the part is opened again, and the records before the position are skipped. A block or row group is
small; in a compressed file, everything before the position is decompressed again.
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
"""Size of a window; it ends at the limit that is reached first."""
_PARTS_OF_STREAM = 8
"""Number of parts per stream to aim for: with fewer files per stream, files are split."""
_SMALLEST_BLOCK = 2**16
_BLOCKS, _BLOCK_BYTES = 16, 4096  # blocks of a local file that identify its content
_THREADS = 16


class FilePart(NamedTuple):
    """Part of a file: the records of a range for `documents.read_part` with `number % modulus == remainder`."""

    file: int
    start: int
    stop: int | None
    bytes: int
    remainder: int = 0
    modulus: int = 1


class FileVersion(NamedTuple):
    """Version of a file when the run opened it: its size, and a hash of parts of its content or its ETag."""

    name: str
    size: int
    tag: str


class TextPosition(NamedTuple):
    """Position in a stream.

    Attributes:
        epoch: Number of the epoch.
        part: Number of the part within the stream's parts of that epoch.
        record: Number of records of the part before the current window.
        document: Number of the document in the shuffled window.
        token: Number of tokens of the document that were already used.
    """

    epoch: int = 0
    part: int = 0
    record: int = 0
    document: int = 0
    token: int = 0


class TextSource:
    """Documents of text files, divided into canonical streams.

    Args:
        path: File, folder, glob or URL.
        text_key: Key or column of a record that holds its text.
        seq_length: Number of labels of a sample.
        seed: Seed of all permutations.
        canonical_streams: Number of streams.
        key: Config key of the path, for error messages.

    Raises:
        ValueError: The path names no readable file.
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
        """Return the same text in `count` canonical streams."""
        if count == self.canonical_streams:
            return self
        other = copy.copy(self)
        other.canonical_streams, other._dealt = count, OrderedDict()
        other.__dict__.pop("parts", None)
        return other

    @property
    def is_known_in_full(self) -> bool:
        """Whether `contents` covers the files completely: by ETag, or because all bytes of small files are hashed."""
        pairs = zip(self.files, self.versions)
        return all(isinstance(file.path, ObjectPath) or x.size <= _BLOCKS * _BLOCK_BYTES for file, x in pairs)

    def identified_as(self, fingerprint: str) -> TextSource:
        """Return the same text under another name in the record of a run."""
        other = copy.copy(self)
        other.fingerprint = fingerprint
        return other

    @cached_property
    def parts(self) -> list[FilePart]:
        """Parts of files that are assigned to streams."""
        with ThreadPoolExecutor(_THREADS) as threads:
            return _parts(self.files, [x.size for x in self.versions], self.canonical_streams, threads)

    def index_checksum(self, sample: int) -> str:
        """Return the SHA-256 of everything that determines which documents are in which stream."""
        return hashlib.sha256(repr((self.canonical_streams, self.parts)).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Total size of all files as stored, in bytes."""
        return sum(version.size for version in self.versions)

    def documents(self, stream: int, at: TextPosition) -> Iterator[tuple[TextPosition, Document]]:
        """Yield the documents of a stream from a position on, each with its position, epoch after epoch.

        Raises:
            DataError: A whole epoch of the stream has no documents, or a file has changed since the run opened it.
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
            "data, or reduce data.streams.canonical_streams in a new run"
        )

    def _windows(self, number: int, record: int) -> Iterator[tuple[int, list[Document]]]:
        """Yield the windows of a part from a record on, each with the number of its first record."""
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
        """Return the numbers of the parts of each stream in an epoch."""
        if epoch in self._dealt:
            return self._dealt[epoch]
        dealt: list[list[int]] = [[] for _ in range(self.canonical_streams)]
        fullness = [(0, stream) for stream in range(self.canonical_streams)]
        for part in self._permutation(len(self.parts), epoch).tolist():
            bytes_before, stream = fullness[0]
            dealt[stream].append(part)
            heapq.heapreplace(fullness, (bytes_before + max(1, self.parts[part].bytes), stream))
        self._dealt[epoch] = dealt
        if len(self._dealt) > 2:  # the streams of a rank are rarely more than one epoch apart
            self._dealt.popitem(last=False)
        return dealt


def _parts(
    files: Sequence[InputFile], sizes: Sequence[int], streams: int, threads: ThreadPoolExecutor
) -> list[FilePart]:
    """Divide the files into parts, at least one for each stream."""
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
    """Return the version of a file.

    The tag of a local file is a hash of 16 evenly spaced blocks of 4 KiB, so copies of a file have the same version.
    """
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
    """Return a value that changes when a file is written while a run reads it.

    For a local file, this is the size and the modification time. For a URL, it is the version, which may be `known`.
    """
    if isinstance(path, ObjectPath):
        known = known or _version(path)
        return known.size, known.tag
    try:
        status = Path(path).stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns
