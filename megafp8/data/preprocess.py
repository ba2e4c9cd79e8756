"""From files of text to a token data set, over several processes, in the same order whatever their number.

Readers yield documents with where they came from, so that a bad line is named by file and line. A pool of processes
tokenizes them in chunks; `imap` keeps the order.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import multiprocessing
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megafp8.data.indexed_dataset import IndexedDatasetWriter
from megafp8.data.tokenizers import Tokenizer, TokenizerKind, build_tokenizer

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".parquet")


class Document(NamedTuple):
    """A text and where it stands; `error` in its place where it could not be read."""

    where: str
    text: str | None
    error: str | None = None


def find_files(inputs: Sequence[str], *, any_text: bool = False) -> list[Path]:
    """The files that `inputs` (files, folders, globs) name, in a fixed order, each once.

    Folders are searched for known kinds, or with `any_text` for all files. ValueError where an input names nothing.
    """
    found: dict[Path, None] = {}
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*")) if p.is_file() and (any_text or p.name.endswith(_SUFFIXES))]
        elif path.is_file():
            files = [path]
        else:
            files = [Path(match) for match in sorted(glob.glob(item, recursive=True)) if Path(match).is_file()]
        if not files:
            raise ValueError(f"--input {item}: no such file, and no pattern that matches one")
        found.update(dict.fromkeys(files))
    return list(found)


class _ZstdFile(io.RawIOBase):
    """The content of a .zst file, frame after frame. EOFError where the last frame is cut short, and OSError where the
    bytes are not zstd's; the library's own reader takes a cut file for a whole one."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._library, self._file = zstandard, path.open("rb")
        self._frame: Any = None
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(2**16)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("compressed file ended within a frame")
                return 0
            self._ready = self._unpack()
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self) -> bytes:
        """What `_packed` holds of the frame at hand, leaving what lies behind its end."""
        self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
        try:
            text: bytes = self._frame.decompress(self._packed)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        self._packed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return text


def _open_text(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        return io.TextIOWrapper(io.BufferedReader(_ZstdFile(path)), encoding="utf-8")
    return path.open(encoding="utf-8", newline="")


def read_documents(files: Iterable[Path], *, json_key: str = "text", any_text: bool = False) -> Iterator[Document]:
    """Every document of `files`, in order: a JSON line, a parquet row, or with .txt and `any_text` a whole file."""
    for path in files:
        try:
            if any_text or path.suffix == ".txt":
                with _open_text(path) as stream:
                    yield Document(str(path), stream.read())
            elif path.suffix == ".parquet":
                yield from _read_parquet(path, json_key)
            else:
                yield from _read_json_lines(path, json_key)
        except UnicodeDecodeError as error:
            yield Document(str(path), None, f"not UTF-8 text: {error}")
        except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's errors are ValueErrors
            yield Document(str(path), None, f"cannot be read: {error}")


def _document(where: str, text: Any, key: str) -> Document:
    """A document, or why `text` is none. JSON can spell halves of surrogate pairs, which no tokenizer takes."""
    if not isinstance(text, str):
        return Document(where, None, f"{key!r} is not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Document(where, None, f"{key!r} is not valid Unicode: {error}")
    return Document(where, text)


def _read_json_lines(path: Path, key: str) -> Iterator[Document]:
    with _open_text(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
                text = record[key]
            except json.JSONDecodeError as error:
                yield Document(where, None, f"not JSON: {error}")
            except (KeyError, TypeError):
                keys = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
                yield Document(where, None, f"has no key {key!r} (it has {keys}); --json-key names the text")
            else:
                yield _document(where, text, key)


def _read_parquet(path: Path, key: str) -> Iterator[Document]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    if key not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        yield Document(str(path), None, f"has no column {key!r} (it has {names}); --json-key names the text")
        return
    row = 0
    for batch in file.iter_batches(columns=[key]):
        for text in batch.column(0).to_pylist():
            row += 1
            yield _document(f"{path}, row {row}", text, key)


@dataclass
class Summary:
    """What a preprocessing run did."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    empty: int = 0
    errors: list[str] = field(default_factory=list)
    max_token_id: int = 0


_worker_tokenizer: Tokenizer | None = None


def _start_worker(kind: TokenizerKind, path: str | None) -> None:
    global _worker_tokenizer
    _worker_tokenizer = build_tokenizer(kind, path)


def _tokenize(document: Document) -> tuple[Document, NDArray[np.int64] | None]:
    assert _worker_tokenizer is not None
    if not document.text:
        return document, None
    return document, np.asarray(_worker_tokenizer.encode(document.text), np.int64)


def preprocess(
    documents: Iterable[Document],
    prefix: str,
    *,
    kind: TokenizerKind,
    path: str | None,
    workers: int = 1,
    append_eod: bool = True,
    skip_errors: bool = False,
    overwrite: bool = False,
    sources: Sequence[str] = (),
    progress: bool = True,
) -> Summary:
    """Tokenize `documents` into `<prefix>.bin`, `.idx` and `.json`. Documents without text are left out and counted.

    Tokens are uint16 where the vocabulary fits, else int32. A document that cannot be read raises ValueError, naming
    file and line, unless `skip_errors`; nothing is left behind then.
    """
    tokenizer = build_tokenizer(kind, path)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    writer = IndexedDatasetWriter(prefix, dtype, overwrite=overwrite)
    summary = Summary()
    try:
        with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (kind, path)) as pool:
            results = pool.imap(_tokenize, documents, chunksize=16)
            for document, ids in tqdm(results, unit=" documents", disable=not progress):
                _add(writer, summary, document, ids, tokenizer.eod_id if append_eod else None, skip_errors)
    except BaseException:
        writer.abort()
        raise
    if not summary.documents:
        writer.abort()
        raise ValueError(f"no documents with text among the inputs ({summary.empty} empty): nothing was written")
    writer.close(_about(summary, tokenizer, kind, sources))
    return summary


def _add(
    writer: IndexedDatasetWriter,
    summary: Summary,
    document: Document,
    ids: NDArray[np.int64] | None,
    eod_id: int | None,
    skip_errors: bool,
) -> None:
    if document.error is not None:
        message = f"{document.where}: {document.error}"
        if not skip_errors:
            raise ValueError(f"{message}; --skip-errors leaves such documents out and counts them")
        summary.errors.append(message)
        return
    if ids is None or not len(ids):
        summary.empty += 1
        return
    if eod_id is not None:
        ids = np.append(ids, eod_id)
    writer.add_document(ids)
    summary.documents += 1
    summary.tokens += len(ids)
    summary.characters += len(document.text or "")
    summary.max_token_id = max(summary.max_token_id, int(ids.max()))


def _about(summary: Summary, tokenizer: Tokenizer, kind: str, sources: Sequence[str]) -> dict[str, Any]:
    return {
        "tokenizer": kind,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "documents": summary.documents,
        "tokens": summary.tokens,
        "max_token_id": summary.max_token_id,
        "sources": list(sources)[:100],
    }
