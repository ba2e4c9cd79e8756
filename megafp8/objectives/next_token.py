"""Next-token prediction, the objective of GPT.

Shapes: b micro-batch size, s sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.data.samples import documents_of, next_token_batch, padded
from megafp8.objectives import Config, ObjectiveRecord, Parts, Tokenizer


@dataclass(frozen=True)
class NextToken:
    """Objective that predicts the token after each of s tokens.

    Each part of a sample is a document, even if other tokens mark ends of documents. In many chat templates, for
    example, the token that ends a message is also the tokenizer's end of a document.

    Args:
        seq_length: Number of tokens of a sample, s.
        reset_at_documents: Whether attention and positions restart at each document.
        mask_eod_loss: Whether to ignore labels that begin a document, because nothing predicts them.
    """

    seq_length: int
    reset_at_documents: bool = False
    mask_eod_loss: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the tokens `[s + 1]`, or tokens and their document numbers `[2, s + 1]` if an option needs them."""
        tokens = padded(parts, self.seq_length + 1)
        if not (self.reset_at_documents or self.mask_eod_loss):
            return tokens
        return np.stack([tokens, documents_of(parts, self.seq_length + 1)])

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows `[b, ...]`."""
        tokens_and_documents = [rows] if rows.ndim == 2 else rows.unbind(1)
        return next_token_batch(
            *tokens_and_documents, reset_at_documents=self.reset_at_documents, mask_eod_loss=self.mask_eod_loss
        )


def next_token(config: Config, _tokenizer: Tokenizer | None = None, _source: str = "") -> NextToken:
    """Return the next-token objective of a config."""
    return NextToken(config.training.seq_length, config.data.reset_at_documents, config.data.mask_eod_loss)


OBJECTIVE = ObjectiveRecord(
    lambda config: config.spec.architecture == "gpt" and config.data.loss_on is None and not config.data.objectives,
    next_token,
)
