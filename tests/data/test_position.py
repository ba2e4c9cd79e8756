"""Samples of another length within an epoch: every token is predicted as often as without a change."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.data.packing import PackingName
from megafp8.data.samples import PackedDataset, SamplePosition
from tests.data.datasets import write_dataset

SEED = 5


def labels(packed: PackedDataset, sample: int, *, of_parts: bool) -> list[int]:
    """The tokens that a sample has as labels: all but the first, of the sample or of each of its parts."""
    parts = [part.tolist() for part in packed.parts(sample)]
    assert sum(map(len, parts)) <= packed.seq_length + 1
    if of_parts:
        return [x for part in parts for x in part[1:]]
    return [x for part in parts for x in part][1:]


class Reader:
    """A data set of tokens that are all different, whose samples are read with changes of their length."""

    def __init__(self, folder: Path, rng: np.random.Generator, packing: PackingName, *, context: bool) -> None:
        ends = np.cumsum(rng.integers(1, 60, int(rng.integers(20, 60)))).tolist()
        self.documents = [list(range(a, b)) for a, b in zip([0, *ends], ends)]
        self.dataset = write_dataset(folder / "tokens", self.documents)
        self.options: dict[str, Any] = {"cache_dir": folder / "cache", "packing": packing, "context": context}
        self.context, self.position, self.count = context, SamplePosition(), 0
        self.read: list[Counter[int]] = []
        """How often each token was predicted, by epoch."""

    def with_length(self, length: int) -> PackedDataset:
        packed = PackedDataset(self.dataset, range(len(self.documents)), length, SEED, **self.options)
        return packed.at(self.position)

    def go_on(self, length: int, samples: int) -> None:
        """Read `samples` samples, after which the length changes."""
        packed = self.with_length(length)
        copy = pickle.loads(pickle.dumps(packed))
        for sample in range(self.count, self.count + samples):
            epoch = int(packed.epochs(sample))
            self.read += [Counter() for _ in range(epoch + 1 - len(self.read))]
            found = labels(packed, sample, of_parts=self.context)
            assert found == labels(copy, sample, of_parts=self.context)
            self.read[epoch].update(found)
        self.count += samples
        self.position = packed.position_after(self.count)

    @property
    def all_labels(self) -> set[int]:
        return {x for document in self.documents for x in document[1 if self.context else 0 :]}


@pytest.mark.parametrize(
    ("packing", "context"),
    [pytest.param("concatenate", False, marks=pytest.mark.slow), ("concatenate", True), ("best_fit", True)],
)
def test_each_token_is_predicted_once_an_epoch(tmp_path: Path, packing: PackingName, context: bool) -> None:
    """Ten data sets, of which the length changes at random some six times in two to three epochs."""
    changes = 0
    for number in range(10):
        rng = np.random.default_rng(number)
        reader, legs = Reader(tmp_path / str(number), rng, packing, context=context), Counter[int]()
        while len(reader.read) < 4:
            length = int(rng.choice([3, 4, 8, 16, 31, 64]))
            longest = reader.with_length(length).samples_per_epoch
            reader.go_on(length, int(rng.integers(0, longest)))
            legs[len(reader.read) - 1] += 1
            changes += 1
            assert changes < 1000, "epochs do not end"
        for epoch, read in enumerate(reader.read[:-1]):
            missing = reader.all_labels - read.keys()
            assert max(read.values()) == 1, "a token was given twice"
            assert read.keys() <= reader.all_labels
            # A stream's first token has nothing before it, and what is less than a sample ends an epoch.
            allowed = 0 if packing == "best_fit" else 64 + legs[epoch] + legs[epoch - 1] + 1
            assert len(missing) <= allowed, f"{len(missing)} tokens of epoch {epoch} were skipped"
    print(f"{changes} changes")


def test_without_a_change_nothing_is_different(tmp_path: Path) -> None:
    reader = Reader(tmp_path, np.random.default_rng(1), "concatenate", context=False)
    packed = reader.with_length(8)
    spe = packed.samples_per_epoch
    assert packed.position_after(2 * spe) == SamplePosition(2 * spe, 2)
    assert packed.position_after(2 * spe + 3) == SamplePosition(2 * spe + 3, 2, ((8, 3, False),))
    assert packed.epochs(spe // 2) == spe // 2 / spe
    later = packed.at(SamplePosition(2 * spe, 2))
    assert all((later[i] == packed[i]).all() for i in range(2 * spe, 3 * spe))
    # A length that is changed and, before a sample was read, changed back, leaves the rest of the epoch.
    there = reader.with_length(16).at(packed.position_after(3)).position_after(3)
    assert there == SamplePosition(3, 0, ((8, 3, False),))
