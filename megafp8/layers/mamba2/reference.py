"""Recurrence of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), token by token and in chunks: reference of the kernels.

Each head has a state S of d × w numbers. The state decays, and each token adds to it. The heads of a group share the
keys b and queries c:

    S_i = exp(rate · step_i) S_i-1 + step_i b_i x_iᵀ        y_i = S_iᵀ c_i + skip · x_i

Let G_i be the sum of rate · step over a chunk up to token i, and S₀ the state before the chunk. Then

    y_i = Σ_{j ≤ i} (c_i · b_j) exp(G_i − G_j) step_j x_j + exp(G_i) S₀ᵀ c_i + skip · x_i
    S_c = exp(G_c) S₀ + Σ_j exp(G_c − G_j) step_j b_j x_jᵀ

The beginning of a document resets the state: decays across a beginning are 0.

Shapes: s sequence length, b micro-batch size; a heads of w channels in g groups, d state numbers per channel; c tokens
per chunk, m chunks. `rate_a` is negative, and `skip_a` weights the input. All tensors have one dtype, fp32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def recurrence(
    x_sbaw: Tensor, step_sba: Tensor, rate_a: Tensor, b_sbgd: Tensor, c_sbgd: Tensor, skip_a: Tensor,
    state_badw: Tensor, starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the recurrence token by token. This is the specification of the other functions.

    Args:
        x_sbaw: Inputs of the heads.
        step_sba: Step of each token and head.
        rate_a: Decay rate of each head, negative.
        b_sbgd: Vectors that tokens use to write to the states (keys).
        c_sbgd: Vectors that tokens use to read the states (queries).
        skip_a: Weight of the input in the output.
        state_badw: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.

    Returns:
        Outputs `[s, b, a, w]`, and the state after the last token.
    """
    per_group, outputs = x_sbaw.shape[2] // b_sbgd.shape[2], []
    for i, (x, step, b, c) in enumerate(zip(x_sbaw, step_sba, b_sbgd, c_sbgd, strict=True)):
        if starts_sb is not None:
            state_badw = state_badw * ~starts_sb[i][:, None, None, None]
        b, c = (y.repeat_interleave(per_group, dim=1) for y in (b, c))
        state_badw = state_badw * (rate_a * step).exp()[..., None, None]
        state_badw = state_badw + torch.einsum("bad,baw->badw", b, step.unsqueeze(-1) * x)
        outputs.append(torch.einsum("badw,bad->baw", state_badw, c) + skip_a.unsqueeze(-1) * x)
    return torch.stack(outputs), state_badw


def in_chunks(
    x_sbaw: Tensor, step_sba: Tensor, rate_a: Tensor, b_sbgd: Tensor, c_sbgd: Tensor, skip_a: Tensor,
    state_badw: Tensor, starts_sb: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `recurrence` in chunks of `chunk` tokens."""
    s, b = x_sbaw.shape[:2]
    heads, groups = x_sbaw.shape[2], b_sbgd.shape[2]
    length = min(chunk, s)

    def chunks(x: Tensor) -> Tensor:
        """Split `[s, b, ...]` into chunks `[m, b, a or g, c, ...]`, padded with zeros that do not change the state."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -s % length)).unflatten(0, (-1, length))
        return x.movedim(1, 3)

    added, sums = chunks(step_sba.unsqueeze(-1) * x_sbaw), chunks(rate_a * step_sba).cumsum(-1)
    keys, queries = chunks(b_sbgd), chunks(c_sbgd)
    within = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    causal = torch.ones(length, length, dtype=torch.bool, device=sums.device).tril()
    within = torch.where(causal, within, -torch.inf).exp()
    before, after, over = sums.exp(), (sums[..., -1:] - sums).exp(), sums[..., -1].exp()
    if starts_sb is not None:  # decays over the beginning of a document are 0
        document = chunks(starts_sb.unsqueeze(-1).expand(s, b, 1).long()).cumsum(-1)
        within = within * (document.unsqueeze(-1) == document.unsqueeze(-2))
        before, over = before * (document == 0), over * (document[..., -1] == 0)
        after = after * (document == document[..., -1:])
    per_group = heads // groups
    scores = (queries @ keys.mT).repeat_interleave(per_group, dim=2) * within
    keys, queries = (x.repeat_interleave(per_group, dim=2) for x in (keys, queries))
    chunk_state, states = (after.unsqueeze(-1) * keys).mT @ added, []
    for own_i, over_i in zip(chunk_state, over, strict=True):
        states.append(state_badw)
        state_badw = over_i[..., None, None] * state_badw + own_i
    y = scores @ added + before.unsqueeze(-1) * (queries @ torch.stack(states))
    y_sbaw = y.movedim(3, 1).flatten(0, 1)[:s]
    return y_sbaw + skip_a.unsqueeze(-1) * x_sbaw, state_badw
