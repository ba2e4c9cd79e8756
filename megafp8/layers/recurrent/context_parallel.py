"""Recurrences over sequences that are sharded over context-parallel ranks.

Each rank holds two slots of a sequence (`parallel.context`). All tokens of a slot together map the state S before the
slot to T S + U (`megafp8.layers.recurrent.op.Transition`). Each rank computes T and U of its slots from a zero state,
and the ranks all-gather them. Each rank then multiplies them up to the state before each of its slots, and computes its
outputs from that state. This is exact for any number of ranks.

The bytes that ranks send do not depend on the sequence length, unlike the keys and values of attention. T is as small
as the rule allows: one number per state, a diagonal, or a matrix. T and U cost a second and third pass over the
tokens. Passing the state from rank to rank would avoid these passes, but each rank would wait for the previous one.

If a rule reads inputs of earlier tokens, the last inputs are gathered first, because T and U depend on them.

If documents are packed, slots must be contiguous parts of the sequence (`documents_are_cut` = False in `split`), so
that there is one state before each slot. A slot that begins with a new document resets this state.

Shapes: s sequence length, n ranks, r = s/n tokens of this rank's shard, c = r/2 tokens of a slot; b micro-batch size, t
inputs before a token that its convolution sees.
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
    """Recurrence over this rank's shards of sequences (`megafp8.layers.recurrent.op.Recurrence`).

    Forward and backward are collective.

    Args:
        group: Context-parallel ranks that share the sequences.
        starts_rb: Tokens of the shard that begin a document, bool; None if only the first token of a sequence does.
    """

    group: ProcessGroup
    starts_rb: Tensor | None

    def __call__(self, rule: RecurrentRule, xs: tuple[Tensor, ...]) -> Tensor:
        """Return the outputs `[r, b, ...]` of the tokens of this rank."""
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
        """Gather tensors `[2b, ...]` of two slots per rank; return all slots in sequence order, each `[b, ...]`."""
        ranks = self.group.size()
        parts = _Gather.apply(x.contiguous(), self.group).chunk(2 * ranks)
        return [parts[2 * slot] if slot < ranks else parts[2 * (2 * ranks - 1 - slot) + 1] for slot in range(2 * ranks)]

    def _state_before(self, factors: list[Tensor], added: list[Tensor]) -> Tensor:
        """Return the state before each of this rank's slots, `[2b, ...]`."""
        states = [torch.zeros_like(added[0])]
        for transition in zip(factors, added):
            states.append(Transition(*transition).apply(states[-1]))
        return torch.cat([states[slot] for slot in self._slots])


class _Gather(Function):
    """All-gather along the first dim. The gradient is the sum of all ranks' gradients of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """Return the tensors of all ranks, concatenated along the first dim."""
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's tensor."""
        return reduce_scatter(dy.contiguous(), ctx.group), None


def _side_by_side(x_rb: Tensor) -> Tensor:
    """Move the two slots of a shard side by side along b: `[r, b, ...]` -> `[c, 2b, ...]`."""
    return torch.cat(x_rb.chunk(2), dim=1)
