"""From recipes to quantizers, and to the state they share.

A recipe that scales by what is at hand makes a quantizer for each tensor and is done. One that remembers keeps what it
remembers of all its tensors together, so that the end of a step costs the same however many there are: a `State`.

A new recipe is a dataclass, its quantizer, and a function here that makes the second from the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8.formats import Format
from megafp8.fp8.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    RowQuantizer,
)
from megafp8.fp8.recipes.base import (
    OPERANDS,
    BlockwiseScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    OperandName,
    RowwiseScaling,
    StaticScaling,
)
from megafp8.fp8.recipes.custom import CustomScaling
from megafp8.fp8.recipes.delayed import DelayedState
from megafp8.fp8.recipes.static import StaticState
from megafp8.fp8.stochastic import NoiseClock

RECIPES: dict[str, type[Fp8Recipe]] = {
    recipe.name: recipe
    for recipe in (
        DelayedScaling, CurrentScaling, RowwiseScaling, BlockwiseScaling, StaticScaling, MXFP8Scaling, NVFP4Scaling,
        CustomScaling,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Fp8Tensor:
    """An operand of a layer that is FP8. `group`: the ranks that hold slices of it, None where each has it whole.
    `token_group`: those over which its tokens are cut; None where this rank has all, and for weights."""

    layer: str
    operand: OperandName
    group: ProcessGroup | None
    token_group: ProcessGroup | None

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.operand}"


class State(Protocol):
    """What a recipe remembers from step to step."""

    def end_step(self, group: ProcessGroup | None) -> None:
        """End a step; collective over `group`, the ranks that run the same layers."""

    def refresh(self) -> None:
        """Renew what is derived: the tensors of `state_dict` have been read into."""

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, as views, by global name."""
        ...


class Built(NamedTuple):
    """Quantizers by the tensors' names, and what they share."""

    quantizers: dict[str, Quantizer]
    state: State | None = None


def by_recipe(recipe: Fp8Recipe, layers: Iterable[str]) -> dict[Fp8Recipe, list[tuple[str, OperandName]]]:
    """The operands of `layers`, all of which `recipe` scales, by the recipe that does it in the end."""
    found: dict[Fp8Recipe, list[tuple[str, OperandName]]] = {}
    for layer in layers:
        operands = recipe.operands(layer)
        assert operands is not None, f"{layer} is no FP8 layer"
        for operand, own in zip(OPERANDS, operands, strict=True):
            found.setdefault(own, []).append((layer, operand))
    return found


@singledispatch
def build(recipe: Fp8Recipe, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    """Quantizers of `tensors`, their state on `device`; `clock` has the noise for those that need it."""
    raise TypeError(f"{type(recipe).__name__} scales no tensor itself")


def _formats(recipe: Fp8Recipe, tensors: Sequence[Fp8Tensor]) -> dict[str, Format]:
    return {tensor.name: recipe.format_of(tensor.operand) for tensor in tensors}


@build.register
def _delayed(recipe: DelayedScaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    state = DelayedState(recipe, _formats(recipe, tensors), device, {tensor.name: tensor.group for tensor in tensors})
    return Built({**state.quantizers}, state)


@build.register
def _static(recipe: StaticScaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    state = StaticState(recipe, _formats(recipe, tensors), device)
    return Built({**state.quantizers}, state)


@build.register
def _current(recipe: CurrentScaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    eps, power_of_two = recipe.amax_epsilon, recipe.power_of_two
    return Built({
        t.name: CurrentQuantizer(recipe.format_of(t.operand), t.group, eps=eps, power_of_two=power_of_two)
        for t in tensors
    })  # fmt: skip


@build.register
def _rowwise(recipe: RowwiseScaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    eps, power_of_two = recipe.amax_epsilon, recipe.power_of_two
    return Built({
        t.name: RowQuantizer(recipe.format_of(t.operand), t.token_group, eps=eps, power_of_two=power_of_two)
        for t in tensors
    })  # fmt: skip


@build.register
def _blockwise(
    recipe: BlockwiseScaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock
) -> Built:
    eps, power_of_two = recipe.amax_epsilon, recipe.power_of_two
    return Built({
        t.name: BlockQuantizer(
            recipe.format_of(t.operand), square=t.operand == "weight", eps=eps, power_of_two=power_of_two
        )
        for t in tensors
    })  # fmt: skip


@build.register
def _mxfp8(recipe: MXFP8Scaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    return Built({t.name: MXFP8Quantizer(recipe.format_of(t.operand)) for t in tensors})


@build.register
def _nvfp4(recipe: NVFP4Scaling, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
    quantizers: dict[str, Quantizer] = {
        t.name: NVFP4Quantizer(
            t.group,
            square=t.operand == "weight",
            hadamard=t.operand != "weight",
            noise=clock.tensor(t.name, t.group) if t.operand == "grad_output" else None,
        )
        for t in tensors
    }
    return Built(quantizers, clock)
