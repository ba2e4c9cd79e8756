"""CUDA graphs that record work of the device and replay it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Capture(Protocol):
    """Recorder that records `work` without running it, and returns a function that replays it.

    Only one recording may run at a time. Every replay returns the same object, with overwritten tensors.
    """

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        """Record `work` and return a function that replays it."""
        ...


class CudaCapture:
    """Recorder into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        """Record `work` into a CUDA graph and return a function that replays it."""
        gc.collect()  # garbage in cycles, such as a caught exception's frames, can hold leaf nodes of an eager step
        graph = torch.cuda.CUDAGraph()
        # thread_local: work of other threads, such as a loader that pins memory or a process group's watchdog, must
        # not break a capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> T:
            graph.replay()
            return result

        return replay
