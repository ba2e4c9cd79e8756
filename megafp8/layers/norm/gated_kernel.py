"""Kernels for the gated RMSNorm of heads, one pass in each direction.

Reference: `gated` in `megafp8.layers.norm.gated_op`. In forward, a program computes a tile: some tokens of one head. In
backward, a program computes several tiles and adds up their weight gradients in fp32; PyTorch then adds the partial
sums of all programs in a fixed order. Forward saves only the inputs.

Shapes: r tokens, a heads of c channels.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from megafp8.kernels.arithmetic import ceil_div, next_power_of_2
from megafp8.kernels.launch import TritonKernel

_ELEMENTS = 1024
"""Elements of a tile, unless one token has more."""
_WARP_ELEMENTS = 512
"""Elements of a tile per warp. More would leave registers for too few programs, and wait for memory."""
_TILES = 32
"""Tiles of a program in backward."""


@jit
def _tile(x, z, z_stride, r, a, c, first, T: tl.constexpr, C: tl.constexpr):
    """Load a tile of x and of the gate's input, with tokens from `first` on, in fp32.

    Returns:
        Offsets of the tile in x and in z, the mask of its valid elements, and both tiles.
    """
    token, j, head = first + tl.arange(0, T), tl.arange(0, C), tl.program_id(1)
    inside = (token < r)[:, None] & (j < c)[None, :]
    at = (token.to(tl.int64) * a + head)[:, None] * c + j[None, :]
    at_z = token.to(tl.int64)[:, None] * z_stride + head * c + j[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + at_z, mask=inside, other=0.0).to(tl.float32)
    return at, at_z, inside, values, gate


@TritonKernel
def forward_kernel(x, z, weight, y, z_stride, r, a, c, w_stride, eps, SILU: tl.constexpr, BEFORE: tl.constexpr,
                   T: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Compute the gated norm of T tokens of one head."""
    at, _, inside, u, gate = _tile(x, z, z_stride, r, a, c, tl.program_id(0) * T, T, C)
    j = tl.arange(0, C)
    w = tl.load(weight + tl.program_id(1) * w_stride + j, mask=j < c, other=0.0).to(tl.float32)
    factor = 1 / (1 + tl.exp(-gate))
    if SILU:
        factor *= gate
    if BEFORE:
        u *= factor
    out = u * tl.rsqrt(tl.sum(u * u, axis=1) / c + eps)[:, None] * w[None, :]
    if not BEFORE:
        out *= factor
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@TritonKernel
def backward_kernel(dy, x, z, weight, dx, dz, dweight, z_stride, r, a, c, w_stride, eps, SILU: tl.constexpr,
                    BEFORE: tl.constexpr, T: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Compute the gradients of x and z, `[r, a, c]`, and each program's weight gradient, `[programs, a, c]`."""
    j, head = tl.arange(0, C), tl.program_id(1)
    w = tl.load(weight + head * w_stride + j, mask=j < c, other=0.0).to(tl.float32)
    sums = tl.zeros((C,), tl.float32)
    for tile in tl.range(TILES, num_stages=2):  # loads a tile ahead
        first = (tl.program_id(0) * TILES + tile) * T
        at, _, inside, value, gate = _tile(x, z, z_stride, r, a, c, first, T, C)
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        factor, slope = sigmoid, sigmoid * (1 - sigmoid)
        if SILU:
            factor, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
        u = value * factor if BEFORE else value
        rstd = tl.rsqrt(tl.sum(u * u, axis=1) / c + eps)[:, None]
        normed = u * rstd
        norm_gradient = gradient if BEFORE else gradient * factor
        sums += tl.sum(norm_gradient * normed, axis=0)
        norm_gradient *= w[None, :]
        du = rstd * (norm_gradient - normed * (tl.sum(norm_gradient * normed, axis=1) / c)[:, None])
        if BEFORE:
            dgate, du = du * value * slope, du * factor
        else:
            dgate = gradient * normed * w[None, :] * slope
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=inside)
        tl.store(dz + at, dgate.to(dz.dtype.element_ty), mask=inside)
    tl.store(dweight + (tl.program_id(0).to(tl.int64) * a + head) * c + j, sums, mask=j < c)


def _sizes(c: int) -> tuple[int, int, int]:
    """Return the tokens of a tile, its width, and the warps that compute it."""
    width = next_power_of_2(c)
    tokens = max(1, _ELEMENTS // width)
    return tokens, width, tokens * width // _WARP_ELEMENTS


def forward(x_rac: Tensor, z_rc: Tensor, weight: Tensor, eps: float, *, silu: bool, gate_first: bool) -> Tensor:
    """Return the gated norm `[r, a, c]`.

    `x_rac` is contiguous; `z_rc` `[r, a·c]` is contiguous in its last dim; `weight` is `[c]` or `[a, c]`.
    """
    (r, a, c), (tokens, width, warps) = x_rac.shape, _sizes(x_rac.shape[2])
    y_rac = torch.empty_like(x_rac)
    kernel = forward_kernel.bind(SILU=silu, BEFORE=gate_first, T=tokens, C=width, num_warps=warps)
    numbers = (z_rc.stride(0), r, a, c, c if weight.dim() == 2 else 0, eps)
    kernel.launch((ceil_div(r, tokens), a), (x_rac, z_rc, weight, y_rac), numbers)
    return y_rac


def backward(
    dy_rac: Tensor, x_rac: Tensor, z_rc: Tensor, weight: Tensor, eps: float, *, silu: bool, gate_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and z, `[r, a, c]`, and of the weight in fp32. `dy_rac` is contiguous."""
    (r, a, c), (tokens, width, warps) = x_rac.shape, _sizes(x_rac.shape[2])
    programs = ceil_div(r, tokens * _TILES)
    dx_rac, dz_rac = torch.empty_like(x_rac), torch.empty_like(x_rac)
    sums = torch.empty(programs, a, c, dtype=torch.float32, device=x_rac.device)
    kernel = backward_kernel.bind(SILU=silu, BEFORE=gate_first, T=tokens, TILES=_TILES, C=width, num_warps=warps)
    numbers = (z_rc.stride(0), r, a, c, c if weight.dim() == 2 else 0, eps)
    kernel.launch((programs, a), (dy_rac, x_rac, z_rc, weight, dx_rac, dz_rac, sums), numbers)
    return dx_rac, dz_rac, sums.sum(0) if weight.dim() == 2 else sums.sum((0, 1))
