"""The stateless sampler: a step's samples do not depend on the ranks, and a resumed stream continues exactly."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data import DataError
from megafp8.data.blend import Blend, Segment
from megafp8.data.sampler import _Samples, batches, sample_indices
from megafp8.data.samples import PackedDataset
from megafp8.objectives.next_token import NextToken
from megafp8.replicas import share
from tests.data.datasets import write_dataset

small = st.integers(1, 4)


@given(consumed=st.integers(0, 10**12), micro=small, dp=small, count=small)
def test_ranks_share_a_step_between_them(consumed: int, micro: int, dp: int, count: int) -> None:
    total = micro * dp * count
    ranks = [sample_indices(consumed, total, micro, rank, dp) for rank in range(dp)]
    assert sorted(i for rank in ranks for rows in rank for i in rows) == list(range(consumed, consumed + total))
    alone = sample_indices(consumed, total, micro, 0, 1)
    interleaved = [rank[m] for m in range(count) for rank in ranks]
    assert interleaved == alone, "micro-batches hold other samples under data parallelism"
    for members in range(1, count + 1):  # replicas have shares of each rank's micro-batches
        shares = [share(count, members, member) for member in range(members)]
        parts = [sample_indices(consumed, total, micro, 0, dp, own) for own in shares]
        assert [rows for part in parts for rows in part] == ranks[0]


class Numbers:
    """Sample i is 10 i, 10 i + 1, ...; from 20 on they cannot be read."""

    is_remote = False

    def parts(self, index: int) -> Any:
        if index >= 20:
            raise DataError(f"x.bin: sample {index} holds token -1")
        return [np.arange(5) + 10 * index]


def stream(consumed: int, workers: int, rank: int = 0, dp: int = 1) -> Any:
    return batches(
        Numbers(),  # type: ignore[arg-type]
        consumed_samples=consumed,
        global_batch_size=4,
        micro_batch_size=1,
        data_parallel_rank=rank,
        data_parallel_size=dp,
        num_workers=workers,
        objective=NextToken(seq_length=4),
        pin_memory=False,
    )


def firsts(steps: Any, count: int) -> list[list[int]]:
    return [[int(batch.tokens[0, 0]) // 10 for batch in step] for step in itertools.islice(steps, count)]


def test_a_resumed_stream_goes_on() -> None:
    whole = firsts(stream(0, 0), 5)
    assert whole == [[4 * step + i for i in range(4)] for step in range(5)]
    assert firsts(stream(8, 0), 3) == whole[2:]
    assert firsts(stream(8, 0, rank=1, dp=2), 2) == [[9, 11], [13, 15]]


@pytest.mark.parametrize("workers", [1, 0])
def test_loader_processes_change_nothing(workers: int) -> None:
    """An error neither: it comes in the step that would use the sample, with its own message."""
    steps = stream(4, workers)
    assert firsts(steps, 4) == [[4 + 4 * step + i for i in range(4)] for step in range(4)]
    with pytest.raises(DataError) as error:
        next(steps)
    assert str(error.value) == "x.bin: sample 20 holds token -1"


def test_files_that_a_loader_process_cannot_open(tmp_path: Path) -> None:
    """They may have been moved since the run began: an evaluation starts loader processes of its own."""
    samples = PackedDataset(write_dataset(tmp_path / "x", [range(50)]), range(1), 4, 0, tmp_path)
    sent = pickle.dumps(_Samples(Blend([samples], Segment.fresh([1], 0)), NextToken(seq_length=4)))
    index, tokens = pickle.loads(sent)[7]
    assert index == 7
    assert np.array_equal(tokens, samples[7])
    (tmp_path / "x.bin").unlink()
    error = pickle.loads(sent)[0]
    assert isinstance(error, DataError)
    assert "x.bin is missing" in str(error)


def test_labels_are_the_next_tokens() -> None:
    (batch, *_) = next(stream(3, 0))
    assert batch.tokens.tolist() == [[30, 31, 32, 33]]
    assert batch.labels.tolist() == [[31, 32, 33, 34]]
    assert batch.samples.tolist() == [3]
    assert batch.tokens.dtype == torch.int64
