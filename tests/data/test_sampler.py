"""The stateless sampler: a step's samples do not depend on the ranks, and a resumed stream continues exactly."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megafp8.data import DataError
from megafp8.data.blend import Blend, Segment
from megafp8.data.loader_processes import describe_overload, start_server
from megafp8.data.packing import BestFit
from megafp8.data.sampler import _Samples, balanced_order, batches, sample_indices
from megafp8.data.samples import PackedDataset
from megafp8.host.processes import process_start
from megafp8.objectives.next_token import NextToken
from megafp8.parallel.replicas import share
from megafp8.prove.local_ranks import RanksFailed
from tests.data.datasets import write_dataset
from tests.world import World

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
        assert [part[i] for i in range(-(-count // members)) for part in parts if i < len(part)] == ranks[0]


def waiting(costs: NDArray[np.float64]) -> tuple[float, float]:
    """Time of the slowest rank beyond the mean, if ranks wait in each step and in each micro-batch `[m, r]`."""
    mean = costs.sum() / costs.shape[1]
    return costs.sum(0).max() - mean, costs.max(1).sum() - mean


def test_balanced_ranks_wait_less_than_in_the_order_of_best_fit() -> None:
    """Log-normal lengths as of documents with 4k tokens on average and at most 131k, in units of 64 tokens."""
    totals, s = np.zeros((2, 2)), 2048
    for seed in range(200):
        rng = np.random.default_rng(seed)
        packing = BestFit(np.clip(rng.lognormal(np.log(64) - 1.125, 1.5, 2500), 2, s).astype(np.int64), s)
        index, micro = packing.make_index(rng), int(rng.integers(1, 3))
        spans = [[span.length for span in packing.spans(index, place)] for place in range(64)]
        costs = np.array([sum(n * n for n in [*x, s + 1 - sum(x)]) + 8.0 * s * s for x in spans])
        order = balanced_order(costs.tolist(), micro)
        assert sorted(order) == list(range(64))
        for ranks in (2, 4, 8, 16, 32):
            before, after = (waiting(x.reshape(-1, micro).sum(1).reshape(-1, ranks)) for x in (costs, costs[order]))
            assert after[1] <= before[1] * (1 + 1e-9), (seed, ranks)
            assert after[0] <= max(before[0], 0.02 * costs.sum() / ranks), "a random order is rarely better, by little"
            totals += [before, after]
    assert (totals[1] < totals[0] / 3).all()


def test_micro_batches_of_a_balanced_order_have_consecutive_costs_in_alternating_directions() -> None:
    assert balanced_order(range(8), 1) == [0, 1, 3, 2, 7, 6, 4, 5]
    assert balanced_order([5, 9, 7], 1) == [0, 2, 1]
    assert [sorted(balanced_order([1, 2, 3, 4, 5, 6], 2)[i : i + 2]) for i in (0, 2, 4)] == [[0, 5], [1, 4], [2, 3]]


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


def read_all(workers: int) -> None:
    """Read the samples that can be read; the error of the others comes in the step that would use them."""
    steps = stream(4, workers)
    assert firsts(steps, 4) == [[4 + 4 * step + i for i in range(4)] for step in range(4)]
    with pytest.raises(DataError) as error:
        next(steps)
    assert str(error.value) == "x.bin: sample 20 holds token -1"


def test_reading_in_this_process() -> None:
    read_all(0)


def _read_by_a_loader_process(folder: Path) -> None:
    """Read by a loader process, describe it in `folder`, and die by SIGKILL."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have children
    start_server()
    read_all(1)
    (loader,) = multiprocessing.active_children()
    for name in ("cmdline", "status"):
        (folder / name).write_text(Path(f"/proc/{loader.pid}/{name}").read_text())
    (folder / "pid").write_text(str(loader.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_process_is_a_fork_that_leaves_signals_to_its_trainer_and_ends_with_it(
    world2: World, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed, match="process died, exit code -9"):
        world2.run(_read_by_a_loader_process, tmp_path, ranks=1)
    assert "multiprocessing.forkserver" in (tmp_path / "cmdline").read_text()
    blocked = int((tmp_path / "status").read_text().partition("SigBlk:")[2].split()[0], 16)
    assert all(blocked & 1 << number - 1 for number in (signal.SIGINT, signal.SIGTERM))
    deadline = time.monotonic() + 10
    while process_start((tmp_path / "pid").read_text()) is not None:
        assert time.monotonic() < deadline, "the loader process outlives its trainer"
        time.sleep(0.05)


def test_more_loader_processes_than_cores() -> None:
    with mock.patch.object(os, "sched_getaffinity", return_value={0, 1, 2, 3}):
        assert describe_overload(2, 2) is None
        assert describe_overload(3, 2) == (
            "data.num_workers = 3: the ranks on this host start 6 processes that load data, but can use only 4 cores; "
            "try data.num_workers=1 (0 loads in the training process)"
        )
        assert "try data.num_workers=0 (" in str(describe_overload(1, 8))


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
