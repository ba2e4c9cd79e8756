"""Recurrences over tokens: what a layer says of its own, and who runs it over the tokens there are.

A recurrence passes a state from token to token. Tokens may be whole sequences (training), parts of sequences on several
ranks (`megafp8.context_parallel.recurrence`), or the next ones of sequences whose states are stored (generation).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

State = tuple[Tensor, ...]
"""What a recurrence knows of the tokens before: tensors `[b, ...]`."""


class RecurrentRule(Protocol):
    """How a layer's tokens advance a state; `megafp8.models.recurrent.RecurrentMixer` says what each does."""

    def zeros(self, b: int, /) -> State: ...

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None, /) -> tuple[Tensor, State]: ...

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None, /) -> Tensor: ...

    def transition(
        self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None, /
    ) -> tuple[Tensor, Tensor]: ...


class Recurrence(Protocol):
    """Runs a layer's recurrence over the tokens of a micro-batch or a step, each sequence from its own state."""

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...], /) -> Tensor:
        """The outputs `[s, b, ...]` of tensors `[s, b, ...]`."""
        ...
