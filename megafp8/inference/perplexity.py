"""Perplexity of texts and data sets: the mean loss of each token, and bits per byte of text.

A document is scored after the tokens that begin a text, in windows of the model's length: each window scores the next
`stride` tokens after as many as fit before them, so that all but the first have at least `max_length` - `stride` tokens
of context (https://huggingface.co/docs/transformers/perplexity). The token that ends a document is not scored, so a
text and its data set have the same numbers.

Documents are scored each by itself, or *concatenated*: one after the other in their order, each ended by the token that
ends documents, as a model sees them that was trained without `data.reset_at_documents`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data.documents import InputFile, read_documents
from megafp8.data.indexed_dataset import IndexedDataset, check_dataset
from megafp8.data.preprocess import boundary_ids
from megafp8.data.tokenizers import Tokenizer
from megafp8.inference.scoring import Request, Scorer, windows
from megafp8.parallel.collectives import broadcast_object


class EvaluationDocument(NamedTuple):
    """Tokens of a document without the one that ends it, and its text.

    `text`: None if it is not known. `loss_mask`: 1 for tokens that count; None: all do.
    """

    tokens: Sequence[int] | NDArray[Any]
    text: str | None
    loss_mask: NDArray[Any] | None = None


@dataclass(frozen=True)
class DocumentLoss:
    """Loss of some documents. `nats`: sum of the negative log-probabilities of `tokens` tokens, natural logarithm.

    `words`: parts between white space, and `bytes`: in UTF-8, of the texts; None where they are not known.
    """

    documents: int
    tokens: int
    words: int | None
    bytes: int | None
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity of a token; infinite where it is larger than a float can be."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def documents_of_files(files: Iterable[InputFile], tokenizer: Tokenizer) -> Iterator[EvaluationDocument]:
    """The documents of text files. Raises ValueError for one that cannot be read."""
    for document in read_documents(files):
        if document.text is None:
            raise ValueError(f"{document.origin}: {document.error}")
        yield EvaluationDocument(tokenizer.encode(document.text), document.text)


def documents_of_data_set(
    dataset: IndexedDataset, documents: range, vocab_size: int, tokenizer: Tokenizer | None
) -> Iterator[EvaluationDocument]:
    """Yield some documents of a data set, with the text of their tokens. With a loss mask only its tokens count.

    The tokens that begin and end the documents, as the data set's sidecar records them or else by the tokenizer, are
    not part of the text. Raises ValueError, at the first document, if the data set does not fit model or tokenizer.
    """
    check_dataset(dataset, vocab_size, None if tokenizer is None else tokenizer.fingerprint)
    mask = dataset.loss_mask() if dataset.has_loss_mask else None
    about = ({} if tokenizer is None else boundary_ids(tokenizer)) | (dataset.sidecar() or {})
    start, end = about.get("start_ids", []), about.get("eod_id")
    for i in documents:
        tokens = dataset.document(i)
        first = len(start) if list(tokens[: len(start)]) == start else 0
        tokens = tokens[first:]
        if mask is not None:
            yield EvaluationDocument(tokens, None, mask.document(i)[first:])
            continue
        if len(tokens) and tokens[-1] == end:
            tokens = tokens[:-1]
        yield EvaluationDocument(tokens, None if tokenizer is None else tokenizer.decode(tokens.tolist()))


class _Counts:
    """Sizes of documents that went by."""

    def __init__(self) -> None:
        self.documents = self.words = self.bytes = 0
        self.known = True

    def count(self, document: EvaluationDocument) -> None:
        self.documents += 1
        if document.text is None:
            self.known = False
        else:
            self.words += len(document.text.split())
            self.bytes += len(document.text.encode())


_Sequence = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Tokens, and which of them count; the first does not, as nothing precedes it."""


def _concatenated(
    documents: Iterable[EvaluationDocument], start: Sequence[int], between: Sequence[int], counts: _Counts
) -> _Sequence:
    """Join all documents: each ends with the first token of `between`, and the next one begins with the others."""
    eod_id, *next_start = between
    parts = [_sequence(start, EvaluationDocument([], None), [])]
    for document in documents:
        before = next_start if counts.documents else []
        counts.count(document)
        ended = len(document.tokens) and document.tokens[-1] == eod_id  # as those with a loss mask are
        parts.append(_sequence(before, document, [] if ended else [eod_id]))
    tokens, counted = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(counted)


def _sequence(start: Sequence[int], document: EvaluationDocument, end: Sequence[int]) -> _Sequence:
    tokens = np.concatenate([np.asarray(part, np.int64) for part in (start, document.tokens, end)])
    counted = np.zeros(len(tokens), np.bool_)
    counted[len(start) : len(tokens) - len(end)] = True if document.loss_mask is None else document.loss_mask
    return tokens, counted


def loss_of(
    scorer: Scorer,
    documents: Iterable[EvaluationDocument],
    start: Sequence[int],
    stride: int,
    *,
    concatenated_by: Sequence[int] | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> DocumentLoss:
    """The loss of `documents`, which the first rank reads; on all ranks. Collective.

    `start`: tokens before a document, or before the first one if documents are concatenated; if there are none, a
    document's first token is not scored. `concatenated_by`: the token that ends each document and the tokens that begin
    the next, if documents are concatenated.
    `progress` is called with the number of tokens that were scored since its last call. Raises ValueError, on all
    ranks, for documents that cannot be read and if there is no token to score.
    """
    if not 1 <= stride <= scorer.max_length:
        raise ValueError(f"stride = {stride}: must be between 1 and max_length, which is {scorer.max_length}")
    counts, masks = _Counts(), deque[NDArray[np.bool_]]()

    def sequences() -> Iterator[_Sequence]:
        if concatenated_by is None:
            for document in documents:
                counts.count(document)
                yield _sequence(start, document, [])
        else:
            yield _concatenated(documents, start, concatenated_by, counts)

    def requests() -> Iterator[Request]:
        for tokens, counted in sequences():
            at = 1
            for window in windows(tokens.tolist(), scorer.max_length, stride):
                masks.append(counted[at : at + len(window.continuation)])
                at += len(window.continuation)
                yield window

    nats, scored = 0.0, 0
    first = scorer.model.parallel.world.is_first
    for score in scorer.score(requests()):
        if first:
            mask = masks.popleft()
            nats -= math.fsum(np.asarray(score.logprobs)[mask])
            scored += int(mask.sum())
            progress(len(score.logprobs))
    words, size = (counts.words, counts.bytes) if counts.known else (None, None)
    rank_loss = DocumentLoss(counts.documents, scored, words, size, nats)
    loss: DocumentLoss = broadcast_object(rank_loss, scorer.model.parallel.world.group)
    if not loss.tokens:
        raise ValueError(f"there is no token to score in {loss.documents} documents")
    return loss
