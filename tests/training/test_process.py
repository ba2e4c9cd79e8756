"""Garbage collection of a training process."""

from __future__ import annotations

import gc
import weakref

import pytest

from megafp8.training.process import garbage_collected_after_steps


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
