"""Token files in Megatron-LM's format, byte for byte: `<prefix>.bin` holds tokens, `<prefix>.idx` says where they are.

    .idx   magic "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | document marks u64
           | sizes i32[sequences] | byte pointers i64[sequences] | document marks i64[marks]

Document marks are sequence numbers: the first is 0, the last the number of sequences. Existing corpora work unchanged.
Beside them `tools/preprocess_data.py` writes `<prefix>.json`: the tokenizer's identity and the largest token. Data sets
made elsewhere have none.

Both files are memory-mapped, and all that can be checked without reading the tokens is checked at opening: a truncated
copy is found before a job starts and not at step 30,000.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def sidecar_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


class IndexedDataset:
    """A memory-mapped data set. ValueError, naming file and fault, for anything missing, truncated or damaged."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.dtype, self.sizes, pointers, marks = _read_index(idx_path(prefix))
        self.offsets: NDArray[np.int64] = pointers // self.dtype.itemsize  # in tokens
        self.document_starts = marks
        self.tokens = _map_tokens(bin_path(prefix), self.dtype, self.sizes, pointers)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.prefix,)  # loader processes map the files again; pickling a map copies all tokens

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        ends = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        return cast(NDArray[np.int64], np.diff(ends[self.document_starts]))

    @property
    def document_offsets(self) -> NDArray[np.int64]:
        """Where each document begins in the .bin file, in tokens. The sequences of a document lie one after another."""
        first = np.minimum(self.document_starts[:-1], max(len(self.sizes) - 1, 0))
        return self.offsets[first] if len(self.sizes) else np.zeros(self.num_documents, np.int64)

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of document `index`, a view of the file."""
        start, length = int(self.document_offsets[index]), int(self.document_lengths[index])
        return self.tokens[start : start + length]

    def sidecar(self) -> dict[str, Any] | None:
        """What `<prefix>.json` says, or None where there is none. ValueError where it cannot be read."""
        path = sidecar_path(self.prefix)
        if not path.exists():
            return None
        try:
            return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; remove it, or write the data set again") from None


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """dtype, sizes, byte pointers and document marks of an .idx file."""
    try:
        raw = np.memmap(path, mode="r", dtype=np.uint8)
    except (OSError, ValueError) as error:
        reason = "it is empty" if path.exists() else "no such file"
        raise ValueError(
            f"{path} cannot be opened: {reason} ({error}); data.train wants prefixes of .bin/.idx"
        ) from None
    if len(raw) < _HEADER.size or bytes(raw[:9]) != MAGIC:
        raise ValueError(f"{path} is not an index of a token file: it does not begin with {MAGIC!r}")
    _, version, code, sequences, marks = _HEADER.unpack(bytes(raw[: _HEADER.size]))
    if version != 1:
        raise ValueError(f"{path} has format version {version}; only version 1 is known")
    if code not in _DTYPES:
        raise ValueError(f"{path} has the unknown dtype code {code}; known are {sorted(_DTYPES)}")
    expected = _HEADER.size + sequences * (4 + 8) + marks * 8
    if len(raw) != expected:
        raise ValueError(
            f"{path} has {len(raw):,} bytes, but its header ({sequences:,} sequences, {marks:,} document marks) "
            f"needs {expected:,}: truncated or damaged"
        )
    body = raw[_HEADER.size :]
    sizes = body[: sequences * 4].view(np.int32)
    pointers = body[sequences * 4 : sequences * 12].view(np.int64)
    documents = body[sequences * 12 :].view(np.int64)
    if not marks or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise ValueError(f"{path} is damaged: its document marks do not run from 0 to {sequences:,}")
    return np.dtype(_DTYPES[code]), sizes, pointers, documents


def _map_tokens(
    path: Path, dtype: np.dtype[Any], sizes: NDArray[np.int32], pointers: NDArray[np.int64]
) -> NDArray[Any]:
    """The .bin file as one array, checked against the index."""
    expected = int(sizes.sum(dtype=np.int64)) * dtype.itemsize
    try:
        found = path.stat().st_size
    except OSError:
        raise ValueError(f"{path} is missing: its index promises {expected:,} bytes of tokens") from None
    if found != expected:
        raise ValueError(
            f"{path} has {found:,} bytes, but its index promises {expected:,} "
            f"({expected // dtype.itemsize:,} tokens of {dtype.itemsize} bytes): truncated, or of another data set"
        )
    ends = pointers + sizes.astype(np.int64) * dtype.itemsize
    misplaced = (pointers < 0) | (pointers % dtype.itemsize != 0) | (sizes < 0) | (ends > found)
    if misplaced.any():
        raise ValueError(f"{path.with_suffix('.idx')} is damaged: it points outside {path}, or between its tokens")
    return np.memmap(path, mode="r", dtype=dtype) if found else np.empty(0, dtype)


class IndexedDatasetWriter:
    """Writes a data set under temporary names; `close` makes its files visible by renaming them.

    ValueError where the data set is there already, unless `overwrite`, and where its folder cannot be written to.
    """

    def __init__(self, prefix: str | Path, dtype: type[np.generic], *, overwrite: bool = False) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        for path in (bin_path(prefix), idx_path(prefix), sidecar_path(prefix)):
            if path.is_dir():
                raise ValueError(f"{path} is a folder; choose another output prefix")
            if path.exists() and not overwrite:
                raise ValueError(f"{path} is there already; choose another output prefix, or replace it by --overwrite")
        self._bin, self._idx, self._sidecar = (
            Path(f"{prefix}.{kind}.incomplete-{os.getpid()}") for kind in ("bin", "idx", "json")
        )
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._bin.open("wb")
        except OSError as error:
            raise ValueError(f"{bin_path(prefix)} cannot be written: {error}") from None
        self._sizes: list[int] = []
        self.tokens = 0

    def add_document(self, tokens: NDArray[Any]) -> None:
        """Append one document of one sequence. ValueError for tokens that the data set's dtype cannot hold."""
        stored = tokens.astype(self.dtype, copy=False)
        if not np.array_equal(stored, tokens):
            raise ValueError(f"{self.prefix}: tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype}")
        if len(tokens) > np.iinfo(np.int32).max:
            raise ValueError(f"{self.prefix}: a document of {len(tokens):,} tokens; the index holds 32 bits of length")
        with _naming(self._bin):
            self._file.write(stored.tobytes())
        self._sizes.append(len(tokens))
        self.tokens += len(tokens)

    def append(self, other: IndexedDataset) -> None:
        """Append all documents of another data set of the same dtype."""
        if other.dtype != self.dtype:
            raise ValueError(f"{other.prefix} holds {other.dtype}, {self.prefix} {self.dtype}: they cannot be merged")
        for index in range(other.num_documents):
            self.add_document(other.document(index))

    @property
    def documents(self) -> int:
        return len(self._sizes)

    def close(self, about: Mapping[str, Any] | None = None) -> None:
        """Write the index, flush to disk, and rename the files to their names. On failure nothing is left behind.

        `about` is the content of the sidecar; without it there is none, nor an older one.
        """
        try:
            with _naming(self._bin):
                _flush(self._file)
                self._file.close()
            with _naming(self._idx):
                self._write_index()
            if about is not None:
                with self._sidecar.open("wb") as file:
                    file.write((json.dumps(about, indent=2) + "\n").encode())
                    _flush(file)
            try:
                self._publish()
            except KeyboardInterrupt:
                self._publish()  # a few renames: the data set becomes complete rather than be lost half replaced
                raise
        except BaseException:
            self.abort()
            raise

    def _write_index(self) -> None:
        sizes = np.asarray(self._sizes, np.int32)
        lengths = sizes.astype(np.int64) * self.dtype.itemsize
        pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if len(sizes) else lengths
        with self._idx.open("wb") as file:
            file.write(_HEADER.pack(MAGIC, 1, _CODES[self.dtype], len(sizes), len(sizes) + 1))
            for array in (sizes, pointers, np.arange(len(sizes) + 1, dtype=np.int64)):
                file.write(array.tobytes())
            _flush(file)

    def _publish(self) -> None:
        """Give the files their names; continues where it was interrupted.

        The old index is removed first and the new one comes last. A data set without its index does not exist, so
        files of two data sets are never read together, whatever ends the process in between.
        """
        if self._bin.exists():
            idx_path(self.prefix).unlink(missing_ok=True)
            sidecar_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._bin, bin_path(self.prefix))
        if self._sidecar.exists():
            os.replace(self._sidecar, sidecar_path(self.prefix))
        if self._idx.exists():
            os.replace(self._idx, idx_path(self.prefix))

    def abort(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):  # a full disk fails once more when the last bytes are flushed
            self._file.close()
        for path in (self._bin, self._idx, self._sidecar):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing to an open file, such as a full disk, do not tell which file: add `path`."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _flush(file: BinaryIO) -> None:
    """Force what was written to disk."""
    file.flush()
    os.fsync(file.fileno())


