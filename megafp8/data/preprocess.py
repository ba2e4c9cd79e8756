"""Tokenization of documents into a data set by several processes, in an order independent of their number.

A `Method` turns documents of one style into tokens. For chats and completions it also marks the answers, and the data
set then has a loss mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from megafp8.data import DataError
from megafp8.data.documents import check_inputs_stay
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, all_paths
from megafp8.data.styles import Document, Method, TokenizedRecord
from megafp8.data.styles.text import Texts
from megafp8.data.tokenizers import Tokenizer, TokenizerSettings, build_tokenizer
from megafp8.data.workers import map_in_order

_CHUNK_DOCUMENTS, _CHUNK_CHARACTERS = 64, 2**18  # limits of one task of a worker
_MAX_MESSAGES = 100
_TEXTS = Texts()


@dataclass
class Summary:
    """Counts of a preprocessing run.

    Attributes:
        documents: Number of documents written.
        tokens: Number of tokens written.
        learned: Number of answer tokens, if there is a loss mask.
        characters: Number of characters of the documents written.
        empty: Number of documents without text.
        errors: Number of documents that were skipped because of an error.
        messages: Errors of the first 100 skipped documents.
        warnings: Text that the model would learn from the first document by mistake.
        max_token_id: Largest token id written.
        boundaries: Tokens around a document, in words, as in `Tokenizer`.
    """

    documents: int = 0
    tokens: int = 0
    learned: int = 0
    characters: int = 0
    empty: int = 0
    errors: int = 0
    messages: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    max_token_id: int = 0
    boundaries: str = ""

    def add(self, document: Document, tokens: TokenizedRecord | None) -> None:
        """Count a document: with an error, without text (`tokens` is None), or with its tokens."""
        if document.error is not None:
            self.errors += 1
            if len(self.messages) < _MAX_MESSAGES:
                self.messages.append(f"{document.origin}: {document.error}")
        elif tokens is None:
            self.empty += 1
        else:
            self.documents += 1
            self.tokens += len(tokens.ids)
            self.learned += 0 if tokens.loss_mask is None else int(tokens.loss_mask.sum())
            self.characters += tokens.characters
            self.max_token_id = max(self.max_token_id, int(tokens.ids.max()))


def preprocess(
    documents: Iterable[Document],
    prefix: str,
    *,
    tokenizer: TokenizerSettings,
    method: Method = _TEXTS,
    workers: int = 0,
    skip_errors: bool = False,
    overwrite: bool = False,
    sources: Sequence[str] = (),
    progress: bool = True,
) -> Summary:
    """Tokenize `documents` into `<prefix>.bin`, `.idx` and `.json`, and return the counts.

    Documents without text are skipped and counted. Tokens are stored as uint16 if the vocabulary fits, else as int32.
    After an error or Ctrl-C, no new files are left.

    Args:
        documents: Documents to tokenize.
        prefix: Path of the data set without suffix.
        tokenizer: Settings of the tokenizer.
        method: Method that turns documents into tokens.
        workers: Number of processes that tokenize; 0 tokenizes in this process.
        skip_errors: Skip and count documents that cannot be read or tokenized.
        overwrite: Replace an existing data set.
        sources: Files of the documents. The first 100 are recorded in the sidecar.
        progress: Show a progress bar.

    Raises:
        ValueError: A document cannot be read or tokenized and `skip_errors` is False (the message names file and line);
            the output exists or is one of the sources; or the tokenizer does not suit the method.
        ChildProcessError: A worker died.
    """
    if workers < 0:
        raise ValueError(f"--workers {workers}: must be 0 or more")
    model = build_tokenizer(*tokenizer)
    method.encoder(model)  # raise errors here that every worker would raise
    check_inputs_stay(sources, all_paths(prefix), "--output-prefix")
    dtype = np.uint16 if model.vocab_size <= 2**16 else np.int32
    writer = IndexedDatasetWriter(prefix, dtype, loss_mask=method.has_loss_mask, overwrite=overwrite)
    summary = Summary(boundaries=model.boundaries)
    try:
        with contextlib.closing(_tokenized(documents, tokenizer, workers, method)) as results:
            for document, tokens in tqdm(results, unit=" documents", disable=not progress):
                if document.error is not None and not skip_errors:
                    message = f"{document.origin}: {document.error}"
                    raise ValueError(f"{message}; --skip-errors skips and counts such documents")
                if tokens is not None:
                    summary.warnings = summary.warnings if summary.documents else method.warnings(model, document)
                    writer.add_document(tokens.ids, tokens.sequences, tokens.loss_mask)
                summary.add(document, tokens)
        if not summary.documents:
            first = f"; the first: {summary.messages[0]}" if summary.errors else ""
            raise ValueError(
                f"no document of the inputs has text ({summary.empty} empty, {summary.errors} unreadable{first}): "
                "nothing was written"
            )
        learned = {"learned_tokens": summary.learned} if method.has_loss_mask else {}
        writer.close(
            {
                "tokenizer": tokenizer.kind,
                "tokenizer_fingerprint": model.fingerprint,
                "vocab_size": model.vocab_size,
                **boundary_ids(model),
                "documents": summary.documents,
                "tokens": summary.tokens,
                "max_token_id": summary.max_token_id,
                **learned,
                "sources": list(sources)[:100],
            }
        )
    except BaseException:
        writer.abort()
        raise
    return summary


def boundary_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entries of a sidecar for the tokens that end and begin documents."""
    return {"eod_id": tokenizer.eod_id, "start_ids": list(tokenizer.start_ids)}


