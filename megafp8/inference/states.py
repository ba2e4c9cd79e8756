"""States of recurrent layers in generation: of fixed size, one for each sequence that runs, whatever its length.

A sequence that runs has a slot (`Scheduler`), in which each recurrent layer keeps its state. Where a step begins a
sequence the state is zero, whatever the slot has, so slots are not cleared.

Shapes: n tokens of a step, b sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.inference.attention import PackedStep
from megafp8.layers.mixer import StateCache
from megafp8.layers.recurrent.op import RecurrentRule, State


class StateStore:
    """States of the recurrent layers of a model on this rank, for sequences in `slots` slots."""

    def __init__(self, layers: Mapping[int, StateCache], slots: int, device: torch.device) -> None:
        self._layers = {
            index: tuple(torch.zeros(slots, *shape, dtype=dtype, device=device) for shape, dtype in zip(*cache))
            for index, cache in layers.items()
        }

    def read(self, layer: int, slots_b: Tensor) -> State:
        """The states of sequences, `[b, ...]`. `slots_b`: int64."""
        return tuple(states.index_select(0, slots_b) for states in self._layers[layer])

    def write(self, layer: int, slots_b: Tensor, state: State) -> None:
        """Store the states of sequences; where a slot is named more than once, its states are equal."""
        for states, values in zip(self._layers[layer], state, strict=True):
            states.index_copy_(0, slots_b, values)


@dataclass(frozen=True)
class StepRecurrence:
    """Runs a layer's recurrence over a step's tokens (`megafp8.layers.mixer.Recurrence`), from stored states."""

    step: PackedStep
    states: StateStore
    layer: int

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...]) -> Tensor:
        """`[n, 1, ...]`: first sequences with one token, side by side, then each longer chunk."""
        step, states, layer, b = self.step, self.states, self.layer, len(self.step.table_bm)
        parts = []
        if b:
            singles = tuple(x[:b].transpose(0, 1) for x in xs)
            begins_1b = step.positions_1n[:, :b] == 0  # a prompt of one token
            y_1b, state = rule.advance(singles, states.read(layer, step.states_b), begins_1b)
            states.write(layer, step.states_b, state)
            parts.append(y_1b.transpose(0, 1))
        for chunk in step.long:
            before = rule.zeros(1) if chunk.table_1p is None else states.read(layer, chunk.state_1)
            y_s1, state = rule.advance(tuple(x[chunk.rows] for x in xs), before, None)
            states.write(layer, chunk.state_1, state)
            parts.append(y_s1)
        if step.padding:  # as in `PagedAttention`: padding repeats the last token
            parts.append(parts[-1][-1:].expand(step.padding, *parts[-1].shape[1:]))
        return torch.cat(parts)
