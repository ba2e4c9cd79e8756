"""Stop signals and garbage collection of a training process."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megafp8.data.blend import Blend, Segment
from megafp8.data.sampler import Parts, batches
from megafp8.data.samples import PackedDataset
from megafp8.objectives.next_token import NextToken
from megafp8.training import process
from megafp8.training.process import StoppedWaiting, StopRequest, answering_stop, garbage_collected_after_steps
from tests.data.datasets import write_dataset


@contextlib.contextmanager
def asked_to_stop(wait_seconds: float) -> Iterator[StopRequest]:
    """Send SIGTERM to this process in a moment, to a stop request that waits `wait_seconds` for data."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD)
    }
    request, others = StopRequest(), multiprocessing.active_children()  # ranks of tests, which a real process has not
    patch = pytest.MonkeyPatch()
    patch.setattr(process, "WAIT_SECONDS", wait_seconds)
    patch.setattr(process, "_installed", None)
    patch.setattr(process, "active_children", lambda: [x for x in multiprocessing.active_children() if x not in others])
    request.install()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield request
    finally:
        timer.join()
        patch.undo()
        for number, handler in before.items():
            signal.signal(number, handler)


def _blocked() -> Iterator[int]:
    yield 1
    queue.SimpleQueue[int]().get()


def test_a_stop_ends_a_wait_for_data_that_do_not_come() -> None:
    """In the time that a user waits before the next signal, whether the signal comes before the wait or in it."""
    assert 0 < process.WAIT_SECONDS + 1 < 5
    for before_wait in (False, True):
        with asked_to_stop(0.3) as request:
            stream = answering_stop(_blocked())
            assert next(stream) == 1
            while before_wait and request.signal is None:
                time.sleep(0.05)
            began = time.monotonic()
            with pytest.raises(StoppedWaiting, match="stopped by SIGTERM while it waited for data"):
                next(stream)
            assert time.monotonic() - began < 5


class Hanging(NextToken):
    """Objective that makes no sample, as if a file system did not answer."""

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        time.sleep(1000)
        return super().row(parts, index)


@pytest.mark.slow
def test_a_stop_ends_loader_processes_that_hang(tmp_path: Path) -> None:
    packed = PackedDataset(write_dataset(tmp_path / "t", [range(40)] * 20), range(20), 16, 1, tmp_path)
    objective = Hanging(16, reset_at_documents=False, mask_eod_loss=False)
    stream = batches(
        Blend([packed], Segment.fresh([1.0], 1)), consumed_samples=0, global_batch_size=2, micro_batch_size=1,
        data_parallel_rank=0, data_parallel_size=1, num_workers=2, objective=objective, pin_memory=False,
    )  # fmt: skip
    before, began = set(multiprocessing.active_children()), time.monotonic()
    with asked_to_stop(0.3), pytest.raises(StoppedWaiting):
        next(answering_stop(stream))
    del stream
    gc.collect()
    assert set(multiprocessing.active_children()) <= before
    assert time.monotonic() - began < 5


def test_a_stop_leaves_data_that_come_in_time() -> None:
    def slow() -> Iterator[int]:
        for i in range(3):
            time.sleep(0.3)
            yield i

    with asked_to_stop(10) as request:
        assert list(answering_stop(slow())) == [0, 1, 2]
        assert request.signal == signal.SIGTERM
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


class Node:
    """An object in a reference cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_after_every_interval_and_never_between() -> None:
    with garbage_collected_after_steps(3) as after_step:
        assert not gc.isenabled()
        gone = weakref.ref(Node())
        junk = [[] for _ in range(100_000)]  # enough for the collector to run, if it did so by itself
        for step in (1, 2):
            after_step(step)
            assert gone() is not None
        after_step(3)
        assert gone() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert len(junk) == 100_000


def test_automatic_collection_is_left_or_restored() -> None:
    with garbage_collected_after_steps(0) as after_step:
        assert gc.isenabled()
        after_step(100)
    with pytest.raises(KeyError), garbage_collected_after_steps(1):
        raise KeyError
    assert gc.isenabled()
