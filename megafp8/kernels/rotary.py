"""Rotary embedding of the packed qkv in place, or of some heads. Reference: `rotate` in `megafp8.numerics.sources`.

PyTorch rotates q and k through nine fp32 temporaries, some sixty bytes an element. Four would suffice: each element of
a q or k head is read and written once. So one kernel rotates both in the output of the qkv linear layer, whose backward
does not need the values it overwrites, and leaves v alone. Backward has no kernel here: `sources.QKVGrad` gathers the
gradients of q, k and v, rotates them back and casts them in one.

A program takes some rows; a row is one head of one token, whose two halves, d/2 apart, are read as two tiles of 16-byte
accesses. Rows run over tokens and heads, so that any number of heads fills the programs. The heads of a token read the
same angles, from L1.

Bit for bit the reference: fp32, two products and a sum without contraction, one rounding at the end. Triton's
interpreter misreads and misrounds bf16: there the kernel gets fp32, and torch rounds.

Shapes: s sequence, b micro-batch, c = (a + 2g)·d channels of a query heads, g key and g value heads of width d.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import BoundKernel, Kernel

_PAIRS = 2048  # of a program: 16 a thread, four 16-byte loads in flight


@Kernel
def rotary_kernel(x_sbc, out_sbc, cos, sin, cos_stride_s, cos_stride_b, rows, b, c, heads, D: tl.constexpr,
                  ROWS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Rotate some rows of the first `heads` heads of each token; `out_sbc` may be `x_sbc`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // heads
    j = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (j < D // 2)[None, :]
    at = (token.to(tl.int64) * c + row % heads * D)[:, None] + j[None, :]
    angle = (token // b * cos_stride_s + token % b * cos_stride_b)[:, None] + j[None, :]
    first = tl.load(x_sbc + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_sbc + D // 2 + at, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=inside, other=1.0)
    sine = tl.load(sin + angle, mask=inside, other=0.0)
    tl.store(out_sbc + at, (first * cosine - second * sine).to(out_sbc.dtype.element_ty), mask=inside)
    tl.store(out_sbc + D // 2 + at, (second * cosine + first * sine).to(out_sbc.dtype.element_ty), mask=inside)


@cache
def _bound(half: int) -> tuple[BoundKernel, int]:
    """The kernel for heads of two halves, and rows of a program."""
    width = next_power_of_2(half)
    tile = max(1, _PAIRS // width)
    return rotary_kernel.bind(D=2 * half, ROWS=tile, HALF=width, num_warps=4, enable_fp_fusion=False), tile


def rotate_qkv_(qkv_sbc: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the q and k heads of `qkv_sbc` in place and return it.

    `qkv_sbc` `[s, b, (a + 2g)·d]`, contiguous bf16 or fp32, is [q heads | k heads | v heads]; `num_heads` is a. `cos`
    and `sin` are fp32 `[s, 1 or b, 1, d/2]` in one layout, contiguous in the last dim. Autograd does not notice.
    """
    d = 2 * cos.shape[-1]
    groups = (qkv_sbc.shape[2] // d - num_heads) // 2
    heads = num_heads + groups
    assert qkv_sbc.shape[2] == (heads + groups) * d, f"not {num_heads} q heads of {d}, and k and v heads"
    target = kernel_input(qkv_sbc)
    _launch(target, target, heads, cos, sin)
    if target is not qkv_sbc:
        qkv_sbc.copy_(target)
    return qkv_sbc


def rotate_heads(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The heads `x_sbad`, contiguous, of 16 or 32 bits, rotated. `cos`, `sin`: as of `rotate_qkv_`."""
    x_sbc = kernel_input(x_sbad.flatten(2))
    out_sbc = torch.empty_like(x_sbc)
    _launch(x_sbc, out_sbc, x_sbad.shape[2], cos, sin)
    return out_sbc.to(x_sbad.dtype).view_as(x_sbad)


def _launch(x_sbc: Tensor, out_sbc: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `heads` heads."""
    (s, b, c), half = x_sbc.shape, cos.shape[-1]
    assert cos.dtype == sin.dtype == torch.float32
    assert x_sbc.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert x_sbc.is_contiguous()
    stride_s, stride_b, _, stride_d = cos.stride()
    assert cos.stride() == sin.stride()
    assert stride_d == 1
    assert cos.shape == sin.shape == (s, cos.shape[1], 1, half)
    assert cos.shape[1] in (1, b)
    if x_sbc.numel():
        rows = s * b * heads
        kernel, tile = _bound(half)
        numbers = (stride_s, stride_b if cos.shape[1] == b else 0, rows, b, c, heads)  # 0: one angle for all samples
        kernel.launch((ceil_div(rows, tile), 1), (x_sbc, out_sbc, cos, sin), numbers)
