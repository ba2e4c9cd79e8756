"""Recurrences over tokens: what a layer says of its own, and who runs it over the tokens there are.

A recurrence passes a state from token to token. Tokens may be whole sequences (training), parts of sequences on several
ranks (`megafp8.layers.recurrent.context_parallel`), or the next ones of sequences whose states are stored (generation).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

State = tuple[Tensor, ...]
"""What a recurrence knows of the tokens before: tensors `[b, ...]`."""


class Transition(NamedTuple):
    """Linear map of the state before a run of tokens to the state after it.

    The product of many diagonal-plus-rank-one factors has no form smaller than a matrix, unless the tokens are fewer
    than half of the channels of a key.

    Args:
        factor: `[b, ..., d, d]`, a matrix; `[b, ..., d, 1]`, its diagonal; `[b, ..., 1, 1]`, one number of each state.
        added: State after the tokens if the state before them is zero, `[b, ..., d, w]`.
    """

    factor: Tensor
    added: Tensor

    def apply(self, state: Tensor) -> Tensor:
        """Return the state after the tokens, `[b, ..., d, w]`."""
        moved = self.factor * state if self.factor.shape[-1] == 1 else self.factor @ state
        return moved + self.added


class RecurrentRule(Protocol):
    """Functions by which a layer's tokens advance a state, documented in
    `megafp8.layers.recurrent.module.RecurrentMixer`."""

    def zeros(self, b: int, /) -> State: ...

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None, /) -> tuple[Tensor, State]: ...

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None, /) -> Tensor | None: ...

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None, /) -> Transition | None: ...


class Recurrence(Protocol):
    """Runs a layer's recurrence over the tokens of a micro-batch or a step, each sequence from its own state."""

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...], /) -> Tensor:
        """The outputs `[s, b, ...]` of tensors `[s, b, ...]`."""
        ...
