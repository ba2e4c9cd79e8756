"""Next-token prediction with a loss mask, for fine-tuning on chats and completions.

Shapes: b micro-batch size, s sequence length.
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
    """Objective that predicts the next token in documents with a loss mask.

    Attention and positions restart at each document. The first token of a document is never a label.

    Args:
        seq_length: Number of tokens of a sample, s.
        all_tokens: Whether all tokens of a document count, not only the tokens of the mask.
    """

    seq_length: int
    all_tokens: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the tokens, their document numbers, and whether each counts as a label, `[3, s + 1]`."""
        tokens, masks = zip(*parts)
        length = self.seq_length + 1
        counts = np.maximum(padded(masks, length), 0)
        return np.stack([padded(tokens, length), documents_of(parts, length), counts])

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows."""
        batch = next_token_batch(rows[:, 0], rows[:, 1], reset_at_documents=True, mask_eod_loss=True)
        assert batch.loss_mask is not None
        return batch if self.all_tokens else replace(batch, loss_mask=batch.loss_mask * rows[:, 2, 1:])


OBJECTIVE = ObjectiveRecord(
    lambda config: config.data.loss_on is not None and config.data.distillation is None,
    lambda config, *_: Answers(config.training.seq_length, all_tokens=config.data.loss_on == "all"),
)
