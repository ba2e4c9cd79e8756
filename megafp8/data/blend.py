"""Weighted blend of data sets that needs neither state nor an index file.

Sample j of a data set with weight w is due at time (j + 1/2) / w, and the blend takes samples in the order of their
times (Webster's method of apportionment). The number of samples taken from each data set therefore follows the weights
at any point, even for very small weights, and depends only on the total number of samples n. Within each block of
samples, the order is shuffled by (seed, block). Looking up a sample costs one small permutation. The samples of each
data set are used in order; none is repeated or left out.

When the data sets or weights of a run change, a new `Segment` starts at the current sample. The method starts over, and
each data set continues after the samples that the run has already taken from it.
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
    """Return `weights` divided by their sum. Pure."""
    normalized = np.asarray(weights, np.float64) / float(np.sum(weights))
    assert normalized.min() > 0, "a share is too small for a float; config.checks refuses such weights"
    return normalized


@dataclass(frozen=True)
class Segment:
    """Mapping of global sample numbers, from `first` on, to samples of data sets. Pure.

    Attributes:
        weights: Positive numbers, one per data set.
        seed: Seed of the shuffle within each block.
        first: Global number of the first sample of this segment.
        starts: Number of samples taken from each data set before this segment.
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
        """Return the segment that a new run starts with."""
        return cls(tuple(weights), seed, 0, (0,) * len(weights))

    def locate(self, index: int) -> tuple[int, int]:
        """Return the data set of global sample `index` >= `first`, and the sample's number within that data set."""
        block, place = divmod(index - self.first, BLOCK)
        assert block >= 0
        sources, numbers = self._blocks(block)
        return int(sources[place]), self.starts[sources[place]] + int(numbers[place])

    def given(self, end: int) -> list[int]:
        """Return how many samples each data set contributes before global sample `end`, including earlier segments."""
        block, place = divmod(end - self.first, BLOCK)
        assert block >= 0
        counts = self._given(block * BLOCK) + np.bincount(self._blocks(block)[0][:place], minlength=len(self.weights))
        return [start + int(count) for start, count in zip(self.starts, counts)]

    def _given(self, n: int) -> NDArray[np.int64]:
        """Return how many of the first `n` samples of this segment come from each data set."""
        # Rounding can shift each count by half a sample, so start below the result and add samples one by one.
        weights = shares(self.weights)
        margin = np.ceil(weights * len(weights) / 2) + 1
        counts = np.maximum(np.floor(weights * n - margin), 0).astype(np.int64)
        for _ in range(n - int(counts.sum())):
            counts[np.argmin((counts + 0.5) / weights)] += 1
        return counts

    def _make_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's data set, and the number of samples of that set before it in this segment."""
        before, after = self._given(block * BLOCK), self._given((block + 1) * BLOCK)
        sources = np.repeat(np.arange(len(self.weights)), after - before)
        key = np.array([self.seed & (2**64 - 1), block], dtype=np.uint64)
        np.random.Generator(np.random.Philox(key=key)).shuffle(sources)
        numbers = np.empty(BLOCK, np.int64)
        for k in range(len(self.weights)):
            chosen = sources == k
            numbers[chosen] = before[k] + np.arange(chosen.sum())
        return sources, numbers

    def __reduce__(self) -> tuple[Any, ...]:  # without the block cache: each loader process makes a new one
        return type(self), (self.weights, self.seed, self.first, self.starts)


@dataclass(frozen=True)
class Blend:
    """Data sets that are blended by a segment.

    Only packed data sets can be indexed here. `text_stream` reads the samples of text sources in order, and the samples
    of a prompt source are texts that a model generates.
    """

    datasets: Sequence[PackedDataset | TextSource | PromptSource]
    segment: Segment

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return global sample `index`, int64 `[seq_length + 1]`. Raises DataError."""
        packed, number = self._locate(index)
        return packed[number]

    def parts(self, index: int) -> list[NDArray[Any]]:
        """Return the parts of documents that make up global sample `index`. Raises DataError."""
        packed, number = self._locate(index)
        return packed.parts(number)

    def document_lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each document, or part of one, in global sample `index`. Raises DataError."""
        packed, number = self._locate(index)
        return packed.document_lengths(number)

    @property
    def is_remote(self) -> bool:
        """Whether at least one data set is in object storage."""
        return any(isinstance(x, PackedDataset) and x.dataset.is_remote for x in self.datasets)

    @property
    def has_text(self) -> bool:
        """Whether at least one data set is tokenized during training."""
        return any(isinstance(x, TextSource) for x in self.datasets)

    def fetch_ahead(self, index: int) -> None:
        """Start to download the data that `parts(index)` will read. Raises DataError."""
        packed, number = self._locate(index)
        packed.fetch_ahead(number)

    def _locate(self, index: int) -> tuple[PackedDataset, int]:
        source, number = self.segment.locate(index)
        packed = self.datasets[source]
        assert not isinstance(packed, TextSource | PromptSource)
        return packed, number
