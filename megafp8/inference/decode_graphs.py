"""Decode steps replayed from CUDA graphs.

A layer's decode step is a dozen kernels of a few microseconds each, and the host needs longer than that to launch one.
A CUDA graph is launched at once. There is one for each of a few numbers of sequences, up to which a step is filled with
copies of its last sequence. Of a pipeline each rank records its stages; what is sent between them is outside.

The first step of a size runs eagerly, as a capture can compile no kernels; the second one is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.inference.attention import DecodeInputs, PackedStep
from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk
from megafp8.linear.capture import Capture, CudaCapture

RunStage = Callable[[int, Tensor | None, PackedStep], Tensor | None]
"""Runs this rank's stage of that index: what comes in and the step -> what goes out, None if nothing does."""

_POWERS_UP_TO = 64


def padded_size(count: int, multiple: int) -> int:
    """How many tokens a step of `count` has: few different numbers, and a multiple."""
    size = 1 << (count - 1).bit_length() if count <= _POWERS_UP_TO else -(-count // _POWERS_UP_TO) * _POWERS_UP_TO
    return -(-size // multiple) * multiple


class _Recorded(NamedTuple):
    """`x_sbh`: where the input lies; None on the first stage."""

    x_sbh: Tensor | None
    replay: Callable[[], Tensor | None]


@dataclass
class _Size:
    inputs: DecodeInputs
    stages_run: set[int] = field(default_factory=set)
    recorded: dict[int, _Recorded] = field(default_factory=dict)


class DecodeGraphs:
    """Runs steps of one token of each sequence. `longest`: tokens of a sequence. `multiple`: of a step's tokens."""

    def __init__(
        self,
        run: RunStage,
        cache: PagedCache,
        device: torch.device,
        *,
        longest: int,
        multiple: int,
        new_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._run, self._cache, self._device, self._longest, self._multiple = run, cache, device, longest, multiple
        self._sizes: dict[int, _Size] = {}
        self._capture = new_capture()

    def fill(self, batch: Sequence[Chunk]) -> PackedStep:
        """The step of these chunks, each of one token, at addresses that do not change."""
        n = padded_size(len(batch), self._multiple)
        if n not in self._sizes:
            most_pages = -(-self._longest // self._cache.page_size)
            self._sizes[n] = _Size(DecodeInputs(n, most_pages, self._longest, self._cache, self._device))
        inputs = self._sizes[n].inputs
        inputs.fill(batch)
        return inputs.step

    def run(self, index: int, x_sbh: Tensor | None, step: PackedStep) -> Tensor | None:
        """`RunStage` of the step that `fill` returned last; the next step overwrites the result."""
        size = self._sizes[step.tokens_1n.shape[1]]
        if index not in size.stages_run:
            size.stages_run.add(index)
            return self._run(index, x_sbh, step)
        if index not in size.recorded:
            copied_sbh = None if x_sbh is None else x_sbh.clone()
            size.recorded[index] = _Recorded(copied_sbh, self._capture(lambda: self._run(index, copied_sbh, step)))
        recorded = size.recorded[index]
        if recorded.x_sbh is not None:
            assert x_sbh is not None
            recorded.x_sbh.copy_(x_sbh)
        return recorded.replay()
