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
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megafp8.data.samples import Batch, documents_of, next_token_batch, padded

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
    """The token after each of s tokens; `megafp8.data.samples.next_token_batch` has the options.

    Each part is a document, whatever tokens end it: in many chat templates the token that ends a message is also the
    tokenizer's end of a document.
    """

    seq_length: int
    reset_at_documents: bool = False
    mask_eod_loss: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Tokens `[s + 1]`; where an option needs it, also which document they are of, `[2, s + 1]`."""
        tokens = padded(parts, self.seq_length + 1)
        if not (self.reset_at_documents or self.mask_eod_loss):
            return tokens
        return np.stack([tokens, documents_of(parts, self.seq_length + 1)])

    def batch(self, rows: Tensor) -> Batch:
        tokens_and_documents = [rows] if rows.ndim == 2 else rows.unbind(1)
        return next_token_batch(
            *tokens_and_documents, reset_at_documents=self.reset_at_documents, mask_eod_loss=self.mask_eod_loss
        )


@dataclass(frozen=True)
class Answers:
    """The token after each of s tokens, of documents with a loss mask, which restart attention and positions.

    The labels that count are those of the mask, or with `all_tokens` all of a document; its first token is never one.
    """

    seq_length: int
    all_tokens: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Tokens, which document they are of, and which of them count as labels, `[3, s + 1]`."""
        tokens, masks = zip(*parts)
        length = self.seq_length + 1
        counts = np.maximum(padded(masks, length), 0)
        return np.stack([padded(tokens, length), documents_of(parts, length), counts])

    def batch(self, rows: Tensor) -> Batch:
        batch = next_token_batch(rows[:, 0], rows[:, 1], reset_at_documents=True, mask_eod_loss=True)
        assert batch.loss_mask is not None
        return batch if self.all_tokens else replace(batch, loss_mask=batch.loss_mask * rows[:, 2, 1:])


def generator_of(seed: int, index: int) -> np.random.Generator:
    """Random numbers of sample number `index` of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), index], np.uint64)))
