"""Fill in the middle: documents are rearranged, so that a causal model learns to restore a span from both of its sides.

    document    p p p m m m m s s s s s s <end>
    PSM         <prefix> p p p <suffix> s s s <middle> m m m m <end>
    SPM         <prefix> <suffix> s s s <middle> p p p m m m m <end>

(Bavarian et al. 2022, arXiv:2207.14255, at the level of contexts: what is rearranged are the documents of a sample, or
the parts of them that it has.) Where the middle begins and ends is drawn at random, in tokens. All tokens are predicted
as in next-token prediction. The end of a document stays at its end, where it tells that the middle is complete.

A document keeps its length: the last three tokens of its suffix make room for the marks. One whose suffix has fewer is
not rearranged.
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


@dataclass(frozen=True)
class FillInTheMiddle:
    """`next_token` of documents each of which is rearranged with probability `rate`, and as SPM with `spm_rate` then.

    `prefix`, `middle`, `suffix`: ids of the marks. `eod_id`: ends documents; None if nothing does. `start_ids`: begin
    documents. Both stay in their places. Which documents are rearranged, and where, depends on the seed and on the
    sample's number in the run only.
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
        """The row of `next_token`."""
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
        return self.next_token.batch(rows)


_NAMES = {
    mark: (f"<|fim_{mark}|>", f"<fim_{mark}>", f"▁<{mark[:3].upper()}>") for mark in ("prefix", "middle", "suffix")
}
"""The marks of the tokenizers of Qwen, StarCoder and Code Llama."""


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
