"""Forward and backward passes of a training step, recorded as a CUDA graph and replayed.

A layer's forward and backward are some forty kernels, and the host needs ten to thirty microseconds to launch one.
Small layers, small slices of large layers, and pipelines, where a late launch on one rank delays others, wait for that.
A CUDA graph records such launches; replaying it is one call, however many there are.

*Recorded* is everything from the zeroing of the gradients to their reduced sums: the gathering of weights under ZeRO,
all micro-batches in the order of the pipeline schedule, sends and receives, tensor- and context-parallel collectives,
copies by copy engines, deferred weight gradients, and the reduction of buckets beside the last backward pass. The graph
runs these as eagerly launched streams do: a collective on a stream of its own is a branch of the graph. So overlaps and
sums are those of an eager step, bit for bit, and so is the peak of memory.

*Not recorded* is what follows, queued behind the graph: norm, update, scales, and the sums of losses. Where ranks
depend on each other there is a collective in it, which the process group's watchdog times. It does not see collectives
in a graph, so without one a rank that hangs would never be noticed.

*Addresses and host-side numbers are part of a graph*, so these must not change:

- micro-batches are copied into fixed buffers before each replay; other shapes are another graph
- parameters, sums of gradients, scales and amaxes are updated in place
- a step that the FP8 report samples is another graph, which computes the statistics too, and so is the batch of an
  evaluation
- while static scaling calibrates, in high precision, everything is eager
- the noise of stochastic rounding is a function of the step and the micro-batch, which are tensors, too
- how many rows the experts of a rank have differs in every step: a graph has room for some more than were seen before
  it was recorded, and where there are still more its results are discarded (`megafp8.layers.experts.own_rows`)
- dropout's masks are a function of the samples' indices in the run, which are tensors of the micro-batch
- exchanges through symmetric memory alternate between two buffers and assume that consecutive ones differ. The last of
  a replay and the first of the next may share one: the all-reduce of losses over the ranks of a model, for which each
  must have finished the replay, is between them

The first steps run eagerly, because compiling kernels, timing algorithms, opening connections and creating library
handles cannot happen during a capture. Autograd's leaf nodes remember the stream on which they were created; they are
freed with each step, so a capture, which runs on a stream of its own, creates them anew.

*Memory.* Graphs have a pool of their own, which they share, as they never run at once. It holds permanently what an
eager step allocates at its peak. Before anything runs eagerly the graphs are dropped and their memory is freed, so a
rank never has both.

A graph holds its communicators: drop graphs before process groups are destroyed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.config import checks as config_checks
from megafp8.linear.capture import Capture, CudaCapture
from megafp8.training import fp8_config

logger = logging.getLogger(__name__)
EAGER_STEPS = 2
"""Steps before a capture: only from the second on do delayed scales exist, and are kernels compiled that use them."""

T = TypeVar("T")


def why_not(config: Config, device: str) -> str:
    """Why the steps of a run on `device`, cuda or cpu, are not replayed; empty where they are."""
    if config.training.cuda_graphs is False:
        return "training.cuda_graphs is false"
    if device != "cuda":
        return f"the device is {device}"
    problems = [*config_checks.cuda_graph_problems(config), *fp8_config.cuda_graph_problems(config)]
    return problems[0].rule if problems else ""


def describe(reason: str) -> str:
    """One line for the log, of what `why_not` returned."""
    return f"CUDA graphs: not used: {reason}" if reason else "CUDA graphs: forward and backward passes are replayed"


class Graphs:
    """Work of a rank that is repeated, such as the passes of a step: eager at first, then captured and replayed.

    All ranks run the same kinds of work in the same order.
    """

    def __init__(self, device: torch.device, *, new_capture: Callable[[], Capture] = CudaCapture) -> None:
        self.device, self._new_capture = device, new_capture
        self._eager_runs: dict[Hashable, int] = {}  # of each kind of work so far
        self._capture: Capture | None = None
        self._inputs: dict[Hashable, list[Batch]] = {}
        self._replays: dict[Hashable, Callable[[], Any]] = {}

    def run(
        self,
        name: str,
        work: Callable[[Sequence[Batch]], T],
        microbatches: Sequence[Batch],
        *,
        eager_runs: int = 1,
        before_capture: Callable[[], None] = lambda: None,
        capturing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """`work` on the device, of micro-batches in host memory, without waiting for the device.

        `work`, the same for one `name` at every call, returns tensors, in any structure. In a replay these lie in
        memory of the graph: use or copy them before the next call. The first `eager_runs` are eager. `before_capture`
        ends what other threads are doing with the device, which could break a capture, which runs within `capturing`.
        """
        kind = (name, tuple(x.shape for batch in microbatches for x in batch.tensors))
        if self._eager_runs.setdefault(kind, 0) < eager_runs:
            self._eager_runs[kind] += 1
            self.drop()
            return work([batch.to(self.device) for batch in microbatches])
        if kind not in self._inputs:
            on_device = [batch.map(lambda x: torch.empty_like(x, device=self.device)) for batch in microbatches]
            self._inputs[kind] = on_device
        for buffers, batch in zip(self._inputs[kind], microbatches, strict=True):
            for buffer, x in zip(buffers.tensors, batch.tensors, strict=True):
                buffer.copy_(x, non_blocking=True)
        if kind not in self._replays:
            before_capture()
            with capturing():
                self._replays[kind] = self._record(name, work, self._inputs[kind])
        return self._replays[kind]()

    def drop(self) -> None:
        """Free all graphs and their memory. Steps that follow are captured anew."""
        self._replays.clear()
        self._inputs.clear()
        self._capture = None

    def restart(self) -> None:
        """Free all graphs, and run everything eagerly first again."""
        self.drop()
        self._eager_runs.clear()

    def _record(self, name: str, work: Callable[[Sequence[Batch]], T], inputs: Sequence[Batch]) -> Callable[[], T]:
        if self._capture is None:
            self._capture = self._new_capture()
        start = time.perf_counter()
        try:
            replay = self._capture(lambda: work(inputs))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"recording a CUDA graph of a {name} failed ({error}); training.cuda_graphs=false trains without"
            ) from error
        logger.info(f"CUDA graphs: {name} recorded in {time.perf_counter() - start:.2f} s; replayed from here on")
        return replay
