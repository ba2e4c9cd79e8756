"""What a model is trained to predict: from a sample of the data sets to a micro-batch.

An objective makes of a sample a row of integers (`row`), in the process that reads it, and rows into a `Batch`
(`batch`). A row is a function of the seed and of the sample's number in the run, so a resumed run, or one in another
layout, trains on the same batches.

`NextToken` is the objective of GPT, or `PrefixLM` (`megafp8.data.prefix_lm`), `MaskedLM` (`megafp8.data.masked_lm`)
that of BERT, `SpanCorruption` (`megafp8.data.span_corruption`) that of T5.

Shapes: b micro-batch, s sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megafp8.data.samples import Batch, next_token_batch, padded

Parts = Sequence[NDArray[Any]]
"""The pieces of documents, or sentences, that a sample consists of, in order."""


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


def generator_of(seed: int, index: int) -> np.random.Generator:
    """Random numbers of sample number `index` of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & (2**64 - 1), index], np.uint64)))
