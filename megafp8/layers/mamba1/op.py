"""Recurrence of Mamba-1 (arXiv:2312.00752) with PyTorch's operations, for many tokens at a time.

The state S has d numbers for each channel. Each token has an input x, a step and an output gate z per channel, and
vectors b and c of d numbers, with which all channels write to and read from their states:

    Δ = softplus(step + bias)
    S ← exp(−exp(log_rate) Δ) S + Δ x bᵀ;    y = (S c + skip · x) silu(z)

Each state number decays at its own rate. Sums over tokens are therefore not products of matrices, unlike in Mamba-2.
`Scan` computes the states of a segment of tokens.

The states of all tokens would need d times the memory of the inputs. Backward therefore recomputes one segment after
the other from the state at its start. States are in fp32 or wider.

Shapes: s sequence length, b micro-batch size; n channels, d state numbers per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafp8.layers.recurrent.scan import Scan

SEGMENT = 128
"""Tokens of a segment, of which backward holds all states."""


class SelectiveTokens(NamedTuple):
    """Tensors of the tokens: x, the steps before bias and softplus, the gates before SiLU, b, and c."""

    x_sbn: Tensor
    step_sbn: Tensor
    z_sbn: Tensor
    b_sbd: Tensor
    c_sbd: Tensor


class SelectiveWeights(NamedTuple):
    """Parameters: the bias of the steps, the logarithms of the decay rates, and the weights of x in the outputs."""

    step_bias_n: Tensor
    log_rate_nd: Tensor
    skip_n: Tensor


def selective_scan(
    tokens: SelectiveTokens, weights: SelectiveWeights, state_bnd: Tensor, starts_sb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in segments. Differentiable.

    Args:
        tokens: Tensors of the tokens.
        weights: Parameters.
        state_bnd: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.

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
