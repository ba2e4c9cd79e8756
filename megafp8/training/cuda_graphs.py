"""Micro-batches replayed from CUDA graphs, for models whose kernels finish before the host has launched the next.

Forward and backward of a layer are some forty launches, ten to thirty microseconds of the host each. A layer of hidden
size 4096 on 8192 tokens keeps the GPU busy for longer than that, one of 2048 on 2048 tokens does not. A CUDA graph
records such launches; replaying it is one call, however many they are.

*Recorded* is a whole micro-batch: forward, backward and accumulation into the fp32 gradient buffer. The first one of a
step also quantizes the weights and later ones reuse the copies, so there are two graphs. They never run at once and
share a memory pool, in which the second reuses all memory of the first but the weights' FP8 copies.

*Not recorded* is communication: no rank can replay what another does not, no communicator outlives a graph. So a
stage has to be the whole model, its layers and sequences unsharded (`parallel.tensor` = `parallel.pipeline` =
`parallel.context` = 1), which suits models this small. Over data parallelism gradients are reduced as ever: where that
overlaps with the last backward pass of a step, the last micro-batch runs eagerly; without overlap it is replayed too.
Optimizer, end of step and evaluation are eager.

*Addresses and host-side numbers are part of a graph*, so these must not change:

- inputs are copied into fixed buffers before each replay; where a batch has more documents than there is room for,
  graphs are captured anew
- parameters, sums of gradients, scales and amaxes are updated in place
- FP8 weights belong to the graph that quantizes them; layers get them back after its replay, for micro-batches that run
  eagerly in the same step
- steps that the FP8 report samples, which the host decides, run eagerly
- static scaling calibrates in high precision first, and capture waits for the end of that
- stochastic rounding is keyed by numbers of the host: refused by the config checks
- dropout, which would need random numbers of torch's generator, does not exist here

The first steps run eagerly because compiling kernels, timing algorithms and creating library handles cannot happen
during a capture. Autograd's leaf nodes remember the stream on which they were created; they are freed with each
micro-batch's graph, so a capture, which runs on a stream of its own, creates them anew.

*Cost:* memory. The pool holds the activations of a micro-batch permanently, beside what eager micro-batches and
evaluation need from the ordinary pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.fp8 import Fp8Manager
from megafp8.fp8.tensor import QuantizedTensor

logger = logging.getLogger(__name__)
EAGER_STEPS = 2
"""The first compiles every kernel; in the second all memory is allocated, that of the optimizer's state included."""


class Captured(NamedTuple):
    """Recorded work on fixed memory: `replay` runs it again, and `result` then has its result."""

    replay: Callable[[], None]
    result: Tensor


class Capture(Protocol):
    """Records `work` without running it. Recordings are replayed one after the other."""

    def __call__(self, work: Callable[[], Tensor]) -> Captured: ...


class CudaCapture:
    """Records into CUDA graphs that share one memory pool, in which referenced tensors are not overwritten."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # What other threads do, such as a loader that pins memory, need not break a capture on a stream of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return Captured(graph.replay, result)


class MicrobatchGraphs:
    """The micro-batches of a rank, captured after `eager_steps` steps and replayed from there on.

    `fp8`: the manager of the layers that run. A step is `begin_step` and then, if `ready`, `run` for its micro-batches,
    beginning with the first.
    """

    def __init__(
        self,
        fp8: Fp8Manager,
        device: torch.device,
        *,
        eager_steps: int = EAGER_STEPS,
        capture: Capture | None = None,
    ) -> None:
        self.fp8, self.device = fp8, device
        self.ready = False
        self._eager_steps = eager_steps
        self._capture = CudaCapture() if capture is None else capture
        self._inputs: list[Tensor | None] | None = None
        self._first: Captured | None = None
        self._later: Captured | None = None
        self._weights: list[QuantizedTensor | None] = []  # FP8 copies in the memory of `_first`

    def restart(self, why: str) -> None:
        """Run the next step eagerly and capture anew after it, since inputs get another shape."""
        self._eager_steps = max(self._eager_steps, 1)
        if self._first is not None:
            logger.info(f"CUDA graph: {why}; captured anew after the next step")
        self._inputs = self._first = self._later = None
        self._weights = []

    def begin_step(self) -> None:
        """Begin a step."""
        self.ready = self._eager_steps == 0
        self._eager_steps = max(0, self._eager_steps - 1)

    def run(self, work: Callable[..., Tensor], inputs: Sequence[Tensor | None], *, first: bool) -> Tensor:
        """`work(*inputs)` for a micro-batch, the `first` of its step or a later one.

        `work`, the same at every call, does forward and backward without waiting for the device and gives back one
        tensor. That lies in the graph's memory: read or copy it before the next call. `inputs` always have the same
        shapes and dtypes; from pinned memory they are copied without waiting.
        """
        self._copy(inputs)
        if first:
            if self._first is None:
                self.fp8.forget_weights()  # an evaluation may have quantized them; the graph does so itself
                self._first = self._captured(work, "the first micro-batch of a step")
                self._weights = self.fp8.weight_copies()
            self._first.replay()
            self.fp8.restore_weight_copies(self._weights)
            return self._first.result
        if self._later is None:
            self._later = self._captured(work, "later micro-batches")
        self._later.replay()
        return self._later.result

    def _copy(self, inputs: Sequence[Tensor | None]) -> None:
        if self._inputs is None:
            self._inputs = [None if x is None else torch.empty_like(x, device=self.device) for x in inputs]
        for buffer, x in zip(self._inputs, inputs, strict=True):
            if buffer is None or x is None:
                assert buffer is x, "an optional input was given once and missing once"
                continue
            assert buffer.shape == x.shape, f"an input of {tuple(x.shape)} for a graph of {tuple(buffer.shape)}"
            buffer.copy_(x, non_blocking=True)

    def _captured(self, work: Callable[..., Tensor], what: str) -> Captured:
        assert self._inputs is not None
        inputs, start = self._inputs, time.perf_counter()
        captured = self._capture(lambda: work(*inputs))
        logger.info(f"CUDA graph: captured {what} in {time.perf_counter() - start:.2f} s; replayed from here on")
        return captured