_SCANNED_TOKENS = 20_000_000


def check_dataset(prefix: str, vocab_size: int, fingerprint: str | None) -> None:
    """ValueError where the data set at `prefix` cannot be what a model of `vocab_size` tokens was meant to read.

    With a sidecar, its largest token and the fingerprint of its tokenizer are compared; without, the first 20 million
    tokens are looked at.
    """
    dataset = IndexedDataset(prefix)
    if dataset.num_tokens == 0:
        raise ValueError(f"{bin_path(prefix)} holds no tokens")
    about = dataset.sidecar()
    if about is not None:
        largest = int(about["max_token_id"])
        made_with = about.get("tokenizer_fingerprint")
        if fingerprint is not None and made_with is not None and made_with != fingerprint:
            raise ValueError(
                f"{prefix} was written with the {about.get('tokenizer')} tokenizer {made_with[:12]}…, but "
                f"data.tokenizer is {fingerprint[:12]}…: the vocabularies differ; use the tokenizer of the data, or "
                "preprocess it again"
            )
    else:
        largest = int(dataset.tokens[:_SCANNED_TOKENS].max())
    if largest >= vocab_size:
        raise ValueError(
            f"{prefix} holds token {largest}, but model.vocab_size is {vocab_size}: the vocabulary does not match the "
            f"data; set model.vocab_size to at least {largest + 1}, or preprocess the data with this tokenizer"
        )
