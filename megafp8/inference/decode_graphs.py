"""Decode steps replayed from CUDA graphs.

The decode step of a layer is a dozen kernels of a few microseconds each, and the host needs longer than that to launch
one kernel. A CUDA graph launches all of them at once. Graphs are recorded for a few numbers of sequences; a step is
padded to the next of these numbers with copies of its last sequence. With pipeline parallelism, each rank records its
stages, and the communication between stages stays outside the graphs.

The first step of a size runs eagerly, because kernels cannot be compiled during a capture. The second step is recorded.
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
"""Function that runs this rank's stage with an index: it maps the stage's input and the step to the output, or None."""

_POWERS_UP_TO = 64


def padded_size(count: int, multiple: int) -> int:
    """Return the number of tokens to which a step of `count` tokens is padded, a multiple of `multiple`.

    The sizes are powers of two up to 64, then multiples of 64, so that few graphs are recorded.
    """
    size = 1 << (count - 1).bit_length() if count <= _POWERS_UP_TO else -(-count // _POWERS_UP_TO) * _POWERS_UP_TO
    return -(-size // multiple) * multiple


class _Recorded(NamedTuple):
    """Recorded stage. `x_sbh` is the buffer of its input; None on the first stage."""

    x_sbh: Tensor | None
    replay: Callable[[], Tensor | None]


@dataclass
class _Size:
    inputs: DecodeInputs
    stages_run: set[int] = field(default_factory=set)
    recorded: dict[int, _Recorded] = field(default_factory=dict)


class DecodeGraphs:
    """Runner of steps with one token of each sequence, which are replayed from CUDA graphs.

    Args:
        run: Function that runs a stage eagerly.
        cache: Cache of keys and values.
        device: Device of the model.
        longest: Largest number of tokens of a sequence.
        multiple: The number of tokens of a step is a multiple of this.
        new_capture: Function that creates the capture.
    """

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
        """Return the step of these chunks, each of one token, at addresses that do not change."""
        n = padded_size(len(batch), self._multiple)
        if n not in self._sizes:
            most_pages = -(-self._longest // self._cache.page_size)
            self._sizes[n] = _Size(DecodeInputs(n, most_pages, self._longest, self._cache, self._device))
        inputs = self._sizes[n].inputs
        inputs.fill(batch)
        return inputs.step

    def run(self, index: int, x_sbh: Tensor | None, step: PackedStep) -> Tensor | None:
        """Run a stage (`RunStage`) for the step that `fill` returned last. The next step overwrites the result."""
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
