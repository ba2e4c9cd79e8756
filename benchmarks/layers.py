"""What `bench_layer` measures: layers, however they are built, and the problem that all are built for.

Shapes: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.reference_layers import Shape
from megafp8.parallel_state import ParallelState


class NotInstalledError(Exception):
    """The package that a variant needs is not there."""


@dataclass(frozen=True)
class Problem:
    """What all variants are built for: `layers` blocks, `seq_length` tokens, weights by the reference's names."""

    shape: Shape
    layers: int
    seq_length: int
    weights: dict[str, Tensor]
    parallel: ParallelState

    @property
    def device(self) -> torch.device:
        return self.parallel.device


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Layers:
    """One variant, ready to run.

    `forward(x [s, b, h], first)` gives `[s, b, h]`; `first`: the weights have changed since the last call. `parameters`
    are by the reference's names. `zero_grad` forgets the gradients; `end_step` is what the variant has to do once per
    optimizer step. Times are those of `micro_batch`.
    """

    forward: Callable[[Tensor, bool], Tensor]
    parameters: dict[str, nn.Parameter]
    zero_grad: Callable[[], None]
    end_step: Callable[[], None] = _nothing

    def micro_batch(self, x_sbh: Tensor, dy_sbh: Tensor, first: bool) -> Tensor:
        """Forward and backward; gives back dx `[s, b, h]`."""
        leaf = x_sbh.detach().requires_grad_()
        self.forward(leaf, first).backward(dy_sbh)
        assert leaf.grad is not None
        return leaf.grad

    def to_time(self, x_sbh: Tensor, dy_sbh: Tensor) -> Layers:
        """What is to be timed, once these have been checked."""
        return self

    def gradients(self) -> dict[str, Tensor | None]:
        """Where each parameter's gradient is now; None for one that never got any."""
        return {name: getattr(p, "main_grad", p.grad) for name, p in self.parameters.items()}
