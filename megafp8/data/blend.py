"""A weighted blend of data sets, without state and without an index.

Sample j of data set k, of weight w, is due at time (j + 1/2) / w, and samples are given in the order of their times
(Webster's method of apportionment). So at any time the counts follow the weights, however small, and depend only on the
number of samples n. Within blocks of samples the order is shuffled by (seed, block). Looking up a sample costs
one small permutation; each data set's samples are used in order, none twice and none left out.

A run whose data sets or weights change starts a new `Segment` at its current sample: the method starts again, and each
data set continues after the samples it has given before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafp8.data.prompts import PromptSource
from megafp8.data.samples import PackedDataset
from megafp8.data.text_source import TextSource

BLOCK = 1024


def shares(weights: Sequence[float]) -> NDArray[np.float64]:
    """`weights` divided by their sum. Pure."""
    normalized = np.asarray(weights, np.float64) / float(np.sum(weights))
    assert normalized.min() > 0, "a share is too small for a float; config.checks refuses such weights"
    return normalized


@dataclass(frozen=True)
class Segment:
    """Maps global samples from `first` on to samples of data sets.

    `weights`: any positive numbers, one per data set. `starts`: samples that each has given before. Pure.
    """

    weights: tuple[float, ...]
    seed: int
    first: int
    starts: tuple[int, ...]
    _blocks: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.weights) == len(self.starts) > 0
        assert min(self.weights) > 0
        object.__setattr__(self, "_blocks", lru_cache(maxsize=8)(self._make_block))

    @classmethod
    def fresh(cls, weights: Sequence[float], seed: int) -> Segment:
        """The segment of a new run."""
        return cls(tuple(weights), seed, 0, (0,) * len(weights))

    def locate(self, index: int) -> tuple[int, int]:
        """Data set of global sample `index` >= `first`, and the sample's number within it."""
        block, place = divmod(index - self.first, BLOCK)
        assert block >= 0
        sources, numbers = self._blocks(block)
        return int(sources[place]), self.starts[sources[place]] + int(numbers[place])

    def given(self, end: int) -> list[int]:
        """Samples that each data set has given before global sample `end` >= `first`, including earlier segments."""
        block, place = divmod(end - self.first, BLOCK)
        assert block >= 0
        counts = self._given(block * BLOCK) + np.bincount(self._blocks(block)[0][:place], minlength=len(self.weights))
        return [start + int(count) for start, count in zip(self.starts, counts)]

    def _given(self, n: int) -> NDArray[np.int64]:
        """Samples that each data set has given after `n` of this segment."""
        # Rounding may move n by half a sample per data set, so start that much lower.
        weights = shares(self.weights)
        margin = np.ceil(weights * len(weights) / 2) + 1
        counts = np.maximum(np.floor(weights * n - margin), 0).astype(np.int64)
        for _ in range(n - int(counts.sum())):
            counts[np.argmin((counts + 0.5) / weights)] += 1
        return counts

    def _make_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sample of a block its data set, and how many samples of that set precede it in this segment."""
        before, after = self._given(block * BLOCK), self._given((block + 1) * BLOCK)
        sources = np.repeat(np.arange(len(self.weights)), after - before)
        key = np.array([self.seed & (2**64 - 1), block], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=key)).shuffle(sources)
        numbers = np.empty(BLOCK, np.int64)
        for k in range(len(self.weights)):
            chosen = sources == k
            numbers[chosen] = before[k] + np.arange(chosen.sum())
        return sources, numbers

    def __reduce__(self) -> tuple[Any, ...]:  # loader processes make their own cache of blocks
        return type(self), (self.weights, self.seed, self.first, self.starts)


@dataclass(frozen=True)
class Blend:
    """`datasets` blended by `segment`. Samples of text sources are read in order alone (`text_stream`), and those of
    prompts are texts that a model makes."""

    datasets: Sequence[PackedDataset | TextSource | PromptSource]
    segment: Segment

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Global sample `index`, int64 `[seq_length + 1]`. Raises DataError."""
        packed, number = self._locate(index)
        return packed[number]

    def parts(self, index: int) -> list[NDArray[Any]]:
        """The pieces of documents that global sample `index` consists of. Raises DataError."""
        packed, number = self._locate(index)
        return packed.parts(number)

    @property
    def is_remote(self) -> bool:
        """Whether some data set is in object storage."""
        return any(isinstance(x, PackedDataset) and x.dataset.is_remote for x in self.datasets)

    @property
    def has_text(self) -> bool:
        """Whether some data set is tokenized while the run trains."""
        return any(isinstance(x, TextSource) for x in self.datasets)

    def fetch_ahead(self, index: int) -> None:
        """Begin to download what `parts` of global sample `index` will read. Raises DataError."""
        packed, number = self._locate(index)
        packed.fetch_ahead(number)

    def _locate(self, index: int) -> tuple[PackedDataset, int]:
        source, number = self.segment.locate(index)
        packed = self.datasets[source]
        assert not isinstance(packed, TextSource | PromptSource)
        return packed, number
