"""Tokenizes documents into a data set, with several processes, in an order that does not depend on their number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megafp8.data.documents import Document
from megafp8.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, sidecar_path
from megafp8.data.sentences import split_sentences
from megafp8.data.tokenizers import TokenizerSettings, build_tokenizer
from megafp8.data.workers import map_in_order

_CHUNK_DOCUMENTS, _CHUNK_CHARACTERS = 64, 2**18  # limits of one task of a worker
_MAX_MESSAGES = 100

Ids = NDArray[np.int32]


@dataclass
class Summary:
    """Counts of a preprocessing run. `errors`: documents that were skipped; `messages`: reasons of the first 100."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    empty: int = 0
    errors: int = 0
    messages: list[str] = field(default_factory=list)
    max_token_id: int = 0

    def add(self, document: Document, ids: Ids | None) -> None:
        """Count a document: with its tokens, or with an error, or without text."""
        if document.error is not None:
            self.errors += 1
            if len(self.messages) < _MAX_MESSAGES:
                self.messages.append(f"{document.origin}: {document.error}")
        elif ids is None:
            self.empty += 1
        else:
            self.documents += 1
            self.tokens += len(ids)
            self.characters += len(document.text or "")
            self.max_token_id = max(self.max_token_id, int(ids.max()))


def preprocess(
    documents: Iterable[Document],
    prefix: str,
    *,
    tokenizer: TokenizerSettings,
    workers: int = 0,
    append_eod: bool = True,
    sentences: bool = False,
    skip_errors: bool = False,
    overwrite: bool = False,
    sources: Sequence[str] = (),
    progress: bool = True,
) -> Summary:
    """Tokenize `documents` into `<prefix>.bin`, `.idx` and `.json`. Documents without text are skipped and counted.

    `workers` processes tokenize, or this process if 0. Tokens are uint16 if the vocabulary fits, else int32. `sources`
    are the files of the documents. `sentences`: each sentence of a document is a sequence of its own. Raises ValueError
    for a document that cannot be read or tokenized, naming file and line, unless `skip_errors`; ValueError if the
    output exists or is one of the sources; ChildProcessError if a worker dies. No files are left then, nor on Ctrl-C.
    """
    if workers < 0:
        raise ValueError(f"--workers {workers}: must be 0 or more")
    model = build_tokenizer(*tokenizer)
    outputs = {os.path.realpath(path(prefix)) for path in (bin_path, idx_path, sidecar_path)}
    for source in sources:
        if os.path.realpath(source) in outputs:
            raise ValueError(f"{source} is an input and would be replaced by the output; choose another output prefix")
    writer = IndexedDatasetWriter(prefix, np.uint16 if model.vocab_size <= 2**16 else np.int32, overwrite=overwrite)
    summary = Summary()
    try:
        with contextlib.closing(_tokenized(documents, tokenizer, workers, sentences)) as results:
            for document, parts in tqdm(results, unit=" documents", disable=not progress):
                if document.error is not None and not skip_errors:
                    message = f"{document.origin}: {document.error}"
                    raise ValueError(f"{message}; --skip-errors skips and counts such documents")
                parts = [part for part in parts or [] if len(part)]
                ids = None
                if parts:
                    if append_eod:
                        parts[-1] = np.append(parts[-1], np.int32(model.eod_id))
                    ids = np.concatenate(parts)
                    writer.add_document(ids, [len(part) for part in parts])
                summary.add(document, ids)
        if not summary.documents:
            first = f"; the first: {summary.messages[0]}" if summary.errors else ""
            raise ValueError(
                f"no documents with text among the inputs ({summary.empty} empty, {summary.errors} unreadable{first}): "
                "nothing was written"
            )
        writer.close(
            {
                "tokenizer": tokenizer.kind,
                "tokenizer_fingerprint": model.fingerprint,
                "vocab_size": model.vocab_size,
                "eod_id": model.eod_id,
                "documents": summary.documents,
                "tokens": summary.tokens,
                "max_token_id": summary.max_token_id,
                "sources": list(sources)[:100],
            }
        )
    except BaseException:
        writer.abort()
        raise
    return summary


def _tokenized(
    documents: Iterable[Document], tokenizer: TokenizerSettings, workers: int, sentences: bool
) -> Generator[tuple[Document, list[Ids] | None], None, None]:
    """`documents` in order with the token ids of their sequences; None for those with an error."""
    make = partial(_make_tokenize, tokenizer, sentences)
    chunks = map_in_order(make, _chunks(documents), workers=workers, describe=_describe)
    with contextlib.closing(chunks):
        for chunk, results in chunks:
            for document, ids in zip(chunk, results):
                if isinstance(ids, str):
                    yield Document(document.origin, None, f"cannot be tokenized: {ids}"), None
                else:
                    yield document, ids


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document.text or "")
        if len(chunk) == _CHUNK_DOCUMENTS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _describe(chunk: Sequence[Document]) -> str:
    return chunk[0].origin if len(chunk) == 1 else f"{chunk[0].origin} ... {chunk[-1].origin}"


def _make_tokenize(
    tokenizer: TokenizerSettings, sentences: bool
) -> Callable[[Sequence[Document]], list[list[Ids] | str | None]]:
    """The function of a worker: token ids of each document, or of its sentences, None for one without text, or the
    tokenizer's error."""
    model = build_tokenizer(*tokenizer)

    def tokenize(document: Document) -> list[Ids] | str | None:
        try:
            if not document.text:
                return None
            texts = split_sentences(document.text) if sentences else [document.text]
            return [np.asarray(model.encode(text), np.int32) for text in texts]
        except Exception as error:  # libraries raise any; one document must not cost the others
            return f"{type(error).__name__}: {error}"

    return lambda chunk: list(map(tokenize, chunk))
