"""Heads of multi-head latent attention from their projections: split, rotated, with the rotary key repeated.

On a GPU, `megafp8.layers.latent_attention.kernel` computes the heads in one pass and their gradients in another. On
other devices, and in fp64, the references in this module do. Only the rotary tables are saved for backward.

Shapes: s sequence, b micro-batch, a heads; n channels of a head without positions, r rotary channels, d = n + r; v
channels of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megafp8.linear.autograd import once_differentiable
from megafp8.numerics.implementations import triton_module
from megafp8.numerics.sources import rotate, wide

_kernels = triton_module("megafp8.layers.latent_attention.kernel")

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the pairs of channels, `[s, 1 or b, 1, r/2]`."""


def latent_heads(
    q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: Rotary | None, heads: int, score_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k `[s, b, a, d]` and v `[s, b, a, v]`; differentiable.

    Rotated pairs are neighboring rotary channels. In q and k, the first channels of all pairs come first.

    Args:
        q_sbc: The n and the r channels of each head's query, `[s, b, a·d]`.
        kv_sbc: The n channels of each head's key, and its value, `[s, b, a·(n + v)]`.
        k_rotary_sbr: The rotary channels of the keys, shared by all heads.
        rotary: Cosines and sines; None means no rotation, with all channels in their places.
        heads: Number of heads, a.
        score_factor: Factor of the queries.
    """
    return _LatentHeads.apply(q_sbc, kv_sbc, k_rotary_sbr, rotary, heads, score_factor)


class _LatentHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: Rotary | None, heads: int, factor: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(*(rotary or ()))
        ctx.r, ctx.factor = k_rotary_sbr.shape[2], factor
        tensors = q_sbc.contiguous(), kv_sbc.contiguous(), k_rotary_sbr.contiguous()
        if _has_kernel(q_sbc, rotary):
            return _kernels().forward(*tensors, rotary, heads, factor)
        return forward_reference(*tensors, rotary, heads, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        rotary = ctx.saved_tensors or None
        compute = _kernels().backward if _has_kernel(dq, rotary) else backward_reference
        return *compute(dq, dk, dv, rotary, ctx.r, ctx.factor), None, None, None


def forward_reference(
    q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: Rotary | None, heads: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `latent_heads` in PyTorch.

    Rotations are computed in fp32 or wider, and rounded before queries are scaled.
    """
    r = k_rotary_sbr.shape[2]
    q = q_sbc.unflatten(-1, (heads, -1))
    n = q.shape[-1] - r
    k, v = kv_sbc.unflatten(-1, (heads, -1)).tensor_split([n], dim=-1)
    k_rotary = _rotated(k_rotary_sbr.unsqueeze(2), rotary).expand(-1, -1, heads, -1)
    q = torch.cat([q[..., :n], _rotated(q[..., n:], rotary)], dim=-1)
    return q if factor == 1 else q * factor, torch.cat([k, k_rotary], dim=-1), v.contiguous()


def backward_reference(
    dq_sbad: Tensor, dk_sbad: Tensor, dv_sbav: Tensor, rotary: Rotary | None, r: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q_sbc`, `kv_sbc` and `k_rotary_sbr`.

    The gradient of the rotary key is summed over heads in their order, in fp32 or wider, rounded, and then rotated
    back.
    """
    n = dq_sbad.shape[-1] - r
    dq = dq_sbad if factor == 1 else dq_sbad * factor
    dq = torch.cat([dq[..., :n], _rotated_back(dq[..., n:], rotary)], dim=-1)
    dkv = torch.cat([dk_sbad[..., :n], dv_sbav], dim=-1)
    head_grads = wide(dk_sbad[..., n:]).unbind(2)
    total = torch.zeros_like(head_grads[0])
    for head_grad in head_grads:
        total += head_grad
    dk_rotary = _rotated_back(total.to(dk_sbad.dtype).unsqueeze(2), rotary)
    return dq.flatten(2), dkv.flatten(2), dk_rotary.squeeze(2)


def _rotated(x_sbar: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotate pairs of neighbors and put the first channels of all pairs first."""
    if rotary is None:
        return x_sbar
    return rotate(x_sbar.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), *rotary).to(x_sbar.dtype)


def _rotated_back(dy_sbar: Tensor, rotary: Rotary | None) -> Tensor:
    """Return the gradient of the input of `_rotated`."""
    if rotary is None:
        return dy_sbar
    cos, sin = rotary
    halves = rotate(dy_sbar, cos, -sin).to(dy_sbar.dtype)
    return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _has_kernel(x: Tensor, rotary: Rotary | None) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and (rotary is None or rotary[0].dtype == torch.float32)
