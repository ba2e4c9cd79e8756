"""State that recipes keep between steps, and the end of a step with one all-reduce of all amaxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_reduce, size


class NewestAmaxes(NamedTuple):
    """Amaxes of the current step, fp32 of any shape, to be reduced over `group`.

    If `group` is None, they are reduced over the ranks that run the same layers.
    """

    amaxes: Tensor
    group: ProcessGroup | None = None


class State(Protocol):
    """State that a recipe keeps between steps, for all its tensors together."""

    def newest_amaxes(self) -> list[NewestAmaxes]:
        """Return the amaxes to reduce by maximum before the step ends; of equal shapes on all ranks of a group."""
        ...

    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """End a step, given the reduced `newest_amaxes` in their shapes. They may be the tensors themselves."""

    def discard_step(self) -> None:
        """Discard everything that the step has recorded so far, because the step is repeated."""

    def refresh(self) -> None:
        """Recompute derived values, after new values have been written into the tensors of `state_dict`."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save, as views, by global name."""
        ...


def end_step(states: Iterable[tuple[State, ProcessGroup | None]], replica_amaxes: Sequence[Tensor] = ()) -> None:
    """End a step of all `states`. This is a collective, with one all-reduce for each group.

    Args:
        states: Each state with the ranks that run the same layers.
        replica_amaxes: Amaxes of all states from earlier in the step, reduced over other replicas of the model.
    """
    newest_of_states = [(state, group, state.newest_amaxes()) for state, group in states]
    if replica_amaxes:
        others = iter(replica_amaxes)
        newest_of_states = [
            (state, group, [x._replace(amaxes=torch.maximum(x.amaxes, next(others))) for x in newest])
            for state, group, newest in newest_of_states
        ]
    parts: dict[tuple[ProcessGroup | None, torch.device], list[Tensor]] = {}
    for _, group, newest in newest_of_states:
        for amaxes, amax_group in newest:
            parts.setdefault((amax_group or group, amaxes.device), []).append(amaxes)
    reduced = {key: iter(_reduced(amaxes, key[0])) for key, amaxes in parts.items()}
    for state, group, newest in newest_of_states:
        state.end_step([next(reduced[amax_group or group, amaxes.device]) for amaxes, amax_group in newest])


def _reduced(amaxes: list[Tensor], group: ProcessGroup | None) -> Sequence[Tensor]:
    """Return the maxima of `amaxes` over `group`."""
    if size(group) == 1:
        return amaxes
    flat = all_reduce(torch.cat([amax.flatten() for amax in amaxes]), group, "max")
    return [part.view(amax.shape) for part, amax in zip(flat.split([amax.numel() for amax in amaxes]), amaxes)]
