"""Placeholder for the missing part of a layer that has only a mixer or only a feed-forward network.

The placeholder has no weights and no norm, saves and computes nothing, and the block does not call it. The planner,
generation and checkpoints ask it the same questions as any other part, so they need no special case.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from megafp8.layers.build import PartBuild
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mixer import FeedForward, LayerPart, Mixer, NoInputs, Tokens
from megafp8.linear.fusion import LinearInput
from megafp8.spec import PartRecord


class _Absent(LayerPart):
    """Part without weights that the block never calls."""

    def __init__(self, build: PartBuild[PartRecord]) -> None:
        super().__init__()

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return no tensors: the part saves nothing for backward."""
        return {}

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return zero work: the part runs no kernels."""
        return KernelWork()


class NoMixer(_Absent, Mixer):
    """Placeholder mixer of a layer with only a feed-forward network."""

    def inputs(self, layer: int, tokens: Tokens) -> NoInputs:
        """Return empty inputs."""
        return NoInputs()

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> NoReturn:
        """Raise an AssertionError, because the block must not call this part."""
        raise AssertionError("a layer without a mixer calls none")

    @property
    def cache(self) -> tuple[()]:
        """Empty tuple: generation stores nothing for this layer."""
        return ()


class NoFeedForward(_Absent, FeedForward):
    """Placeholder feed-forward network of a layer with only a mixer."""

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any = None) -> NoReturn:
        """Raise an AssertionError, because the block must not call this part."""
        raise AssertionError("a layer without a feed-forward network calls none")

    def activation_bytes(self, batch: MicroBatch) -> int:
        """Return 0: there is no activation to recompute."""
        return 0
