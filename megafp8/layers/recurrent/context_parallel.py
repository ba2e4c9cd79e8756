"""Recurrences over sequences that are sharded over context-parallel ranks.

A rank has two slots of a sequence (`parallel.context`). All tokens of a slot together map the state before them,
S, to T S + U (`megafp8.layers.recurrent.op.Transition`). Ranks compute T and U of their slots from a state of zero,
all-gather them, and multiply them up to the state before each of their own slots, from which the outputs follow: exact,
whatever the number of ranks. What ranks send does not depend on the sequence's length, as keys and values of attention
do. T is as small as the rule allows: one number of each state, a diagonal, or a matrix. T and U cost a second and third
pass over the tokens. The state could be passed from rank to rank instead, but then each would wait for the one before.

The last inputs that a rule reads of earlier tokens, if it reads any, are gathered first, as T and U depend on them.

Where documents are packed, slots must be contiguous parts of the sequence (`documents_are_cut` = False in `split`), so
that there is one state before each slot. One that belongs to a document that ends there is reset by the next.

Shapes: s sequence, n ranks, r = s/n tokens of this rank's shard, c = r/2 of a slot; b micro-batch, t inputs before a
token that its convolution sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megafp8.layers.recurrent.op import RecurrentRule, Transition
from megafp8.parallel.collectives import all_gather, reduce_scatter
from megafp8.parallel.context import slots_of


@dataclass(frozen=True)
class ContextRecurrence:
    """Runs a layer's recurrence over this rank's shards (`megafp8.layers.mixer.Recurrence`); collective, as is its
    backward.

    `starts_rb`: bool, which tokens of the shard begin a document; None where none does but the first of a sequence.
    """

    group: ProcessGroup
    starts_rb: Tensor | None

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...]) -> Tensor:
        """`[r, b, ...]`"""
        b = xs[0].shape[1]
        slots = tuple(_side_by_side(x) for x in xs)
        starts = None if self.starts_rb is None else _side_by_side(self.starts_rb.expand(-1, b))
        state = rule.zeros(2 * b)
        last = rule.last_inputs(slots, starts)
        if last is not None:
            assert len(slots[0]) >= last.shape[1], "the config was not checked"
            after = self._gather(last)
            before = [after[slot - 1] if slot else torch.zeros_like(after[0]) for slot in self._slots]
            state = (torch.cat(before), *state[1:])
        transition = rule.transition(slots, state, starts)
        if transition is not None:
            state = (*state[:-1], self._state_before(*map(self._gather, transition)))
        y, _ = rule.advance(slots, state, starts)
        return torch.cat([y[:, :b], y[:, b:]])

    @property
    def _slots(self) -> tuple[int, int]:
        return slots_of(self.group.rank(), self.group.size())

    def _gather(self, x: Tensor) -> list[Tensor]:
        """From `[2b, ...]` of this rank's slots to those of all slots in the order of the sequence, each `[b, ...]`."""
        ranks = self.group.size()
        parts = _Gather.apply(x.contiguous(), self.group).chunk(2 * ranks)
        return [parts[2 * slot] if slot < ranks else parts[2 * (2 * ranks - 1 - slot) + 1] for slot in range(2 * ranks)]

    def _state_before(self, factors: list[Tensor], added: list[Tensor]) -> Tensor:
        """Return the state before each of this rank's slots, `[2b, ...]`."""
        states = [torch.zeros_like(added[0])]
        for of_slot in zip(factors, added):
            states.append(Transition(*of_slot).apply(states[-1]))
        return torch.cat([states[slot] for slot in self._slots])


class _Gather(Function):
    """The tensors of all ranks, one below the other; the gradient is the ranks' sum of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy.contiguous(), ctx.group), None


def _side_by_side(x_rb: Tensor) -> Tensor:
    """The two slots of a shard side by side along b: `[r, b, ...]` -> `[c, 2b, ...]`."""
    return torch.cat(x_rb.chunk(2), dim=1)
