"""What a model is trained to predict: from a sample of the data sets to a micro-batch.

An objective makes of a sample a row of integers (`row`), in the process that reads it, and rows into a `Batch`
(`batch`). A row is a function of the seed and of the sample's number in the run, so a resumed run, or one in another
layout, trains on the same batches.

`NextToken` is the objective of GPT, or `PrefixLM` (`megafp8.data.prefix_lm`), and `Answers` that of fine-tuning it on
data sets with a loss mask; `MaskedLM` (`megafp8.data.masked_lm`) is that of BERT, `SpanCorruption`
(`megafp8.data.span_corruption`) that of T5.

Shapes: b micro-batch, s sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megafp8.data.samples import Batch, batch_of_documents, next_token_batch, padded

Parts = Sequence[NDArray[Any]]
"""The pieces of documents, or sentences, that a sample consists of, in order: `[n]`, or with a loss mask `[2, n]`."""


class Objective(Protocol):
    """What a model is trained to predict."""

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Of sample number `index` of the run: all rows have the same shape."""
        ...

    def batch(self, rows: Tensor) -> Batch:
        """Of rows, stacked along a new first dim."""
        ...


@dataclass(frozen=True)
class NextToken:
    """The token after each of s tokens; `megafp8.data.samples.next_token_batch` has the options."""

    seq_length: int
    eod_id: int | None = None
    reset_at_documents: bool = False
    mask_eod_loss: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        return padded(parts, self.seq_length + 1)

    def batch(self, rows: Tensor) -> Batch:
        return next_token_batch(
            rows, self.eod_id, reset_at_documents=self.reset_at_documents, mask_eod_loss=self.mask_eod_loss
        )


@dataclass(frozen=True)
class Answers:
    """The token after each of s tokens, of documents with a loss mask, which restart attention and positions.

    Each part is a document, whatever tokens end it: in many chat templates the token that ends an answer is also the
    tokenizer's end of a document. The labels that count are those of the mask, or with `all_tokens` all of a document;
    its first token is never one.
    """

    seq_length: int
    all_tokens: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Tokens, which of them count as labels, and which document they are of, `[3, s + 1]`; padding has token 0."""
        row = np.zeros((3, self.seq_length + 1), np.int64)
        row[2] = len(parts)
        end = 0
        for document, part in enumerate(parts):
            begin, end = end, end + part.shape[1]
            row[:2, begin:end], row[2, begin:end] = part, document
        if self.all_tokens:
            row[1, :end] = 1
        return row

    def batch(self, rows: Tensor) -> Batch:
        tokens, counts, document = rows.unbind(1)
        last = document[:, 1:] != document[:, :-1]
        mask = (counts[:, 1:] * ~last).float()
        return batch_of_documents(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, last)


def generator_of(seed: int, index: int) -> np.random.Generator:
    """Random numbers of sample number `index` of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), index], np.uint64)))
