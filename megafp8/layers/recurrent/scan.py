"""Scan of a linear recurrence of numbers, each with its own decays, with PyTorch's operations.

`scan` divides the tokens into chunks. It first advances all chunks side by side from a zero state, token by token,
together with the products of their decays. Then it adds the state at the start of each chunk. The states at the ends of
chunks are a scan again if there are many. Decays are only multiplied, so nothing overflows. The gradient of a scan is a
scan in reverse order.

Shapes: s sequence length, b micro-batch size, n numbers of a state, of any shape; c tokens per chunk, m chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK = 16
"""Tokens of a chunk."""


def kernels_of_scan(s: int) -> int:
    """Return the number of kernels of a scan over `s` tokens."""
    chunks = -(-s // CHUNK)
    return 2 * CHUNK + (chunks if chunks <= CHUNK else kernels_of_scan(chunks))


class Scan(Function):
    """Linear recurrence of each number, `S_i = decay_i S_(i-1) + added_i`."""

    @staticmethod
    def forward(ctx: Any, decay_sbn: Tensor, added_sbn: Tensor, state_bn: Tensor) -> Tensor:
        """Return the states after each token, `[s, b, n]`."""
        states_sbn = scan(decay_sbn, added_sbn, state_bn)
        ctx.save_for_backward(decay_sbn, states_sbn, state_bn)
        return states_sbn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates_sbn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of decays, of what is added, and of the state before the first token."""
        decay, states, state = ctx.saved_tensors
        later = torch.cat([decay[1:], torch.zeros_like(decay[:1])])
        dadded = scan(later.flip(0), dstates_sbn.flip(0), torch.zeros_like(state)).flip(0)
        return dadded * torch.cat([state.unsqueeze(0), states[:-1]]), dadded, dadded[0] * decay[0]


def scan(decay_sbn: Tensor, added_sbn: Tensor, state_bn: Tensor) -> Tensor:
    """Return the states `S_i = decay_i S_(i-1) + added_i` after each token, from the state before the first token."""
    s = len(decay_sbn)
    c = min(CHUNK, s)
    padded = (torch.cat([x, x.new_zeros(-s % c, *x.shape[1:])]) for x in (decay_sbn, added_sbn))
    decay_mcbn, states_mcbn = (x.unflatten(0, (-1, c)) for x in padded)
    for i in range(1, c):
        states_mcbn[:, i].addcmul_(decay_mcbn[:, i], states_mcbn[:, i - 1])
        decay_mcbn[:, i].mul_(decay_mcbn[:, i - 1])  # product of the decays since the start of the chunk
    if len(states_mcbn) > CHUNK:
        ends_mbn = scan(decay_mcbn[:, -1], states_mcbn[:, -1], state_bn)
        states_mcbn.addcmul_(decay_mcbn, torch.cat([state_bn.unsqueeze(0), ends_mbn[:-1]]).unsqueeze(1))
    else:
        for decay_cbn, states_cbn in zip(decay_mcbn, states_mcbn, strict=True):
            state_bn = states_cbn.addcmul_(decay_cbn, state_bn)[-1]
    return states_mcbn.flatten(0, 1)[:s]
