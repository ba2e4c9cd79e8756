"""The absent mixer or feed-forward network of a layer that has only one of them.

It has no weights and no norm, saves and computes nothing, and the block does not call it. The planner, generation and
checkpoints get its answers as those of any part, so they have no case for it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from megafp8.layers.context import BuildContext
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mixer import FeedForward, LayerPart, Mixer, NoInputs, Tokens
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.linear.fusion import LinearInput
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec, PartRecord


class _Absent(LayerPart):
    """A part without weights, which is not called."""

    def __init__(
        self,
        name: str,
        record: PartRecord,
        model: ModelSpec,
        context: BuildContext,
        *,
        input: Neighbor,
        memory: BlockMemory = KEEP_ALL,
    ) -> None:
        super().__init__()

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        return {}

    def work(self, batch: MicroBatch) -> KernelWork:
        return KernelWork()


class NoMixer(_Absent, Mixer):
    """The mixer of a layer that is a feed-forward network."""

    def inputs(self, layer: int, tokens: Tokens) -> NoInputs:
        return NoInputs()

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> NoReturn:
        raise AssertionError("a layer without a mixer calls none")

    @property
    def cache(self) -> tuple[()]:
        return ()


class NoFeedForward(_Absent, FeedForward):
    """The feed-forward network of a layer that is a mixer."""

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any = None) -> NoReturn:
        raise AssertionError("a layer without a feed-forward network calls none")

    def activation_bytes(self, batch: MicroBatch) -> int:
        return 0
