"""States of recurrent layers in generation: one state of fixed size for each running sequence.

Each running sequence has a slot (`Scheduler`), in which each recurrent layer keeps its state. If a step begins a
sequence, the initial state is zero regardless of the slot's content, so slots are never cleared.

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
    """Store of the states of this rank's recurrent layers, with `slots` slots for sequences."""

    def __init__(self, layers: Mapping[int, StateCache], slots: int, device: torch.device) -> None:
        self._layers = {
            index: tuple(torch.zeros(slots, *shape, dtype=dtype, device=device) for shape, dtype in zip(*cache))
            for index, cache in layers.items()
        }

    def read(self, layer: int, slots_b: Tensor) -> State:
        """Return the states of the sequences in these slots (int64), `[b, ...]`."""
        return tuple(states.index_select(0, slots_b) for states in self._layers[layer])

    def write(self, layer: int, slots_b: Tensor, state: State) -> None:
        """Store the states of sequences. If a slot is named more than once, its states must be equal."""
        for states, values in zip(self._layers[layer], state, strict=True):
            states.index_copy_(0, slots_b, values)


@dataclass(frozen=True)
class StepRecurrence:
    """Recurrence of a layer over a step's tokens, from stored states (`megafp8.layers.mixer.Recurrence`)."""

    step: PackedStep
    states: StateStore
    layer: int

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...]) -> Tensor:
        """Run the recurrence, and return its output `[n, 1, ...]`.

        The first tokens belong to sequences with one token, which run as one batch. Longer chunks follow one by one.
        """
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
