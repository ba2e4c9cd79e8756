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
  before it was recorded, and for all rows that can occur if the GPU has the memory. If there are still more rows, the
  results of the replay are discarded and a graph with more room is recorded (`megafp8.layers.experts.own_rows`).
- Dropout masks are a function of the samples' indices in the run, which are tensors of the micro-batch.
- Exchanges through symmetric memory alternate between two buffers and assume that consecutive exchanges use different
  buffers. The last exchange of a replay and the first exchange of the next replay may use the same buffer. This is
  safe, because the all-reduce of losses over the ranks of a model comes between them, and each rank must have finished
  the replay before it.

The first steps run eagerly, because compiling kernels, timing algorithms, opening connections and creating library
handles cannot happen during a capture. Autograd's leaf nodes remember the stream on which they were created. They are
freed with each step, so a capture, which runs on a separate stream, creates new leaf nodes.

*Many micro-batches.* The driver holds every recorded launch in device memory, and recording takes as long as an eager
step. A graph of 64 micro-batches of Qwen3-30B-A3B (48 layers) does not fit beside the model. If a step has more than
`MOST_BLOCKS` blocks, counted in each micro-batch, it is therefore recorded in three parts: its first two micro-batches,
two micro-batches in the middle, which are replayed as often as needed, and the last ones, whose backward passes reduce
the gradients. An evaluation is divided likewise. No activation may be alive between two parts, so pipelines have one
graph.

*Memory.* All graphs share one memory pool, because they never run at the same time. The pool permanently holds the peak
memory of an eager step. Before anything runs eagerly, the graphs are dropped and their memory is freed, so a rank never
holds both.

A graph holds its communicators, so drop the graphs before the process groups are destroyed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.config import checks as config_checks
from megafp8.linear.capture import Capture, CudaCapture
from megafp8.training import fp8_config

logger = logging.getLogger(__name__)
MOST_BLOCKS = 512
"""Largest number of blocks, counted in each micro-batch, of a step that is recorded in one graph."""
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


def usable_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that torch's allocator can use, less 3% for errors of a prediction.

    CUDA's context, NCCL's buffers and other processes use the rest.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(0.97 * total) - others


@dataclass(frozen=True)
class Part(Generic[T]):
    """Part of the work of a step, recorded in its own graph.

    Args:
        name: Name of the part. Parts with equal names and shapes of micro-batches share a graph.
        work: Function from micro-batches on the device to tensors in any structure. Every call with the same name of
            work and part must pass the same function.
        microbatches: Micro-batches in host memory.
    """

    name: str
    work: Callable[[Sequence[Batch]], T]
    microbatches: Sequence[Batch]

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """Shapes of each micro-batch."""
        return tuple(batch.shape for batch in self.microbatches)


def in_parts(microbatches: Sequence[Batch], work: Callable[..., T]) -> list[Part[T]]:
    """Divide the micro-batches of a step, four or more, into parts of an even number. The last part may have one more.

    `work` takes micro-batches and the keywords `first` and `last`, which say whether they begin or end the step.
    """
    *pairs, last = [microbatches[i : i + 2] for i in range(0, len(microbatches) - 1, 2)]
    if len(microbatches) % 2:
        last = [*last, microbatches[-1]]
    first, *middle = pairs
    return [
        Part("first", partial(work, last=False), first),
        *[Part("middle", partial(work, first=False, last=False), pair) for pair in middle],
        Part("last", partial(work, first=False), last),
    ]


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

    def run(self, name: str, work: Callable[[Sequence[Batch]], T], microbatches: Sequence[Batch], **options: Any) -> T:
        """Run `work` on micro-batches and return its result. The arguments are those of `run_parts` and `Part`."""
        (result,) = self.run_parts(name, [Part("whole", work, microbatches)], **options)
        return result

    def run_parts(
        self,
        name: str,
        parts: Sequence[Part[T]],
        *,
        eager_runs: int = 1,
        before_capture: Callable[[], None] = lambda: None,
        capturing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[T]:
        """Run parts of work in turn and yield their results: all eagerly, or all by replaying graphs.

        The iterator does not wait for the device. The tensors that a replay returns are in the graph's memory: use or
        copy them before the next part or call.

        Args:
            name: Name of the kind of work.
            parts: Parts of the work.
            eager_runs: Number of eager runs before the capture. Runs with micro-batches of the same shapes count,
                whatever the number of micro-batches: they compile the same kernels.
            before_capture: Function that ends the work of other threads on the device, which could break a capture.
            capturing: Function that returns a context in which a capture runs.
        """
        kind = (name, frozenset(shapes for part in parts for shapes in part.shapes))
        eager = self._eager_runs.setdefault(kind, 0) < eager_runs
        if eager:
            self._eager_runs[kind] += 1
            self.drop()
        for part in parts:
            if eager:
                yield part.work([batch.to(self.device) for batch in part.microbatches])
                continue
            key = (name, part.name, part.shapes)
            if key not in self._inputs:
                self._inputs[key] = [
                    batch.map(lambda x: torch.empty_like(x, device=self.device)) for batch in part.microbatches
                ]
            for buffers, batch in zip(self._inputs[key], part.microbatches, strict=True):
                for buffer, x in zip(buffers.tensors, batch.tensors, strict=True):
                    buffer.copy_(x, non_blocking=True)
            if key not in self._replays:
                before_capture()
                with capturing():
                    self._replays[key] = self._record(name, part.work, self._inputs[key])
            yield self._replays[key]()

    def drop(self) -> None:
        """Free all graphs and their memory. Later steps capture new graphs."""
        self._replays.clear()
        self._inputs.clear()
        self._capture = None

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
