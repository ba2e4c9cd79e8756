"""Prediction of the next token where a loss mask says so: fine-tuning on chats and completions.

Shapes: b micro-batch, s sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.data.samples import documents_of, next_token_batch, padded
from megafp8.objectives import ObjectiveRecord, Parts


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


OBJECTIVE = ObjectiveRecord(
    lambda config: config.data.loss_on is not None and config.data.distillation is None,
    lambda config, *_: Answers(config.training.seq_length, all_tokens=config.data.loss_on == "all"),
)
