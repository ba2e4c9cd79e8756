"""What recipes remember between steps, and the end of a step: one all-reduce of all amaxes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_reduce, size


class NewestAmaxes(NamedTuple):
    """Amaxes of the running step, fp32 of any shape, to be reduced over `group`.

    None: over the ranks that run the same layers.
    """

    amaxes: Tensor
    group: ProcessGroup | None = None


class State(Protocol):
    """What a recipe remembers between steps, of all its tensors together."""

    def newest_amaxes(self) -> list[NewestAmaxes]:
        """What is to be reduced, by maximum, before the step ends; the same on all ranks of a group."""
        ...

    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """End a step with `newest_amaxes`, each of its shape, reduced. They may be the same tensors."""

    def discard_step(self) -> None:
        """Forget what the step has recorded so far: it is computed again."""

    def refresh(self) -> None:
        """Recompute what is derived: the tensors of `state_dict` have been read into."""

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, as views, by global name."""
        ...


def end_step(states: Iterable[tuple[State, ProcessGroup | None]], of_replicas: Sequence[Tensor] = ()) -> None:
    """End a step of all `states`, each given with the ranks that run the same layers.

    `of_replicas`: the amaxes of all states, as they were earlier in the step, reduced over other copies of the model.
    Collective: one all-reduce for each group, whatever the states.
    """
    newest_of_states = [(state, group, state.newest_amaxes()) for state, group in states]
    if of_replicas:
        others = iter(of_replicas)
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
    """The maxima of `amaxes` over `group`."""
    if size(group) == 1:
        return amaxes
    flat = all_reduce(torch.cat([amax.flatten() for amax in amaxes]), group, "max")
    return [part.view(amax.shape) for part, amax in zip(flat.split([amax.numel() for amax in amaxes]), amaxes)]
