"""Perplexity of texts and data sets: mean loss per token, and bits per byte of text.

A document is scored after the tokens that begin a text, in windows of the model's length. Each window scores the next
`stride` tokens and reads as many tokens before them as fit. So after the first window, every token has at least
`max_length` - `stride` tokens of context (https://huggingface.co/docs/transformers/perplexity). The token that ends a
document is not scored, so a text and the data set made of it have the same perplexity.

Documents are scored separately, or *concatenated* in their order. Concatenated documents are separated by the token
that ends documents, as in the training of a model without `data.reset_at_documents`.
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
    """Document to evaluate.

    Attributes:
        tokens: Token ids, without the token that ends the document unless there is a loss mask.
        text: Text of the document; None if unknown.
        loss_mask: 1 for tokens that are scored, 0 for others; None: all tokens are scored.
    """

    tokens: Sequence[int] | NDArray[Any]
    text: str | None
    loss_mask: NDArray[Any] | None = None


@dataclass(frozen=True)
class DocumentLoss:
    """Loss of a set of documents.

    Attributes:
        documents: Number of documents.
        tokens: Number of scored tokens.
        words: Number of words, separated by white space; None if the texts are unknown.
        bytes: Number of bytes of the texts in UTF-8; None if the texts are unknown.
        nats: Sum of the negative log-probabilities of the scored tokens, in nats.
    """

    documents: int
    tokens: int
    words: int | None
    bytes: int | None
    nats: float

    @property
    def nats_per_token(self) -> float:
        """Mean loss of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token; infinite if it does not fit into a float."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text; None if the texts are unknown or empty."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def documents_of_files(files: Iterable[InputFile], tokenizer: Tokenizer) -> Iterator[EvaluationDocument]:
    """Yield the documents of text files, tokenized. Raises ValueError for a document that cannot be read."""
    for document in read_documents(files):
        if document.text is None:
            raise ValueError(f"{document.origin}: {document.error}")
        yield EvaluationDocument(tokenizer.encode(document.text), document.text)


def documents_of_data_set(
    dataset: IndexedDataset, documents: range, vocab_size: int, tokenizer: Tokenizer | None
) -> Iterator[EvaluationDocument]:
    """Yield the `documents` of a data set with their texts. If there is a loss mask, only its tokens are scored.

    The tokens that begin and end documents are not part of a text. They are read from the data set's sidecar, or else
    from the tokenizer. Raises ValueError at the first document if the data set does not fit the model or tokenizer.
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
    """Counter of documents, and of the words and bytes of their texts."""

    def __init__(self) -> None:
        self.documents = self.words = self.bytes = 0
        self.known = True

    def count(self, document: EvaluationDocument) -> None:
        """Count one document."""
        self.documents += 1
        if document.text is None:
            self.known = False
        else:
            self.words += len(document.text.split())
            self.bytes += len(document.text.encode())


_Sequence = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Tokens, and whether each of them is scored. The first token is not, because no token precedes it."""


def _concatenated(
    documents: Iterable[EvaluationDocument], start: Sequence[int], between: Sequence[int], counts: _Counts
) -> _Sequence:
    """Join all documents: each ends with the first token of `between`, and the next one begins with the others."""
    eod_id, *next_start = between
    parts = [_sequence(start, EvaluationDocument([], None), [])]
    for document in documents:
        before = next_start if counts.documents else []
        counts.count(document)
        ended = len(document.tokens) and document.tokens[-1] == eod_id  # documents with a loss mask keep the end token
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
    """Return the loss of `documents` on all ranks. Collective.

    Args:
        scorer: Scorer of the model.
        documents: Documents; only the first rank reads them.
        start: Tokens before each document, or before the first one if documents are concatenated. If there are none,
            the first token of a document is not scored.
        stride: Number of tokens that each window scores.
        concatenated_by: Token that ends each document, followed by the tokens that begin the next one. None scores
            documents separately.
        progress: Function that is called with the number of tokens scored since its last call.

    Raises:
        ValueError: A document cannot be read, or there is no token to score. Raised on all ranks.
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
