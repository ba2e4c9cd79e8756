"""Interface between a layer's recurrence and the code that runs it over tokens.

A recurrence passes a state from token to token. Tokens may be whole sequences (training), parts of sequences on several
ranks (`megafp8.layers.recurrent.context_parallel`), or the next tokens of sequences with stored states (generation).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

State = tuple[Tensor, ...]
"""State of a recurrence after the tokens so far: tensors `[b, ...]`."""


class Transition(NamedTuple):
    """Affine map from the state before a run of tokens to the state after it.

    The product of many diagonal-plus-rank-one factors has no form smaller than a matrix, unless there are fewer tokens
    than half of a key's channels.

    Args:
        factor: A matrix `[b, ..., d, d]`, its diagonal `[b, ..., d, 1]`, or one number per state `[b, ..., 1, 1]`.
        added: State after the tokens if the state before them is zero, `[b, ..., d, w]`.
    """

    factor: Tensor
    added: Tensor

    def apply(self, state: Tensor) -> Tensor:
        """Return the state after the tokens, `[b, ..., d, w]`."""
        moved = self.factor * state if self.factor.shape[-1] == 1 else self.factor @ state
        return moved + self.added


class RecurrentRule(Protocol):
    """Rule that says how a layer's tokens advance a state.

    `megafp8.layers.recurrent.module.RecurrentMixer` documents and implements them.
    """

    def zeros(self, b: int, /) -> State:
        """Return the state of `b` sequences at their start."""

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None, /) -> tuple[Tensor, State]:
        """Return the outputs of tokens, and the state after them."""

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None, /) -> Tensor | None:
        """Return the last inputs that later tokens read, or None."""

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None, /) -> Transition | None:
        """Return the map of S by all these tokens together, or None without S."""


class Recurrence(Protocol):
    """Callable that runs a layer's recurrence over a micro-batch or step, each sequence from its own state."""

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...], /) -> Tensor:
        """Return the outputs `[s, b, ...]` for the layer's tensors `[s, b, ...]`."""
        ...
