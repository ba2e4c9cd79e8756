"""Micro-batches replayed from CUDA graphs: for models whose kernels are done before the host has launched the next.

Forward and backward of a layer are some forty launches, ten to thirty microseconds of the host each. A layer of hidden
size 4096 on 8192 tokens keeps the GPU busy for longer than that, one of 2048 on 2048 tokens does not. A CUDA graph is
the recording of such launches; replaying it is one call, however many they are.

*What is recorded.* A whole micro-batch: forward, backward, and the sums into the fp32 gradient buffer. The first one of
a step also quantizes the weights and the later ones find that done, so there are two graphs. They never run at once,
and share a pool of memory in which the second reuses what the first has left, all but the weights' FP8 copies.

*What is not.* Communication: then no rank can replay what another does not, and no communicator outlives a graph. So a
stage has to be the whole model, its layers and sequences uncut (`parallel.tensor` = `parallel.pipeline` =
`parallel.context` = 1), which suits models this small. Over data parallelism gradients are reduced as ever: where that
overlaps with the last backward pass of a step, the last micro-batch runs eagerly; without overlap it is replayed too.
Optimizer, end of step and evaluation are eager.

*What must not change* is what a graph has in it: addresses, and numbers of the host.
    inputs             are copied into buffers of their own before each replay
    parameters, sums of gradients, scales and amaxes
                       are updated in place by whoever updates them, and stay where they are
    FP8 weights        belong to the graph that makes them; layers get them back after its replay, for micro-batches
                       that run eagerly in the same step
    the FP8 report     samples some steps, by a decision of the host: these run eagerly
    static scaling     calibrates in high precision first, and capture waits for that
    nvfp4's noise      is keyed by numbers of the host: refused, by `config.checks`
Dropout there is none; it would have to take its random numbers from torch's default generator.

The first steps run eagerly because some things may not happen during a capture: compiling kernels, timing algorithms,
making library handles. Autograd's leaf nodes remember the stream they were made on; they die with each micro-batch's
graph (nothing holds on to them), so that a capture, which runs on a stream of its own, makes them anew.

What it gives up: memory. The pool holds a micro-batch's activations for good, beside what eager micro-batches and
evaluation need from the ordinary one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.fp8 import Fp8Manager
from megafp8.fp8.tensor import QuantizedTensor

EAGER_STEPS = 2
"""The first meets every kernel and shape; in the second all is as it will stay, the optimizer's state included."""


class Captured(NamedTuple):
    """Work on fixed memory: `replay` does it again, and `result` then has what it gave back."""

    replay: Callable[[], None]
    result: Tensor


class Capture(Protocol):
    """Records `work` without doing it. What it records is replayed one after the other."""

    def __call__(self, work: Callable[[], Tensor]) -> Captured: ...


class CudaCapture:
    """Records into CUDA graphs that share one pool of memory: what is still referenced there nobody overwrites."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # What other threads do, such as a loader that pins memory, need not break a capture on a stream of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return Captured(graph.replay, result)


def silent(text: str) -> None:
    """Says nothing."""


class MicrobatchGraphs:
    """The micro-batches of a rank, captured after `eager_steps` steps and replayed from there on.

    `fp8`: whose layers they run. `say` is told of each capture. A step is `begin_step` and then, if `ready`, `run` for
    its micro-batches, beginning with the first.
    """

    def __init__(
        self,
        fp8: Fp8Manager,
        device: torch.device,
        *,
        eager_steps: int = EAGER_STEPS,
        capture: Capture | None = None,
        say: Callable[[str], None] = silent,
    ) -> None:
        self.fp8, self.device, self.say = fp8, device, say
        self.ready = False
        self._eager_steps = eager_steps
        self._capture = CudaCapture() if capture is None else capture
        self._inputs: list[Tensor | None] | None = None
        self._first: Captured | None = None
        self._later: Captured | None = None
        self._weights: list[QuantizedTensor | None] = []  # FP8 copies in the memory of `_first`

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
                self.fp8.forget_weights()  # whoever quantized them, an evaluation perhaps: the graph does it itself
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
                assert buffer is x, "an input that was there came to lack, or the reverse"
                continue
            assert buffer.shape == x.shape, f"an input of {tuple(x.shape)} for a graph of {tuple(buffer.shape)}"
            buffer.copy_(x, non_blocking=True)

    def _captured(self, work: Callable[..., Tensor], what: str) -> Captured:
        assert self._inputs is not None
        inputs, start = self._inputs, time.perf_counter()
        captured = self._capture(lambda: work(*inputs))
        self.say(f"CUDA graph: captured {what} in {time.perf_counter() - start:.2f} s; replayed from here on")
        return captured