def check_boundaries(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> None:
    """Raise DataError if the documents of a data set end or begin with other tokens than the tokenizer adds."""
    about = dataset.sidecar()
    if about is None or tokenizer is None or "eod_id" not in about:
        return
    end, start = about["eod_id"], about.get("start_ids", [])
    again = "or preprocess the data set again"
    if end != tokenizer.eod_id:
        raise DataError(
            f"{dataset.prefix} was written with the end token {end}, but data.tokenizer has {tokenizer.boundaries}; "
            f"set data.tokenizer.end_token to the token {end}, {again}"
        )
    if start != list(tokenizer.start_ids):
        works = f"set data.tokenizer.add_bos_token={str(bool(start)).lower()}, {again}"
        raise DataError(
            f"{dataset.prefix} was written with {f'the beginning tokens {start}' if start else 'no beginning token'}, "
            f"but data.tokenizer has {tokenizer.boundaries}; {works}"
        )


def _tokenized(
    documents: Iterable[Document], tokenizer: TokenizerSettings, workers: int, method: Method
) -> Generator[tuple[Document, TokenizedRecord | None], None, None]:
    """Yield `documents` in order with their tokens, or with None for documents without text or with an error."""
    make = partial(make_tokenize, tokenizer, method)
    chunks = map_in_order(make, _chunks(documents), workers=workers, describe=_describe)
    with contextlib.closing(chunks):
        for chunk, results in chunks:
            for document, tokens in zip(chunk, results):
                if isinstance(tokens, str):
                    yield Document(document.origin, None, f"cannot be tokenized: {tokens}"), None
                else:
                    yield document, tokens


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += _characters(document.record or document.text)
        if len(chunk) == _CHUNK_DOCUMENTS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _describe(chunk: Sequence[Document]) -> str:
    return chunk[0].origin if len(chunk) == 1 else f"{chunk[0].origin} ... {chunk[-1].origin}"


def _characters(value: Any) -> int:
    """Return the number of characters of all strings in a value, to limit the size of a task."""
    if isinstance(value, str):
        return len(value)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_characters, values))


def make_tokenize(
    tokenizer: TokenizerSettings, method: Method
) -> Callable[[Sequence[Document]], list[TokenizedRecord | str | None]]:
    """Return the function that a worker runs on a list of documents.

    For each document the function returns its tokens, None if it has no text, or the tokenizer's error message.
    """
    encode = method.encoder(build_tokenizer(*tokenizer))

    def tokenize(document: Document) -> TokenizedRecord | str | None:
        try:
            return None if document.error is not None else encode(document)
        except Exception as error:  # libraries raise any exception; one bad document must not lose the others
            return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"

    return lambda chunk: list(map(tokenize, chunk))
