"""Rotary embedding of the packed qkv, where it lies.

Plain PyTorch turns q and k through nine temporaries in fp32, some sixty bytes an element. What must move is four: every
bf16 element of a q or k head is read once and written once. So one kernel turns both over the memory of the qkv
product, whose own gradient never needs the values it overwrites, and leaves v alone. Turning is orthogonal: the
backward is the same kernel with the sine negated, and nothing but the tables is kept for it.

A program takes some rows; a row is one head of one token, its two halves lie d/2 apart and are read as two tiles of
16-byte accesses. Rows run over tokens and heads alike, so that any number of heads fills the programs. The heads of one
token read the same angles, from L1.

The backward may not write over the gradient it is given, which autograd may have handed to others too. It writes a new
tensor, and copies the v heads in the same pass. What this gives up: attention hands back dq, dk and dv apart, and
gathering them is a pass that this kernel could have done as well.

The arithmetic is that of `apply_rotary` in `megafp8.models.rotary`, bit for bit: fp32, two products and a sum, no
multiply-add contraction, one rounding at the end. Triton's interpreter reads and writes bf16 wrongly: there the kernel
is given fp32, and torch rounds.

Shapes: s sequence, b micro-batch, c = (a + 2g)·d channels of a query heads, g key and g value heads of width d.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.fp8.kernels.arithmetic import readable

_PAIRS = 2048  # of a program: 16 a thread, four 16-byte loads in flight


@triton.jit
def rotary_kernel(x_sbc, y_sbc, cos, sin, cos_stride_s, cos_stride_b, rows, b, c, heads, turned, D: tl.constexpr,
                  INVERSE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Rows of the first `heads` heads of each token; of those the first `turned` are turned, the others copied."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    head = row % heads
    j = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (j < D // 2)[None, :]
    turns = (head < turned)[:, None]
    at = (token.to(tl.int64) * c + head * D)[:, None] + j[None, :]
    angle = (token // b * cos_stride_s + token % b * cos_stride_b)[:, None] + j[None, :]
    first = tl.load(x_sbc + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_sbc + D // 2 + at, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=inside & turns, other=1.0)
    sine = tl.load(sin + angle, mask=inside & turns, other=0.0)
    if INVERSE:
        sine = sine * -1.0  # not -sine: older Tritons take it from 0, which loses a zero's sign
    # Selected, not multiplied by 1 and 0: an infinity among the values copied must not make its partner NaN.
    y_first = tl.where(turns, first * cosine - second * sine, first)
    y_second = tl.where(turns, second * cosine + first * sine, second)
    tl.store(y_sbc + at, y_first.to(y_sbc.dtype.element_ty), mask=inside)
    tl.store(y_sbc + D // 2 + at, y_second.to(y_sbc.dtype.element_ty), mask=inside)


def _turn(x_sbc: Tensor, y_sbc: Tensor, num_heads: int, cos: Tensor, sin: Tensor, *, inverse: bool) -> None:
    """Write `x_sbc` with its q and k heads turned to `y_sbc`, which may be `x_sbc` itself."""
    s, b, c = x_sbc.shape
    half = cos.shape[-1]
    d = 2 * half
    groups = (c // d - num_heads) // 2
    turned = num_heads + groups
    assert c == (turned + groups) * d, f"{c} channels are not {num_heads} q heads of {d}, and k and v heads"
    assert cos.dtype == sin.dtype == torch.float32
    assert x_sbc.dtype in (torch.bfloat16, torch.float32)
    assert x_sbc.is_contiguous()
    cos, sin = cos.expand(s, b, half), sin.expand(s, b, half)  # one angle for all samples: stride 0
    assert cos.stride() == sin.stride()
    assert cos.stride(-1) == 1
    if not x_sbc.numel():
        return
    heads = turned if y_sbc is x_sbc else turned + groups
    rows = s * b * heads
    width = triton.next_power_of_2(half)
    tile = max(1, _PAIRS // width)
    source = readable(x_sbc)
    target = source if y_sbc is x_sbc else readable(y_sbc)
    rotary_kernel[(triton.cdiv(rows, tile),)](
        source, target, cos, sin, cos.stride(0), cos.stride(1), rows, b, c, heads, turned, D=d,
        INVERSE=inverse, ROWS=tile, HALF=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if target is not y_sbc:
        y_sbc.copy_(target)


def rotate_qkv_(qkv_sbc: Tensor, num_heads: int, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    """Turn the q and k heads of `qkv_sbc` in place, back if `inverse`, and return it. Twin: `apply_rotary`.

    `qkv_sbc` `[s, b, (a + 2g)·d]`, contiguous bf16 or fp32, is [q heads | k heads | v heads]; `num_heads` is a. `cos`
    and `sin` are fp32 `[s, 1 or b, d/2]` in one layout, neighbours in the last dim. Autograd does not see the change:
    `RotateQkv` is for training.
    """
    _turn(qkv_sbc, qkv_sbc, num_heads, cos, sin, inverse=inverse)
    return qkv_sbc


class RotateQkv(Function):
    """`rotate_qkv_` that autograd knows of: `RotateQkv.apply(qkv_sbc, num_heads, cos, sin)` changes and returns qkv.

    Autograd refuses it, as any change in place, where a backward needs the values before. A qkv that is a view made
    inside another Function is refused too: make the view outside.
    """

    @staticmethod
    def forward(ctx: Any, qkv_sbc: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.mark_dirty(qkv_sbc)
        ctx.save_for_backward(cos, sin)
        ctx.num_heads = num_heads
        return rotate_qkv_(qkv_sbc, num_heads, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv_sbc: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        dx_sbc = torch.empty_like(dqkv_sbc, memory_format=torch.contiguous_format)
        _turn(dqkv_sbc.contiguous(), dx_sbc, ctx.num_heads, cos, sin, inverse=True)
        return dx_sbc, None, None, None
