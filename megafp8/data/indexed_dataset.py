r"""Token files in Megatron-LM's format, byte for byte: `<prefix>.bin` has the tokens, and `<prefix>.idx` locates them.

    .idx   magic "MMIDIDX\0\0" | version u64 = 1 | dtype code u8 | sequences u64 | document marks u64
           | sizes i32[sequences] | byte pointers i64[sequences] | document marks i64[marks]
           | modes i8[sequences], or nothing

Document marks are sequence numbers, from 0 to the number of sequences. Modes are used in Megatron's multimodal data
sets; this reader accepts only mode 0, text. `megafp8 preprocess` also writes `<prefix>.json`, the sidecar, with the
tokenizer's identity, the largest token id and the SHA-256 of the .idx. Data sets from other tools have no sidecar.

A data set may have a *loss mask*: `<prefix>.loss_mask.bin` and `.idx`. It has the same format, with sequences of the
same lengths and one byte per token: 1 for a token to learn, 0 for a token that is only context. The sidecar has the
fingerprint of the mask.

A prefix may be a URL of object storage, such as s3://bucket/corpus. The .idx is then copied to local disk, and tokens
are read through a cache on that disk (`megafp8.host.object_store`).

The .idx is memory-mapped and the .bin is read on demand. Opening a data set checks everything that can be checked
without reading the tokens. Megatron-LM's .idx has no checksum, but it is redundant:

- for only one dtype, the sizes add up to the size of the .bin file;
- the sequences cover the .bin file without gap or overlap, in order (Megatron's writer) or in any other order;
- if there are as many documents as sequences, each document is one sequence.

So any flipped bit is detected or makes no difference, with one exception. If the data set has no sidecar, and not every
document is exactly one sequence, a document mark can change to another value between its neighbors. Then no token is
lost, but a document ends at a different sequence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data import DataError
from megafp8.data.mapped_file import MappedFile
from megafp8.host.object_store import AnyPath, ObjectStoreError, as_path, is_transient, is_url
from megafp8.host.object_store.cache import THREADS, CachedObject, ObjectCache, ObjectChanged, default_cache
from megafp8.host.processes import incomplete_path, remove_abandoned
from megafp8.host.strict_json import parse_json
from megafp8.host.suggestions import near_path

FORMAT_VERSION = 1
"""Version of the sidecar and the loss mask. Grows when an older reader would misread them, not for new keys."""
MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.generic]] = dict(
    enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16), 1)
)
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def bin_path(prefix: str | Path) -> AnyPath:
    """Return the path of a data set's tokens."""
    return as_path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> AnyPath:
    """Return the path of a data set's index."""
    return as_path(f"{prefix}.idx")


def sidecar_path(prefix: str | Path) -> AnyPath:
    """Return the path of a data set's sidecar."""
    return as_path(f"{prefix}.json")


def loss_mask_prefix(prefix: str | Path) -> str:
    """Return the prefix of a data set's loss mask."""
    return f"{prefix}.loss_mask"


def all_paths(prefix: str | Path) -> list[Path]:
    """Return the paths of all files that a data set on a local disk can have."""
    mask = loss_mask_prefix(prefix)
    return [Path(name) for name in (f"{prefix}.bin", f"{prefix}.idx", f"{prefix}.json", f"{mask}.bin", f"{mask}.idx")]


class _Index(NamedTuple):
    """Content of an .idx file. The arrays are views of `file`."""

    file: MappedFile
    dtype: np.dtype[Any]
    sizes: NDArray[np.int32]
    pointers: NDArray[np.int64]
    marks: NDArray[np.int64]


