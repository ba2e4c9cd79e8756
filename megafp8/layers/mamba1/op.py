"""Recurrence of Mamba-1 with PyTorch's operations, for many tokens at a time.

Reference and formulas: `megafp8.layers.mamba1.reference`. Each state number decays at its own rate. Sums over tokens
are therefore not products of matrices, unlike in Mamba-2. `scan` computes the states of a segment of tokens in chunks.
It first advances all chunks side by side from a zero state, token by token, together with the products of their decays.
Then it adds the state at the start of each chunk, chunk by chunk. Decays are only multiplied, so nothing overflows. The
gradient of a scan is a scan in reverse order.

The states of all tokens would need d times the memory of the inputs. Backward therefore recomputes one segment after
the other from the state at its start. States are in fp32 or wider.

Shapes: s sequence length, b micro-batch size; n channels, d state numbers per channel; c tokens per chunk, m chunks of
a segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafp8.layers.mamba1.reference import SelectiveTokens, SelectiveWeights

SEGMENT = 128
"""Tokens of a segment, of which backward holds all states."""
CHUNK = 16
"""Tokens of a chunk."""


def selective_scan(
    tokens: SelectiveTokens, weights: SelectiveWeights, state_bnd: Tensor, starts_sb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run `megafp8.layers.mamba1.reference.recurrence` in segments. Differentiable.

    Returns:
        Outputs `[s, b, n]` in the dtype of the inputs, and the state after the last token in the dtype of `state_bnd`.
    """
    outputs = []
    segments = [x.split(SEGMENT) for x in tokens]
    starts = [None] * len(segments[0]) if starts_sb is None else starts_sb.split(SEGMENT)
    for *segment, starts_of_segment in zip(*segments, starts, strict=True):
        y_sbn, state_bnd = checkpoint(
            _segment, *segment, *weights, state_bnd, starts_of_segment, use_reentrant=False, preserve_rng_state=False
        )
        outputs.append(y_sbn)
    return torch.cat(outputs), state_bnd


def steps(step: Tensor, bias_n: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the steps after the bias and softplus."""
    return F.softplus(step.to(dtype) + bias_n.to(dtype))


def _segment(
    x_sbn: Tensor, step_sbn: Tensor, z_sbn: Tensor, b_sbd: Tensor, c_sbd: Tensor, step_bias_n: Tensor,
    log_rate_nd: Tensor, skip_n: Tensor, state_bnd: Tensor, starts_sb: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = state_bnd.dtype
    x, z, b, c, skip = (t.to(wide) for t in (x_sbn, z_sbn, b_sbd, c_sbd, skip_n))
    step = steps(step_sbn, step_bias_n, wide)
    decay = (step.unsqueeze(-1) * -log_rate_nd.to(wide).exp()).exp()
    if starts_sb is not None:
        decay = decay * ~starts_sb[..., None, None]
    states_sbnd: Tensor = Scan.apply(decay, (step * x).unsqueeze(-1) @ b.unsqueeze(-2), state_bnd)
    y_sbn = (states_sbnd @ c.unsqueeze(-1)).squeeze(-1) + skip * x
    return (y_sbn * F.silu(z)).to(x_sbn.dtype), states_sbnd[-1].clone()  # a view would keep all states


class Scan(Function):
    """Linear recurrence of each number, `S_i = decay_i S_(i-1) + added_i`."""

    @staticmethod
    def forward(ctx: Any, decay_sbnd: Tensor, added_sbnd: Tensor, state_bnd: Tensor) -> Tensor:
        """Return the states after each token, `[s, b, n, d]`."""
        states_sbnd = scan(decay_sbnd, added_sbnd, state_bnd)
        ctx.save_for_backward(decay_sbnd, states_sbnd, state_bnd)
        return states_sbnd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates_sbnd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of decays, of what is added, and of the state before the first token."""
        decay, states, state = ctx.saved_tensors
        later = torch.cat([decay[1:], torch.zeros_like(decay[:1])])
        dadded = scan(later.flip(0), dstates_sbnd.flip(0), torch.zeros_like(state)).flip(0)
        return dadded * torch.cat([state.unsqueeze(0), states[:-1]]), dadded, dadded[0] * decay[0]


def scan(decay_sbnd: Tensor, added_sbnd: Tensor, state_bnd: Tensor) -> Tensor:
    """Return the states `S_i = decay_i S_(i-1) + added_i` after each token, from the state before the first token."""
    s = len(decay_sbnd)
    c = min(CHUNK, s)
    padded = (torch.cat([x, x.new_zeros(-s % c, *x.shape[1:])]) for x in (decay_sbnd, added_sbnd))
    decay_mcbnd, states_mcbnd = (x.unflatten(0, (-1, c)) for x in padded)
    for i in range(1, c):
        states_mcbnd[:, i].addcmul_(decay_mcbnd[:, i], states_mcbnd[:, i - 1])
        decay_mcbnd[:, i].mul_(decay_mcbnd[:, i - 1])  # product of the decays since the start of the chunk
    for decay_cbnd, states_cbnd in zip(decay_mcbnd, states_mcbnd, strict=True):
        state_bnd = states_cbnd.addcmul_(decay_cbnd, state_bnd)[-1]
    return states_mcbnd.flatten(0, 1)[:s]
