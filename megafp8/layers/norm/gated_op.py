"""Gated RMSNorm of a recurrence's outputs. The gate comes before the norm (Mamba-2) or after it (Gated DeltaNet).

On a GPU, `megafp8.layers.norm.gated_kernel` computes the norm in one pass and saves only the inputs. On other devices
and in fp64, PyTorch's operations compute it, and backward recomputes them.

Shapes: s sequence length, b micro-batch size, a heads (or groups of heads) of c channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafp8.numerics.implementations import has_kernel, triton_module

_kernels = triton_module("megafp8.layers.norm.gated_kernel")


def gated_norm(
    x_sbac: Tensor, z_sbc: Tensor, weight: Tensor, eps: float, *, silu: bool = True, gate_first: bool = False
) -> Tensor:
    """Compute `gated` with the fastest implementation for the tensors; return `[s, b, a·c]` in the dtype of `z_sbc`."""
    if has_kernel(x_sbac) and z_sbc.stride(-1) == 1:
        return _GatedNorm.apply(x_sbac, z_sbc, weight, eps, silu, gate_first)
    if not torch.is_grad_enabled():
        return gated(x_sbac, z_sbc, weight, eps, silu, gate_first)
    return checkpoint(
        gated, x_sbac, z_sbc, weight, eps, silu, gate_first, use_reentrant=False, preserve_rng_state=False
    )


def gated(x_sbac: Tensor, z_sbc: Tensor, weight: Tensor, eps: float, silu: bool, gate_first: bool) -> Tensor:
    """Normalize heads over their channels, multiply by `weight`, and multiply by a gate.

    Args:
        x_sbac: Outputs of the recurrence.
        z_sbc: Input of the gate, `[s, b, a·c]`.
        weight: `[c]` for all heads, or `[a, c]`.
        eps: Number added to the mean square.
        silu: Whether the gate is SiLU of `z_sbc`; otherwise it is the sigmoid.
        gate_first: Whether heads are multiplied by the gate before they are normalized.

    Returns:
        `[s, b, a·c]` in the dtype of `z_sbc`.
    """
    wide = torch.promote_types(x_sbac.dtype, torch.float32)
    gate = z_sbc.to(wide).unflatten(-1, x_sbac.shape[-2:])
    factor = F.silu(gate) if silu else gate.sigmoid()
    x = x_sbac.to(wide) * factor if gate_first else x_sbac.to(wide)
    y = F.rms_norm(x, x.shape[-1:], eps=eps) * weight.to(wide)
    return (y if gate_first else y * factor).to(z_sbc.dtype).flatten(-2)


class _GatedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x_sbac: Tensor, z_sbc: Tensor, weight: Tensor, eps: float, silu: bool, gate_first: bool
    ) -> Tensor:
        ctx.save_for_backward(x_sbac, z_sbc, weight)
        ctx.eps, ctx.options = eps, {"silu": silu, "gate_first": gate_first}
        y = _kernels().forward(_rows(x_sbac), z_sbc.flatten(0, 1), weight, eps, **ctx.options)
        return y.view(*x_sbac.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbc: Tensor) -> tuple[Tensor | None, ...]:
        x_sbac, z_sbc, weight = ctx.saved_tensors
        x = _rows(x_sbac)
        dx, dz, dw = _kernels().backward(
            dy_sbc.contiguous().view_as(x), x, z_sbc.flatten(0, 1), weight, ctx.eps, **ctx.options
        )
        return dx.view(x_sbac.shape), dz.view(z_sbc.shape), dw.to(weight.dtype), None, None, None


def _rows(x_sbac: Tensor) -> Tensor:
    return x_sbac.contiguous().flatten(0, 1)
