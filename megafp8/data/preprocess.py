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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megafp8.data.indexed_dataset import IndexedDatasetWriter, sidecar_path
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


def _open_text(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        import zstandard

        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(path.open("rb")), encoding="utf-8")
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
        except (OSError, EOFError) as error:
            yield Document(str(path), None, f"cannot be read: {error}")


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
                valid = isinstance(text, str)
                yield Document(where, text if valid else None, None if valid else f"{key!r} is not a string")


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
            valid = isinstance(text, str)
            yield Document(f"{path}, row {row}", text if valid else None, None if valid else "is not a string")


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
    sidecar_path(prefix).write_text(json.dumps(_about(summary, tokenizer, kind, sources), indent=2) + "\n")
    writer.close()
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
