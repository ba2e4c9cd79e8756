"""Forward and backward passes of a training step, recorded as a CUDA graph and replayed.

Problem: the forward and backward passes of a layer launch about forty kernels, and the host needs ten to thirty
microseconds per launch. The GPU waits for these launches if layers or a rank's slices of layers are small, and in
pipelines, where a late launch on one rank delays other ranks.

Idea: a CUDA graph records the launches. A replay is one call, whatever the number of launches.

*Recorded* is everything from the zeroing of the gradients to their reduced sums: the gathering of weights under ZeRO,
all micro-batches in the order of the pipeline schedule, sends and receives, tensor- and context-parallel collectives,
copies by copy engines, deferred weight gradients, and the reduction of buckets during the last backward pass. The graph
has the same parallelism as eagerly launched streams: a collective on a separate stream is a branch of the graph.
Overlaps, sums (bit for bit) and peak memory are therefore the same as in an eager step.

*Not recorded* is the rest of the step, which is queued behind the graph: gradient norm, update, scales, and the sums of
losses. If ranks depend on each other, this part contains a collective, and the process group's watchdog times it. The
watchdog does not see collectives in a graph, so without this collective it would never notice a rank that hangs.

*Addresses and host-side numbers are part of a graph*, so they must not change:

- Micro-batches are copied into fixed buffers before each replay. Batches with other shapes get another graph.
- Parameters, sums of gradients, scales and amaxes are updated in place.
- A step that the FP8 report samples has another graph, which also computes the statistics. Batches of an evaluation
  have another graph too.
- While static scaling calibrates in high precision, everything runs eagerly.
- The noise of stochastic rounding is a function of the step and the micro-batch, which are tensors.
- The number of rows of a rank's experts changes in every step. A graph has room for somewhat more rows than were seen
  before it was recorded. If there are still more rows, the results of the replay are discarded
  (`megafp8.layers.experts.own_rows`).
- Dropout masks are a function of the samples' indices in the run, which are tensors of the micro-batch.
- Exchanges through symmetric memory alternate between two buffers and assume that consecutive exchanges use different
  buffers. The last exchange of a replay and the first exchange of the next replay may use the same buffer. This is
  safe, because the all-reduce of losses over the ranks of a model comes between them, and each rank must have finished
  the replay before it.

The first steps run eagerly, because compiling kernels, timing algorithms, opening connections and creating library
handles cannot happen during a capture. Autograd's leaf nodes remember the stream on which they were created. They are
freed with each step, so a capture, which runs on a separate stream, creates new leaf nodes.

*Memory.* All graphs share one memory pool, because they never run at the same time. The pool permanently holds the peak
memory of an eager step. Before anything runs eagerly, the graphs are dropped and their memory is freed, so a rank never
holds both.

A graph holds its communicators, so drop the graphs before the process groups are destroyed.
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
"""Number of eager steps before a capture. Delayed scales, and the kernels that use them, exist from the second step."""

T = TypeVar("T")


def why_not(config: Config, device: str) -> str:
    """Return the reason why steps on `device` (cuda or cpu) are not replayed, or an empty text if they are."""
    if config.training.cuda_graphs is False:
        return "training.cuda_graphs is false"
    if device != "cuda":
        return f"the device is {device}"
    problems = [*config_checks.cuda_graph_problems(config), *fp8_config.cuda_graph_problems(config)]
    return problems[0].rule if problems else ""


def describe(reason: str) -> str:
    """Return a log line for the result of `why_not`."""
    return f"CUDA graphs: not used: {reason}" if reason else "CUDA graphs: forward and backward passes are replayed"


class Graphs:
    """CUDA graphs of a rank's repeated work, such as the passes of a step: first eager, then captured and replayed.

    All ranks must run the same kinds of work in the same order.
    """

    def __init__(self, device: torch.device, *, new_capture: Callable[[], Capture] = CudaCapture) -> None:
        self.device, self._new_capture = device, new_capture
        self._eager_runs: dict[Hashable, int] = {}  # number so far of each kind of work
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
        """Run `work` on micro-batches and return its result, eagerly or by replaying a graph.

        The call does not wait for the device. The tensors that a replay returns are in the graph's memory: use or copy
        them before the next call.

        Args:
            name: Name of the kind of work.
            work: Function from micro-batches on the device to tensors in any structure. Every call with the same
                `name` must pass the same function.
            microbatches: Micro-batches in host memory.
            eager_runs: Number of eager runs before the capture.
            before_capture: Function that ends the work of other threads on the device, which could break a capture.
            capturing: Function that returns a context in which the capture runs.
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
        """Free all graphs and their memory. Later steps capture new graphs."""
        self._replays.clear()
        self._inputs.clear()
        self._capture = None

    def restart(self) -> None:
        """Free all graphs, and repeat the eager runs before new captures."""
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
                f"recording a CUDA graph of a {name} failed ({error}); training.cuda_graphs=false trains without graphs"
            ) from error
        logger.info(f"CUDA graphs: {name} recorded in {time.perf_counter() - start:.2f} s; replayed from here on")
        return replay
