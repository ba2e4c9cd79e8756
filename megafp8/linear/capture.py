"""CUDA graphs: what records work of the device, and replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Capture(Protocol):
    """Records `work` without running it, and returns what replays it, one recording at a time.

    Every replay returns the same object, whose tensors it has overwritten.
    """

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]: ...


class CudaCapture:
    """Records into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do, such as a loader that pins memory or the watchdog of a process group,
        # need not break a capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> T:
            graph.replay()
            return result

        return replay
