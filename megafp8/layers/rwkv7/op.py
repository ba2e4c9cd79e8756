"""Recurrence of RWKV-7 (arXiv:2503.14456): the state decays, and each token replaces part of a stored value.

The state S `[d, d]` of a head maps keys to values. Each token has a log decay g per channel, a removal key κ of length
1, an in-context learning rate a per channel, a key k and a value v:

    S ← exp(g) S − (a κ) (Sᵀκ)ᵀ + k vᵀ;    y = Sᵀr

The transition diag(exp(g)) − (a κ) κᵀ is diagonal plus rank one. Consider a chunk of tokens, and let G be the running
sum of g. The values u that the tokens read with their removal keys solve a triangular system, and the state is read and
written only once per chunk:

    (I + A) u = κ exp(G') S₀ + B v
    A_ij = Σ_d κ_i exp(G'_i − G_j) a_j κ_j,  B_ij = Σ_d κ_i exp(G'_i − G_j) k_j  for j < i
    S_c = exp(G_c) S₀ + Σ_j exp(G_c − G_j) (k_j v_jᵀ − a_j κ_j u_jᵀ),    G'_i = G_(i−1)

There is no kernel yet. `in_chunks` uses PyTorch's operations, with c² products per channel of each chunk.

Shapes: s sequence length, b micro-batch size; a heads of d channels on this rank; c tokens per chunk, m chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 16
"""Tokens of a chunk."""


def in_chunks(
    r_sbad: Tensor, decay_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, removal_sbad: Tensor, rate_sbad: Tensor,
    state_badw: Tensor, starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the recurrence in chunks, with all tensors in one dtype, fp32 or wider.

    Args:
        r_sbad: Receptances, which tokens use to read the state.
        decay_sbad: Logarithms g of decays.
        k_sbad: Keys.
        v_sbaw: Values, of any width w.
        removal_sbad: Removal keys κ of length 1.
        rate_sbad: In-context learning rates a.
        state_badw: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.

    Returns:
        Outputs `[s, b, a, w]`, and the state after the last token.
    """
    s, b = r_sbad.shape[:2]
    c = min(CHUNK, s)

    def chunks(x: Tensor) -> Tensor:
        """Split `[s, b, a, ...]` into chunks `[m, b, a, c, ...]`, padded with zeros that do not change the state."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -s % c)).unflatten(0, (-1, c))
        return x.movedim(1, 3)

    r, k, v, removal = chunks(r_sbad), chunks(k_sbad), chunks(v_sbaw), chunks(removal_sbad)
    replaced, decay = removal * chunks(rate_sbad), chunks(decay_sbad)
    sums = decay.cumsum(3)
    earlier = sums - decay
    causal = torch.ones(c, c, dtype=torch.bool, device=r.device).tril().unsqueeze(-1)
    strict = causal.squeeze(-1).tril(-1).unsqueeze(-1)
    within = torch.where(causal, sums.unsqueeze(-2) - sums.unsqueeze(-3), -torch.inf).exp()
    before = torch.where(strict, earlier.unsqueeze(-2) - sums.unsqueeze(-3), -torch.inf).exp()
    r_of_state, removal_of_state = r * sums.exp(), removal * earlier.exp()
    after, over = (sums[..., -1:, :] - sums).exp(), sums[..., -1, :].exp()
    if starts_sb is not None:  # decays over the beginning of a document are 0
        document = chunks(starts_sb.unsqueeze(-1).expand(s, b, 1).long()).cumsum(-1)
        same, first = (document.unsqueeze(-1) == document.unsqueeze(-2)).unsqueeze(-1), (document == 0).unsqueeze(-1)
        within, before = within * same, before * same
        r_of_state, removal_of_state = r_of_state * first, removal_of_state * first
        after, over = after * (document == document[..., -1:]).unsqueeze(-1), over * first[..., -1, :]

    def products(x: Tensor, y: Tensor, decays: Tensor) -> Tensor:
        """Return the products of x of each token with the decayed y of its chunk, `[m, b, a, c, c]`."""
        return ((x.unsqueeze(-2) * y.unsqueeze(-3)) * decays).sum(-1)

    right = torch.cat([products(removal, k, before) @ v, removal_of_state], dim=-1)
    # `unitriangular=True` takes the diagonal as 1 and does not read it.
    solved = torch.linalg.solve_triangular(products(removal, replaced, before), right, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], removal.shape[-1]], dim=-1)
    value_outputs, removal_scores = products(r, k, within) @ v, products(r, replaced, within)
    added, replaced = (k * after).mT @ v, (replaced * after).mT
    outputs = []
    tensors = written, read, value_outputs, removal_scores, added, replaced, r_of_state, over
    for written_i, read_i, values_i, removed_i, added_i, replaced_i, r_i, over_i in zip(*tensors, strict=True):
        u = written_i + read_i @ state_badw
        outputs.append(r_i @ state_badw + values_i - removed_i @ u)
        state_badw = over_i.unsqueeze(-1) * state_badw + added_i - replaced_i @ u
    return torch.stack(outputs).movedim(3, 1).flatten(0, 1)[:s], state_badw