class IndexedDataset:
    """A data set in Megatron-LM's format, open for reading.

    The *stream* of a data set is the concatenation of all its sequences in the order of the index. A position in the
    stream is a number of tokens. Raises DataError, with the file and the fault, if the data set is missing, truncated
    or damaged.
    """

    def __init__(self, prefix: str | Path, *, cache: ObjectCache | None = None) -> None:
        """Open a data set.

        Args:
            prefix: Path or URL of the files, without suffix.
            cache: Local cache for a data set in object storage. Default: the user's cache.
        """
        self.prefix, self._cache = str(prefix), cache
        self._objects = _open_objects(self.prefix, cache)
        self._open()
        self._check_checksum()

    def _open(self) -> None:
        path, remote = idx_path(self.prefix), self._objects
        self._index = _read_index(path, None if remote is None else _local_copy(remote.idx))
        self.dtype = self._index.dtype
        expected = int(self.sizes.sum(dtype=np.int64)) * self.dtype.itemsize
        size = _size_of_tokens(bin_path(self.prefix), self.dtype, expected, None if remote is None else remote.bin.size)
        self._in_order = _check_pointers(path, size, self._index)
        self.tokens: NDArray[Any] | LocalTokens | RemoteTokens = np.empty(0, self.dtype)
        if size:
            path = Path(f"{self.prefix}.bin")
            self.tokens = (
                LocalTokens(path, size, self.dtype) if remote is None else RemoteTokens(remote.bin, self.dtype)
            )

    def __getstate__(self) -> dict[str, Any]:
        # Loader processes open the files again. `_objects` is kept, so that all of them read the same version.
        return {"prefix": self.prefix, "_cache": self._cache, "_objects": self._objects}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def _whole_index(self) -> _Index:
        """Index of the data set. Raises DataError if its file has been truncated."""
        self._index.file.check()
        return self._index

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Number of tokens of each sequence, in the order of the index, int32 `[sequences]`."""
        return self._whole_index.sizes

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """Number of the first sequence of each document, then the number of all sequences, `[documents + 1]`."""
        return self._whole_index.marks

    @property
    def is_remote(self) -> bool:
        """Whether the data set is in object storage."""
        return self._objects is not None

    def fetch_ahead(self, position: int, count: int) -> None:
        """Start to download the tokens that `read(position, count)` will return, if they are in object storage."""
        if isinstance(self.tokens, RemoteTokens):
            for first, taken in self._ranges(position, count):
                self.tokens.fetch_ahead(first, first + taken)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_starts) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.sizes.sum(dtype=np.int64))

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document, int64 `[documents]`."""
        return np.diff(self._positions[self.document_starts])

    @property
    def document_positions(self) -> NDArray[np.int64]:
        """Position of each document's first token in the stream, int64 `[documents]`."""
        return self._positions[self.document_starts[:-1]]

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        """Position of each sequence's first token in the stream, then the stream's length: `[sequences + 1]`."""
        return _running_sum(self.sizes)

    def sentence_lengths(self, documents: range) -> NDArray[np.int64]:
        """Return the number of tokens of each sequence of `documents`, int64.

        If documents were split into sentences, each sequence is one sentence.
        """
        first, last = self.document_starts[documents.start], self.document_starts[documents.stop]
        return self.sizes[first:last].astype(np.int64)

    def document(self, index: int) -> NDArray[Any]:
        """Return the tokens of document `index`."""
        first, end = (int(self._positions[self.document_starts[i]]) for i in (index, index + 1))
        return self.read(first, end - first)

    def read(self, position: int, count: int) -> NDArray[Any]:
        """Return `count` tokens of the stream from `position` on, in the dtype of the data set."""
        if self._in_order:
            return self.tokens[position : position + count]
        parts = [self.tokens[first : first + taken] for first, taken in self._ranges(position, count)]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def _ranges(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the .bin file that hold `count` tokens of the stream from `position` on.

        Each range is the number of its first token in the file, and its number of tokens.
        """
        if self._in_order:
            yield position, count
            return
        positions, index = self._positions, self._whole_index
        sequence = int(np.searchsorted(positions, position, side="right")) - 1
        while count:
            skip = position - int(positions[sequence])
            first = int(index.pointers[sequence]) // self.dtype.itemsize + skip
            taken = min(count, int(index.sizes[sequence]) - skip)
            yield first, taken
            position, count, sequence = position + taken, count - taken, sequence + 1

    def sidecar(self) -> dict[str, Any] | None:
        """Return the content of `<prefix>.json`, or None if there is no file. Raises DataError if it is damaged."""
        with _data_errors():
            return _read_sidecar(sidecar_path(self.prefix))

    @cached_property
    def index_sha256(self) -> str:
        """SHA-256 of the .idx file."""
        return hashlib.sha256(self._whole_index.file.content.data).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 that identifies the contents, independent of the path.

        It covers the .idx, the size of the .bin, and 64 evenly spaced blocks of 4 KiB of the .bin. A .bin of at most
        256 KiB is covered completely.
        """
        if isinstance(self.tokens, np.ndarray):
            return _fingerprint(self.index_sha256, 0, _parts_of(self.tokens.view(np.uint8)))
        return _fingerprint(self.index_sha256, len(self.tokens) * self.dtype.itemsize, self.tokens.fetch_parts)

    @property
    def is_known_in_full(self) -> bool:
        """Whether `fingerprint` covers all tokens."""
        return len(self.tokens) * self.dtype.itemsize <= _PARTS * _PART_BYTES

    @cached_property
    def has_pairs(self) -> bool:
        """Whether each document has two sequences, like the pairs of answers of preference data."""
        return len(self.document_starts) > 1 and bool((np.diff(self.document_starts) == 2).all())

    @cached_property
    def has_loss_mask(self) -> bool:
        """Whether the data set has a loss mask, or its sidecar says that it should have one."""
        with _data_errors():
            return idx_path(loss_mask_prefix(self.prefix)).exists() or "loss_mask" in (self.sidecar() or {})

    def loss_mask(self) -> IndexedDataset:
        """Open the loss mask: a uint8 data set with one element for each token, at the same position in the stream.

        Raises DataError if the mask is missing or damaged, or belongs to another data set.
        """
        mask = IndexedDataset(loss_mask_prefix(self.prefix), cache=self._cache)
        if mask.dtype != np.uint8:
            raise DataError(f"{idx_path(mask.prefix)} is not a loss mask: its dtype is {mask.dtype}, not uint8")
        same = np.array_equal(mask.sizes, self.sizes) and np.array_equal(mask.document_starts, self.document_starts)
        expected = (self.sidecar() or {}).get("loss_mask", mask.fingerprint)
        if not same or mask.fingerprint != expected:
            fault = "was not written with this data set" if same else "has sequences of other lengths"
            raise DataError(
                f"{bin_path(mask.prefix)} and .idx are not the loss mask of {self.prefix}: the mask {fault}; copy all "
                "files of the data set again, or write the data set again"
            )
        return mask

    def locate(self, position: int) -> tuple[int, int]:
        """Return the number of the document at `position` of the stream, and the position within that document."""
        positions = self._positions
        document = int(np.searchsorted(positions[self.document_starts], position, side="right")) - 1
        return document, position - int(positions[self.document_starts[document]])

    def _check_checksum(self) -> None:
        expected = (self.sidecar() or {}).get("index_sha256")
        if expected is not None and self.index_sha256 != expected:
            raise DataError(
                f"{idx_path(self.prefix)} is damaged, or belongs to another data set than {sidecar_path(self.prefix)}: "
                f"its SHA-256 is {self.index_sha256[:12]}…, but {expected[:12]}… was recorded; copy both again, or "
                "write the data set again"
            )


_LARGEST_SIDECAR = 2**24
_PARTS, _PART_BYTES = 64, 4096  # blocks of a .bin that its fingerprint covers


def _fingerprint(index_sha256: str, size: int, read_parts: _ReadParts) -> str:
    """Return `IndexedDataset.fingerprint` of an index and a .bin of `size` bytes. `read_parts` reads byte ranges."""
    count, block = _PARTS, _PART_BYTES
    digest = hashlib.sha256(f"{index_sha256} {size} ".encode())
    if size <= count * block:
        count, block = 1, size
    starts = [i * (size - block) // max(count - 1, 1) for i in range(count)]
    for part in read_parts([(start, start + block) for start in starts]):
        digest.update(part)
    return digest.hexdigest()


_ReadParts = Callable[[Sequence[tuple[int, int]]], Iterable[bytes | memoryview]]


def _parts_of(content: NDArray[np.uint8]) -> _ReadParts:
    return lambda ranges: (content[start:end].data for start, end in ranges)


class _Objects(NamedTuple):
    """Files of a data set in object storage, in the versions that were opened."""

    idx: CachedObject
    bin: CachedObject


class LocalTokens:
    """Tokens of a .bin file on disk. Slicing returns an array.

    The file is read, not memory-mapped. If the file is truncated while it is open, reading raises DataError. A memory
    map would cause SIGBUS, which ends the process without a message.
    """

    def __init__(self, path: Path, size: int, dtype: np.dtype[Any]) -> None:
        self.path, self.size, self.dtype = path, size, dtype
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return self.size // self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, _ = part.indices(len(self))
        tokens = np.empty(max(0, stop - start), self.dtype)
        self._read(start * self.dtype.itemsize, tokens.view(np.uint8).data)
        return tokens

    def fetch_parts(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges of bytes. Each is given by its first byte and the byte after its last."""
        parts = [bytearray(stop - start) for start, stop in ranges]
        for (start, _), part in zip(ranges, parts):
            self._read(start, memoryview(part))
        return [bytes(part) for part in parts]

    def _read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on. Raises DataError if the file ends too early."""
        done = 0
        while done < len(into):
            read = os.preadv(self._file.fileno(), [into[done:]], offset + done)
            if not read:
                raise DataError(
                    f"{self.path} has become shorter since it was opened: it had {self.size:,} bytes and now has "
                    f"{offset + done:,} or fewer; copy the data set again, or write it again"
                )
            done += read


class RemoteTokens:
    """Tokens of a .bin file in object storage. Slicing returns an array.

    Raises DataError if the object has changed or access is denied, and ObjectStoreError if object storage cannot be
    reached.
    """

    def __init__(self, obj: CachedObject, dtype: np.dtype[Any]) -> None:
        self.obj, self.dtype = obj, dtype

    def __len__(self) -> int:
        return self.obj.size // self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, _ = part.indices(len(self))
        size = self.dtype.itemsize
        with _data_errors():
            return np.frombuffer(self.obj.read(start * size, max(start, stop) * size), self.dtype)

    def fetch_ahead(self, start: int, stop: int) -> None:
        """Start to download the tokens `[start, stop)`."""
        self.obj.fetch_ahead(start * self.dtype.itemsize, stop * self.dtype.itemsize)

    def fetch_parts(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges of bytes from object storage in parallel, bypassing the cache."""
        with _data_errors(), ThreadPoolExecutor(THREADS) as executor:
            contents = list(executor.map(lambda one: self.obj.path.read_range(*one), ranges))
            self.obj.check()
            return contents


@contextlib.contextmanager
def _data_errors() -> Iterator[None]:
    """Context manager that turns permanent failures of object storage into DataError, which ends a job for good."""
    try:
        yield
    except ObjectStoreError as error:
        if is_transient(error):
            raise
        raise DataError(str(error)) from None
    except ObjectChanged as error:
        raise DataError(str(error)) from None
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} cannot be opened: no such file or object") from None
    except OSError as error:
        where = "data.object_cache.folder, the local cache of object storage"
        raise DataError(f"{where}, cannot be used: {error}; name a writable folder") from None


def _open_objects(prefix: str, cache: ObjectCache | None) -> _Objects | None:
    """Open the objects of a data set in object storage; return None for a local data set. Raises DataError."""
    idx, tokens = idx_path(prefix), bin_path(prefix)
    if isinstance(idx, Path) or isinstance(tokens, Path):
        return None
    cache = cache or ObjectCache(default_cache())
    with _data_errors():
        return _Objects(cache.open(idx), cache.open(tokens))


def _local_copy(obj: CachedObject) -> Path:
    with _data_errors():
        return obj.download()


def _running_sum(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the sum of the sizes before each sequence, then the sum of all sizes: `[sequences + 1]`."""
    sums = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=sums[1:])
    return sums


def _read_sidecar(path: AnyPath) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _LARGEST_SIDECAR:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        about = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _no_sidecar(path, error) from None
    if not isinstance(about, dict):
        raise _no_sidecar(path, f"it holds a {type(about).__name__}, not a mapping")
    for key in ("tokenizer_fingerprint", "index_sha256", "loss_mask"):
        if not isinstance(about.get(key), str | None):
            raise _no_sidecar(path, f"{key} is {about[key]!r}, not a hash")
    version = about.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        works = "read the data set with that version or a newer one, or preprocess it again"
        raise DataError(f"{path} has format version {version}; this megafp8 reads up to {FORMAT_VERSION}: {works}")
    return about


def _no_sidecar(path: AnyPath, reason: object) -> DataError:
    return DataError(
        f"{path} is damaged, or is not the description that megafp8 preprocess writes next to a data set: {reason}; "
        "restore it, or move it away (the data set can be read without it)"
    )


def _read_index(path: AnyPath, copy: Path | None = None) -> _Index:
    """Read an .idx file, or its local `copy`, and check all that does not need the .bin file. Raises DataError."""
    try:
        file = MappedFile(copy or Path(str(path)))
    except (OSError, ValueError) as error:
        reason = "it is empty" if path.exists() else "no such file"
        prefix = Path(str(path)).with_suffix("")
        exact = prefix.with_suffix(".idx")  # exists if the user's prefix ends in .bin or .idx
        near = exact if prefix.suffix in (".bin", ".idx") and exact.exists() else near_path(Path(str(path)))
        works = "data.train takes prefixes of .bin/.idx" if near is None else f"did you mean {near.with_suffix('')}?"
        raise DataError(f"{path} cannot be opened: {reason} ({error}); {works}") from None
    raw = file.content
    if len(raw) < _HEADER.size or bytes(raw[:9]) != MAGIC:
        raise DataError(f"{path} is not an index of a token file: it does not begin with {MAGIC!r}")
    _, version, code, sequences, marks = _HEADER.unpack(bytes(raw[: _HEADER.size]))
    if version != 1:
        raise DataError(f"{path} has format version {version}; only version 1 is supported")
    if code not in _DTYPES:
        raise DataError(f"{path} has the unknown dtype code {code}; known codes are {sorted(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code])
    if dtype.kind == "f":
        raise DataError(
            f"{path} says that its tokens are {dtype}, but token ids are integers; write the data set again"
        )
    expected = _HEADER.size + sequences * (4 + 8) + marks * 8
    if len(raw) not in (expected, expected + sequences):
        raise DataError(
            f"{path} has {len(raw):,} bytes, but its header ({sequences:,} sequences, {marks:,} document marks) "
            f"needs {expected:,}: truncated or damaged"
        )
    body = raw[_HEADER.size :]
    sizes = body[: sequences * 4].view(np.int32)
    pointers = body[sequences * 4 : sequences * 12].view(np.int64)
    documents = body[sequences * 12 : sequences * 12 + marks * 8].view(np.int64)
    modes = body[sequences * 12 + marks * 8 :]
    if not marks or documents[0] != 0 or documents[-1] != sequences or (documents[1:] < documents[:-1]).any():
        raise DataError(f"{path} is damaged: its document marks do not run from 0 to {sequences:,}")
    if marks == sequences + 1 and (documents != np.arange(marks)).any():
        raise DataError(
            f"{path} is damaged: it has as many documents as sequences, but its document "
            f"{int(np.flatnonzero(documents != np.arange(marks))[0]) - 1:,} does not hold exactly one"
        )
    if modes.any():
        first = int(np.flatnonzero(modes)[0])
        raise DataError(
            f"{path} is a multimodal data set of Megatron-LM: sequence {first:,} has mode {int(modes[first])}; only "
            "text (mode 0) can be read; write a data set of the text alone"
        )
    return _Index(file, dtype, sizes, pointers, documents)


def _size_of_tokens(path: AnyPath, dtype: np.dtype[Any], expected: int, actual: int | None) -> int:
    """Return the size of the .bin file in bytes, `actual` if it is known. Raises DataError if it is not `expected`."""
    try:
        actual = path.stat().st_size if actual is None else actual
    except OSError:
        raise DataError(f"{path} is missing: its index promises {expected:,} bytes of tokens") from None
    if actual != expected:
        raise DataError(
            f"{path} has {actual:,} bytes, but its index promises {expected:,} "
            f"({expected // dtype.itemsize:,} tokens of {dtype.itemsize} bytes): it is truncated or belongs to another "
            "data set"
        )
    return actual


def _check_pointers(path: AnyPath, size: int, index: _Index) -> bool:
    """Return whether the .bin file, of `size` bytes, has the sequences in the order of the index.

    Raises DataError unless the sequences, in any order, cover the file without gap or overlap. Empty sequences may
    point anywhere.
    """
    filled = index.sizes != 0
    sizes, pointers = (index.sizes, index.pointers) if filled.all() else (index.sizes[filled], index.pointers[filled])
    itemsize = index.dtype.itemsize
    ends = pointers + sizes.astype(np.int64) * itemsize
    if ((pointers < 0) | (pointers > size) | (pointers % itemsize != 0) | (sizes < 0) | (ends > size)).any():
        raise DataError(
            f"{path} is damaged: it points outside {str(path).removesuffix('.idx')}.bin, or between its tokens; copy "
            "the data set again, or write it again"
        )
    wrong = pointers != _running_sum(sizes)[:-1] * itemsize
    if not wrong.any():
        return True
    order = np.argsort(pointers, kind="stable")
    if (pointers[order] != _running_sum(sizes[order])[:-1] * itemsize).any():
        sequence = int(np.flatnonzero(filled)[np.flatnonzero(wrong)[0]])
        raise DataError(
            f"{path} is damaged: its sequences overlap in the .bin file and miss other tokens there (sequence "
            f"{sequence:,} is the first that does not begin where the one before ends); copy the data set again, or "
            "write it again"
        )
    return False


class IndexedDatasetWriter:
    """Writer of a data set. Files have temporary names until `close` renames them.

    Args:
        prefix: Path of the data set without suffix.
        dtype: Dtype in which tokens are stored.
        loss_mask: Also write a loss mask.
        overwrite: Replace an existing data set. A .json file is replaced only if it is a sidecar.

    Raises:
        ValueError: A file of the data set exists and `overwrite` is False, or the folder is not writable.
    """

    def __init__(
        self, prefix: str | Path, dtype: type[np.generic], *, loss_mask: bool = False, overwrite: bool = False
    ) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        if is_url(prefix):
            raise ValueError(f"{prefix}: data sets are written to a local disk; copy the files to object storage later")
        if str(prefix).endswith(os.sep):
            raise ValueError(f"{prefix} is a folder; add the name of the data set, as in {prefix}text")
        for path in all_paths(prefix):
            if path.is_dir():
                raise ValueError(f"{path} is a folder; choose another output prefix")
            if path.exists() and not overwrite:
                raise ValueError(f"{path} exists; choose another output prefix, or replace it with --overwrite")
        if "max_token_id" not in (_read_sidecar(sidecar_path(prefix)) or {"max_token_id": 0}):
            raise _no_sidecar(sidecar_path(prefix), "it has no max_token_id")
        self._bin, self._idx, self._sidecar = map(incomplete_path, all_paths(prefix)[:3])
        try:
            for path in all_paths(prefix):
                remove_abandoned(path)
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._bin.open("wb")
        except OSError as error:
            raise ValueError(f"{bin_path(prefix)} cannot be written: {error}") from None
        self._sizes: list[int] = []
        self._marks = [0]
        self._mask: IndexedDatasetWriter | None = None
        if loss_mask:
            self._mask = IndexedDatasetWriter(loss_mask_prefix(prefix), np.uint8, overwrite=overwrite)

    def add_document(
        self,
        tokens: NDArray[Any],
        sequences: Sequence[int] | None = None,
        loss_mask: NDArray[np.uint8] | None = None,
    ) -> None:
        """Append a document.

        Args:
            tokens: Token ids of the document.
            sequences: Lengths of the sequences that the document consists of. Default: one sequence.
            loss_mask: 0 or 1 for each token; required if the data set has a loss mask.

        Raises:
            ValueError: A token does not fit the dtype of the data set, or the document has 2**31 tokens or more.
        """
        assert (loss_mask is None) == (self._mask is None)
        stored = tokens.astype(self.dtype, copy=False)
        if not np.array_equal(stored, tokens):
            raise ValueError(f"{self.prefix}: tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype}")
        if len(tokens) > np.iinfo(np.int32).max:
            raise ValueError(f"{self.prefix}: a document has {len(tokens):,} tokens; the index stores 32-bit lengths")
        with _naming(self._bin):
            self._file.write(stored.tobytes())
        self._sizes += [len(tokens)] if sequences is None else sequences
        self._marks.append(len(self._sizes))
        if self._mask is not None and loss_mask is not None:
            assert len(loss_mask) == len(tokens)
            self._mask.add_document(loss_mask, sequences)

    def close(self, about: Mapping[str, Any] | None = None) -> None:
        """Write the index, flush to disk, and rename the files. On failure, all new files are removed.

        `about` is the content of the sidecar; the checksum of the index is added to it. None writes no sidecar and
        removes an older one.
        """
        try:
            checksum = self._write_index()
            mask = {} if self._mask is None else {"loss_mask": self._mask._write_and_fingerprint()}
            if about is not None:
                described = {"format_version": FORMAT_VERSION, **about, **mask, "index_sha256": checksum}
                _write_flushed(self._sidecar, [(json.dumps(described, indent=2) + "\n").encode()])
            try:
                self._publish()
            except KeyboardInterrupt:
                self._publish()  # finish the few renames, so that the old data set is not left half replaced
                raise
        except BaseException:
            self.abort()
            raise

    def _write_and_fingerprint(self) -> str:
        """Write the index, and return the fingerprint of the data set under its temporary names."""
        checksum = self._write_index()
        size = self._bin.stat().st_size
        content = np.memmap(self._bin, mode="r", dtype=np.uint8) if size else np.empty(0, np.uint8)
        return _fingerprint(checksum, size, _parts_of(content))

    def _write_index(self) -> str:
        """Flush the tokens, write the index under its temporary name, and return its SHA-256."""
        with _naming(self._bin):
            _flush(self._file)
            self._file.close()
        sizes = np.asarray(self._sizes, np.int32)
        lengths = sizes.astype(np.int64) * self.dtype.itemsize
        pointers = _running_sum(lengths)[:-1]
        header = _HEADER.pack(MAGIC, 1, _CODES[self.dtype], len(sizes), len(self._marks))
        marks = np.asarray(self._marks, np.int64)
        contents = [header, sizes.tobytes(), pointers.tobytes(), marks.tobytes()]
        _write_flushed(self._idx, contents)
        return hashlib.sha256(b"".join(contents)).hexdigest()

    def _publish(self) -> None:
        """Rename the files, or continue to rename them after an interrupt.

        The old index is removed first and the new one is renamed last, with the loss mask in between. A data set
        without an index cannot be opened. So files of two data sets are never read together, even if the process is
        killed halfway.
        """
        tokens, index, sidecar, *mask_paths = all_paths(self.prefix)
        if self._bin.exists():
            index.unlink(missing_ok=True)
            sidecar.unlink(missing_ok=True)
            if self._mask is not None:
                self._mask._publish()
            else:
                for path in reversed(mask_paths):
                    path.unlink(missing_ok=True)
            os.replace(self._bin, tokens)
        if self._sidecar.exists():
            os.replace(self._sidecar, sidecar)
        if self._idx.exists():
            os.replace(self._idx, index)

    def abort(self) -> None:
        """Remove all files written so far."""
        with contextlib.suppress(OSError):  # a full disk fails again when the last bytes are flushed
            self._file.close()
        for path in (self._bin, self._idx, self._sidecar):
            path.unlink(missing_ok=True)
        if self._mask is not None:
            self._mask.abort()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context manager that adds `path` to errors of writing to an open file, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _flush(file: BinaryIO) -> None:
    """Flush to disk."""
    file.flush()
    os.fsync(file.fileno())


def _write_flushed(path: Path, contents: list[bytes]) -> None:
    """Write a file and flush it to disk."""
    with _naming(path), path.open("wb") as file:
        file.writelines(contents)
        _flush(file)


_SCANNED_TOKENS = 20_000_000


def check_dataset(dataset: IndexedDataset, vocab_size: int, fingerprint: str | None) -> None:
    """Check a data set for common mistakes. The check is fast; every sample is checked again when it is read.

    Raises DataError if the data set has no tokens, if its sidecar has another tokenizer `fingerprint`, or if a token id
    is not below `vocab_size`. The largest token id is taken from the sidecar; without a sidecar, the first 20 million
    tokens are checked.
    """
    if dataset.num_tokens == 0:
        raise DataError(f"{bin_path(dataset.prefix)} holds no tokens")
    about = dataset.sidecar()
    if about is None:
        check_ids(dataset, dataset.read(0, min(_SCANNED_TOKENS, dataset.num_tokens)), vocab_size, 0)
        return
    made_with = about.get("tokenizer_fingerprint")
    if fingerprint is not None and made_with is not None and made_with != fingerprint:
        raise DataError(
            f"{dataset.prefix} was written with the {about.get('tokenizer')} tokenizer {made_with[:12]}…, but "
            f"data.tokenizer is {fingerprint[:12]}…: the vocabularies differ; use the tokenizer of the data, or "
            "preprocess the data again"
        )
    largest = about.get("max_token_id")
    if type(largest) is not int or largest < 0:
        raise _no_sidecar(sidecar_path(dataset.prefix), f"max_token_id is {largest!r}, not a token id")
    if largest >= vocab_size:
        raise DataError(_beyond(dataset.prefix, largest, vocab_size))


def all_within(ids: NDArray[Any], vocab_size: int) -> bool:
    """Return whether all `ids`, of any integer dtype, are in [0, vocab_size)."""
    return not len(ids) or (int(ids.max()) < vocab_size and (ids.dtype.kind == "u" or int(ids.min()) >= 0))


def check_ids(dataset: IndexedDataset, ids: NDArray[Any], vocab_size: int, position: int) -> None:
    """Raise DataError with file, document and position if one of `ids` is not in [0, vocab_size).

    `ids`, of any integer dtype, are the tokens from `position` of the data set's stream on.
    """
    if all_within(ids, vocab_size):
        return
    wrong = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    document, within = dataset.locate(position + wrong)
    where = f"{bin_path(dataset.prefix)}: document {document:,}, position {within:,}"
    token = int(ids[wrong])
    if token < 0:
        raise DataError(
            f"{where} holds token {token}: token ids are never negative; the data set is damaged, or its .idx has the "
            "wrong dtype; copy it again, or write it again"
        )
    raise DataError(_beyond(where, token, vocab_size))


def read_loss_mask(mask: IndexedDataset, position: int, count: int) -> NDArray[Any]:
    """Read `count` values of a loss mask. Raises DataError with file, document and position if one is not 0 or 1."""
    counted = mask.read(position, count)
    if not all_within(counted, 2):
        wrong = int(np.flatnonzero(counted > 1)[0])
        document, within = mask.locate(position + wrong)
        raise DataError(
            f"{bin_path(mask.prefix)}: document {document:,}, position {within:,} holds {int(counted[wrong])}, but a "
            "loss mask has only 0 and 1; the data set is damaged; copy it again, or write it again"
        )
    return counted


def _beyond(where: str, token: int, vocab_size: int) -> str:
    return (
        f"{where} holds token {token}, but model.vocab_size is {vocab_size}: the vocabulary does not match the data; "
        f"set model.vocab_size to at least {token + 1}, or preprocess the data with this tokenizer"
    )
