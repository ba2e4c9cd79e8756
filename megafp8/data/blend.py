"""A weighted mix of data sets, without state and without an index.

Sample j of data set k, of weight w, is due at the time (j + 1/2) / w, and samples are given in the order of their times
(Webster's method of apportionment). So the shares are kept at any moment, a data set never takes a sample back however
small its weight, and the counts after n samples follow from n alone. Samples come in blocks; within a block their order
is shuffled by (seed, block). So which data set sample i comes from, and which of its samples, costs one small
permutation, and each data set's own samples are used in order, none twice and none left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megafp8.data.samples import PackedDataset

BLOCK = 1024


class Blend:
    """`datasets` mixed by `weights` (any positive numbers)."""

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[float], seed: int) -> None:
        assert len(datasets) == len(weights) > 0
        assert min(weights) > 0
        self.datasets, self.seed = list(datasets), seed
        self._weights = np.asarray(weights, np.float64) / float(np.sum(weights))
        self._block = lru_cache(maxsize=8)(self._make_block)

    def _given(self, n: int) -> NDArray[np.int64]:
        """Samples that each data set has given after `n` in all."""
        # Rounding n's shares may be off by half a sample for each data set, so time n by as many: start surely below.
        margin = np.ceil(self._weights * len(self.datasets) / 2) + 1
        counts = np.maximum(np.floor(self._weights * n - margin), 0).astype(np.int64)
        for _ in range(n - int(counts.sum())):
            counts[np.argmin((counts + 0.5) / self._weights)] += 1
        return counts

    def _make_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sample of a block its data set and the index in it."""
        before, after = self._given(block * BLOCK), self._given((block + 1) * BLOCK)
        sources = np.repeat(np.arange(len(self.datasets)), after - before)
        np.random.Generator(np.random.Philox(key=np.array([self.seed & (2**64 - 1), block], dtype=np.uint64))).shuffle(
            sources
        )
        indices = np.empty(BLOCK, np.int64)
        for k in range(len(self.datasets)):
            own = sources == k
            indices[own] = before[k] + np.arange(own.sum())
        return sources, indices

    def locate(self, index: int) -> tuple[int, int]:
        """Data set of sample `index`, and the sample's index within it."""
        block, place = divmod(index, BLOCK)
        sources, indices = self._block(block)
        return int(sources[place]), int(indices[place])

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        source, own = self.locate(index)
        return self.datasets[source][own]

    def __getstate__(self) -> dict[str, object]:  # loader processes: the cache of blocks is not sent along
        return {"datasets": self.datasets, "seed": self.seed, "_weights": self._weights}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._block = lru_cache(maxsize=8)(self._make_block)
