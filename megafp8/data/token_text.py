"""Tokens of a data set as text, with the learned parts marked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.tokenizers import Tokenizer

_TOKENS_BEFORE, _TOKENS_AFTER = 100, 300  # shown before and after the start of the first learned part


def show(tokens: NDArray[np.int64], tokenizer: Tokenizer | None, most: int = 400) -> str:
    """Return the first `most` tokens, as text if there is a tokenizer, else as numbers.

    Raises ValueError for tokens that the tokenizer does not have.
    """
    ids = [int(i) for i in tokens[:most]]
    rest = f" … ({len(tokens) - most:,} more tokens)" if len(tokens) > most else ""
    if tokenizer is None:
        return " ".join(map(str, ids)) + rest
    if ids and max(ids) >= tokenizer.vocab_size:
        raise ValueError(
            f"the data contain token {max(ids)}, but --tokenizer has only {tokenizer.vocab_size:,} tokens: it is not "
            "the tokenizer of the data"
        )
    return tokenizer.decode(ids) + rest


def show_answers(tokens: NDArray[np.int64], mask: NDArray[np.uint8], tokenizer: Tokenizer | None) -> str:
    """Return a document as text with the learned parts in ⟦ ⟧."""
    starts = np.flatnonzero(np.diff(mask, prepend=0))  # starts of answers, and of the parts between them
    runs = [show(run, tokenizer, len(run)) for run in np.split(tokens, starts)]
    return "".join(f"⟦{run}⟧" if i % 2 else run for i, run in enumerate(runs))


def example(dataset: IndexedDataset, tokenizer: Tokenizer) -> str:
    """Return the text around the first learned part of the first document, on one line."""
    tokens, mask = dataset.document(0), dataset.loss_mask().document(0)
    first = int(np.flatnonzero(mask)[0])
    part = slice(max(0, first - _TOKENS_BEFORE), first + _TOKENS_AFTER)
    text = show_answers(tokens[part], mask[part], tokenizer)
    return f"{'... ' if part.start else ''}{text}{' ...' if part.stop < len(tokens) else ''}".replace("\n", "\\n")
