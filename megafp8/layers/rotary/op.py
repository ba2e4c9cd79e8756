"""Rotary embedding of packed q, k and v (in place, or after norms), or of separate heads.

The backward of packed q, k and v is fused with the cast of their gradient.

Shapes: s sequence, b micro-batch, r = s·b tokens, a query heads, g key-value heads of width d; h = a + g; c = (a +
2g)·d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from megafp8.layers.norm import reference as norm_reference
from megafp8.layers.norm.op import deliver_sums
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import fused_gradient, runs_unfused
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.numerics.implementations import triton_module
from megafp8.numerics.sources import HeadNorms, QKVGrad, rotate
from megafp8.parallel import collectives

_kernels = triton_module("megafp8.layers.rotary.kernel")


class _RotateAndSplit(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_sbc: Tensor,
        heads: int,
        groups: int,
        cos: Tensor,
        sin: Tensor,
        handoff: QuantizedGradHandoff | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.handoff = handoff
        # The output is overwritten. The linear layer does not need it, and autograd raises an error if another
        # function has saved it.
        increment_version(qkv_sbc)
        qkv_sbc = qkv_sbc.detach()
        return _rotated_and_split(qkv_sbc, heads, groups, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        source = QKVGrad(dq.contiguous(), dk.contiguous(), dv.contiguous(), *ctx.saved_tensors)
        return fused_gradient(source, dq.shape[:2], dq, ctx.handoff), *[None] * 5


@dataclass(frozen=True)
class QKNorms:
    """RMSNorm of query and key heads before their rotation.

    Attributes:
        q_weight: Weight of query heads, None for a constant one. Shape `[d]`, shared by all heads, or the weights of
            this rank's channels if one norm covers all heads together.
        k_weight: Weight of key heads, in the same form.
        eps: Epsilon of the norms.
        zero_centered: Multiply by `1 + weight` instead of `weight`.
        sizes: Numbers of channels of all query heads and of all key heads on all ranks of `group`, if one norm covers
            all query heads and another all key heads. None means a separate norm for each head.
        group: Tensor-parallel ranks over which a norm of all heads together is computed.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    zero_centered: bool = False
    sizes: tuple[int, int] | None = None
    group: ProcessGroup | None = None

    def of_heads(self, q_weight: Tensor | None, k_weight: Tensor | None, heads: int, groups: int) -> Tensor | None:
        """Return the weights of each query and key head, `[h, d]`, or None without weights."""
        if q_weight is None or k_weight is None:
            return None
        sized = ((q_weight.detach(), heads), (k_weight.detach(), groups))
        return torch.cat([x.expand(n, -1) if self.sizes is None else x.view(n, -1) for x, n in sized])

    def means(self, sums_rh: Tensor, heads: int) -> Tensor:
        """Return the means over all channels of a norm, repeated for each head, `[r, h]`.

        `sums_rh` holds sums over the channels of each head. Requires norms of all heads together (`sizes`).
        """
        assert self.sizes is not None
        groups = sums_rh.shape[1] - heads
        parts = sums_rh.split_with_sizes([heads, groups], dim=1)
        sums_2r = collectives.all_reduce(torch.stack([x.sum(dim=1) for x in parts]), self.group)
        means = [x.div(size).unsqueeze(1) for x, size in zip(sums_2r, self.sizes, strict=True)]
        return torch.cat([x.expand(-1, n) for x, n in zip(means, (heads, groups), strict=True)], dim=1)

    def deliver(self, dq_weight: Tensor, dk_weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Deliver the gradients of the weights, or their partial sums, as `deliver_sums` does."""
        if self.q_weight is None or self.k_weight is None:
            return None, None
        return deliver_sums(self.q_weight, dq_weight), deliver_sums(self.k_weight, dk_weight)


class _NormRotateAndSplit(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_sbc: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, heads: int, groups: int,
        cos: Tensor, sin: Tensor, norms: QKNorms, handoff: QuantizedGradHandoff | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v, rstd_rh = _normed_rotated_and_split(qkv_sbc.detach(), heads, groups, cos, sin, norms)
        ctx.save_for_backward(qkv_sbc, rstd_rh, q_weight, k_weight, cos, sin)
        ctx.norms, ctx.handoff = norms, handoff  # the norms' weights have gradient sinks, which saved tensors may lack
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        (qkv_sbc, rstd_rh, *weights, cos, sin), norms = ctx.saved_tensors, ctx.norms
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        (_, _, a, d), g = dq.shape, dk.shape[2]
        weight_hd, together = norms.of_heads(*weights, a, g), norms.sizes is not None
        count, options = 1 if together else d, {"zero_centered": norms.zero_centered}
        if _has_kernel(qkv_sbc, cos):
            statistics_2rh, *dweights = _kernels().head_gradients(
                dq, dk, qkv_sbc, rstd_rh, weight_hd, cos, sin, count, shared=not together, **options
            )
            dweights = [x.transpose(0, 1).flatten(1) for x in dweights] if together else dweights
        else:
            x_sbhd, dqk = _q_and_k(qkv_sbc, a + g, d), torch.cat([dq, dk], dim=2)
            statistics_2rh, dweight_hd = norm_reference.head_gradients(
                dqk, x_sbhd, rstd_rh, weight_hd, cos, sin, count, **options
            )
            parts = dweight_hd.split_with_sizes([a, g])
            dweights = [x.flatten() if together else x.sum(dim=0) for x in parts]
        if together:
            statistics_2rh[1].copy_(norms.means(statistics_2rh[1], a))
        delivered = norms.deliver(*dweights)
        head_norms = HeadNorms(qkv_sbc.flatten(0, 1), statistics_2rh, weight_hd, norms.zero_centered)
        source = QKVGrad(dq, dk, dv, cos, sin, head_norms)
        return fused_gradient(source, dq.shape[:2], dq, ctx.handoff), *delivered, *[None] * 6


def rotate_and_split(
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, handoff: QuantizedGradHandoff | None,
    norms: QKNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q `[s, b, a, d]` and k `[s, b, g, d]`, rotated, and v `[s, b, g, d]`, from packed heads [q | k | v].

    Without `norms`, all three are views of `qkv_sbc`, which is overwritten. With `norms`, which apply to q and k before
    the rotation, only v is a view, and `qkv_sbc`, which must be contiguous, is not changed. cos and sin are `[s, 1 or
    b, 1, d/2]`. `handoff` is used as in `swiglu`.
    """
    if norms is not None:
        if runs_unfused(qkv_sbc):
            return _normed_rotated_and_split(qkv_sbc, heads, groups, cos, sin, norms)[:3]
        q_weight, k_weight = norms.q_weight, norms.k_weight
        return _NormRotateAndSplit.apply(qkv_sbc, q_weight, k_weight, heads, groups, cos, sin, norms, handoff)
    if runs_unfused(qkv_sbc):
        return _rotated_and_split(qkv_sbc, heads, groups, cos, sin)
    return _RotateAndSplit.apply(qkv_sbc, heads, groups, cos, sin, handoff)


def _normed_rotated_and_split(
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, norms: QKNorms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q and k (views of one tensor), v (a view of `qkv_sbc`), and the reciprocal root mean squares `[r, h]`."""
    d, h = 2 * cos.shape[-1], heads + groups
    weight_hd = norms.of_heads(norms.q_weight, norms.k_weight, heads, groups)
    rstd_rh: Tensor | None = None
    options = {"zero_centered": norms.zero_centered}
    if _has_kernel(qkv_sbc, cos):
        if norms.sizes is not None:
            rstd_rh = norms.means(_kernels().square_means(qkv_sbc, h, d, 1), heads).add_(norms.eps).rsqrt_()
        qk, rstd_rh = _kernels().norm_and_rotate(qkv_sbc, h, cos, sin, weight_hd, norms.eps, rstd_rh, **options)
    else:
        x_sbhd = _q_and_k(qkv_sbc, h, d)
        means_rh = norm_reference.square_means(x_sbhd.flatten(0, 1), d if norms.sizes is None else 1)
        means_rh = means_rh if norms.sizes is None else norms.means(means_rh, heads)
        rstd_rh = norm_reference.reciprocal_deviation(means_rh, norms.eps)
        qk = norm_reference.normalized_and_rotated(x_sbhd, rstd_rh, weight_hd, cos, sin, **options)
    assert rstd_rh is not None
    q, k = qk.split_with_sizes([heads, groups], 2)
    return q, k, qkv_sbc[..., h * d :].unflatten(-1, (groups, d)), rstd_rh


def _q_and_k(qkv_sbc: Tensor, heads: int, d: int) -> Tensor:
    return qkv_sbc[..., : heads * d].unflatten(-1, (heads, d))


def _has_kernel(x: Tensor, cos: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and cos.dtype == torch.float32


def _rotated_and_split(
    qkv_sbc: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k in `qkv_sbc` in place, and return q, k and v as views of it."""
    d = 2 * cos.shape[-1]
    if _has_kernel(qkv_sbc, cos):
        _kernels().rotate_qkv_(qkv_sbc, heads, cos, sin)
    else:
        rotated = qkv_sbc[..., : (heads + groups) * d].unflatten(-1, (-1, d))
        rotated.copy_(rotate(rotated, cos, sin))
    s, b, _ = qkv_sbc.shape
    q, k, v = qkv_sbc.view(s, b, heads + 2 * groups, d).split_with_sizes([heads, groups, groups], 2)
    return q, k, v


class _RotateHeads(Function):
    @staticmethod
    def forward(ctx: Any, x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x_sbad, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dy_sbad, cos, -sin), None, None


def _rotated(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if _has_kernel(x_sbad, cos):
        rotated: Tensor = _kernels().rotate_heads(x_sbad.contiguous(), cos, sin)
        return rotated
    return rotate(x_sbad, cos, sin).to(x_sbad.dtype)


def rotate_heads(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[s, b, a, d]` in fp32 or wider; cos and sin are `[s, 1 or b, 1, d/2]`."""
    return _RotateHeads.apply(x_sbad, cos, sin)


def rotated_neighbors(x_sbar: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate pairs of neighboring channels, and put the first channels of all pairs first.

    Without `rotary`, `x_sbar` is returned unchanged.
    """
    if rotary is None:
        return x_sbar
    return rotate_heads(x_sbar.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), *rotary)
