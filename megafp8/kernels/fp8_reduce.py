"""The FP8 reduce-scatter's quantization and summation: `megafp8.data_parallel.fp8_reduce`, one kernel each.

Quantizing reads 4 bytes a gradient and writes little more than one; summing reads one for each rank, and reads and
writes the 4 of the sum. In plain PyTorch both would move some 25 bytes a gradient.

`scale_inv` is a power of two, so products with it are exact, and sums are in the order of ranks: a fused multiply-add
could change nothing, and is disabled all the same.

Shapes: r ranks, n elements of a slice, m other ranks; a program has BLOCKS blocks of BLOCK elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.formats import E4M3
from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, codes, magnitude_bits, scale_of

_BLOCKS, _WARPS = 32, 4  # of a program: 16 elements a thread


@triton.jit
def pack_kernel(x_rn, packed, own, n, blocks, stride, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr,
                BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Some blocks of one rank's slice."""
    m = tl.program_id(1)
    r = m + (m >= own).to(tl.int32)
    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = b.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (b < blocks)[:, None]
    x = tl.load(x_rn + r.to(tl.int64) * n + at, mask=inside, other=0.0)
    bits = tl.max(magnitude_bits(x), axis=1)
    scale = scale_of(bits, FP8_MAX, 0.0, True)
    exponent = tl.where(bits < 0x7F800000, 254 - (scale.to(tl.int32, bitcast=True) >> 23), 255)
    out = packed + m.to(tl.int64) * stride
    tl.store(out + at, codes(x * scale[:, None], "e4m3", FP8_MAX, INTERPRETED), mask=inside)
    tl.store(out + n + b, exponent.to(tl.uint8), mask=b < blocks)


@triton.jit
def _values(packed, at, b, n, blocks):
    """Blocks of a packed slice in fp32."""
    inside = b < blocks
    code = tl.load(packed + at, mask=inside[:, None], other=0)
    e = tl.load(packed + n + b, mask=inside, other=0).to(tl.int32)
    bits = tl.where(e == 255, 0x7FC00000, tl.where(e == 0, 0x00400000, e << 23))  # E8M0: NaN, and a subnormal
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def sum_kernel(own_n, packed, own, others, n, blocks, stride, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Some blocks of the slice."""
    b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = b.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCKS, BLOCK], tl.float32)
    other = packed
    for _ in range(own):
        total += _values(other, at, b, n, blocks)
        other += stride
    total += tl.load(own_n + at, mask=(b < blocks)[:, None], other=0.0)
    for _ in range(own, others):
        total += _values(other, at, b, n, blocks)
        other += stride
    tl.store(own_n + at, total, mask=(b < blocks)[:, None])


def quantize_and_pack(x_rn: Tensor, own: int, *, block: int, nbytes: int) -> Tensor:
    """uint8 `[r - 1, nbytes]`, whose padding is not initialized."""
    r, n = x_rn.shape
    assert x_rn.is_contiguous()
    packed_m = torch.empty((r - 1, nbytes), dtype=torch.uint8, device=x_rn.device)
    blocks = n // block
    pack_kernel[(ceil_div(blocks, _BLOCKS), r - 1)](
        x_rn, packed_m, own, n, blocks, packed_m.stride(0), FP8_MAX=E4M3.max, INTERPRETED=INTERPRETED, BLOCK=block,
        BLOCKS=_BLOCKS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return packed_m


def unpack_and_sum(own_n: Tensor, packed_m: Tensor, own: int, *, block: int) -> None:
    assert own_n.is_contiguous()
    assert packed_m.is_contiguous()
    n = own_n.numel()
    blocks = n // block
    sum_kernel[(ceil_div(blocks, _BLOCKS),)](
        own_n, packed_m, own, packed_m.shape[0], n, blocks, packed_m.stride(0), BLOCK=block, BLOCKS=_BLOCKS,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
