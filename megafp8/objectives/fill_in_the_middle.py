"""Fill in the middle: documents are rearranged so that a causal model learns to restore a span from both sides.

    document    p p p m m m m s s s s s s <end>
    PSM         <prefix> p p p <suffix> s s s <middle> m m m m <end>
    SPM         <prefix> <suffix> s s s <middle> p p p m m m m <end>

The source is Bavarian et al. 2022, arXiv:2207.14255, at the level of contexts: it rearranges the documents of a sample,
or the parts of documents that the sample has. The beginning and the end of the middle are drawn at random, in tokens.
All tokens are predicted as in next-token prediction. The end token of a document stays at its end, where it shows that
the middle is complete.

A document keeps its length: the three marks replace the last three tokens of its suffix. A document with a shorter
suffix is not rearranged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.objectives import Config, ObjectiveRecord, Parts, Tokenizer, generator_of, special_ids
from megafp8.objectives.next_token import NextToken, next_token

MARKS = 3
"""Number of marks in a rearranged document."""


@dataclass(frozen=True)
class FillInTheMiddle:
    """Next-token objective with documents rearranged at random.

    The choice of documents and of their middles depends only on the seed and on the sample's number in the run.

    Args:
        next_token: Objective for the rearranged documents.
        seed: Seed of the run.
        rate: Probability that a document is rearranged.
        spm_rate: Probability that a rearranged document has the order suffix, prefix, middle.
        prefix: Id of the prefix mark.
        middle: Id of the middle mark.
        suffix: Id of the suffix mark.
        eod_id: Id of the token that ends documents and stays in place; None if there is none.
        start_ids: Ids of the tokens that begin documents and stay in place.
    """

    next_token: NextToken
    seed: int
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    eod_id: int | None = None
    start_ids: tuple[int, ...] = ()

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the row of `next_token` for the rearranged documents."""
        generator = generator_of(self.seed, index)
        return self.next_token.row([self._rearranged(part, generator) for part in parts], index)

    def _rearranged(self, document: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        chosen, as_spm = generator.random(2) < (self.rate, self.spm_rate)
        ends = len(document) > 0 and document[-1] == self.eod_id
        first = len(self.start_ids) if tuple(document[: len(self.start_ids)]) == self.start_ids else 0
        start, text, end = np.split(document, [first, max(first, len(document) - int(ends))])
        begin, stop = np.sort(generator.integers(len(text), size=2, endpoint=True))
        if not chosen or len(text) - stop < MARKS:
            return document
        prefix, middle, suffix = text[:begin], text[begin:stop], text[stop : len(text) - MARKS]
        pre, mid, suf = (np.array([mark]) for mark in (self.prefix, self.middle, self.suffix))
        pieces = [pre, suf, suffix, mid, prefix] if as_spm else [pre, prefix, suf, suffix, mid]
        return np.concatenate([start, *pieces, middle, end])

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows."""
        return self.next_token.batch(rows)


_NAMES = {
    mark: (f"<|fim_{mark}|>", f"<fim_{mark}>", f"▁<{mark[:3].upper()}>") for mark in ("prefix", "middle", "suffix")
}
"""Names of the marks in the tokenizers of Qwen, StarCoder and Code Llama."""


def _build(config: Config, tokenizer: Tokenizer | None, source: str) -> FillInTheMiddle:
    options = config.data.fill_in_the_middle
    assert options is not None
    marks = special_ids(config, tokenizer, source, dict(options), _NAMES, "data.fill_in_the_middle")
    eod_id, start_ids = (None, ()) if tokenizer is None else (tokenizer.eod_id, tokenizer.start_ids)
    prefix, middle, suffix = marks["prefix"], marks["middle"], marks["suffix"]
    return FillInTheMiddle(
        next_token(config), config.seed, options.rate, options.spm_rate, prefix, middle, suffix, eod_id, start_ids
    )


OBJECTIVE = ObjectiveRecord(lambda config: config.data.fill_in_the_middle is not None, _build)
