"""FP8 reduce-scatter: gradients are sent in FP8 to the rank that owns their sum, which adds them in fp32.

Each rank quantizes the other ranks' slices of a bucket and sends each to its owner, who adds what it receives to its
own slice in fp32 in the order of ranks. So a gradient is rounded at most once, and the sum is never rounded to FP8; a
ring that adds on the way, as in NCCL's reductions, would round at every hop. The owner's own gradients are not rounded.

Quantized as in MXFP8: E4M3, with a power-of-two `scale_inv` that brings the largest value of each block of 64 into
(224, 448]. Nothing saturates, and the cast rounds `x` by at most `max(|x| / 16, scale_inv / 1024)`: half a unit of a
3-bit mantissa, or of the subnormals. Blocks are 64 elements because slices are multiples of 64
(`megafp8.data_parallel.buckets`). `scale_inv` is sent as its exponent, E8M0, one byte, together with the data, so that
a bucket needs one collective.

A value that is not finite must arrive as such, so that the norm is not finite and the step is skipped. E4M3 data cannot
represent an infinity, so a block that has an infinity or a NaN gets the `scale_inv` NaN, and is all NaN in the sum.

The packed format: `[n + e]` bytes, n of data, then the n / 64 exponents, padded to a multiple of 64 bytes. A rank
sends, and receives, `65 / 64 · (r - 1) / r` bytes a gradient, and holds both until they are added. On CUDA each
function is one kernel; the references here are what these must reproduce bit for bit.

Shapes: r ranks, n elements of a slice, b blocks of it, m = r - 1 other ranks, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.blocks import block_amax
from megafp8.fp8.formats import E4M3
from megafp8.fp8.quantize import dequantize, quantize
from megafp8.fp8.recipes.mxfp8 import e8m0_decode
from megafp8.fp8.scaling import scale_from_amax
from megafp8.fp8.tensor import ROW

BLOCK = 64


def packed_bytes(n: int) -> int:
    """Bytes of a packed slice of n elements, a multiple of 64."""
    return n + -(-n // BLOCK**2) * BLOCK


def quantize_and_pack(x_rn: Tensor, own: int) -> Tensor:
    """Quantize a bucket, fp32 `[r, n]`, a row for each rank, without row `own`: uint8 `[m, packed_bytes(n)]`."""
    assert x_rn.dtype == torch.float32
    assert x_rn.shape[1] % BLOCK == 0
    if x_rn.is_cuda:
        from megafp8.kernels import fp8_reduce  # needs Triton, which comes with torch's CUDA builds

        return fp8_reduce.quantize_and_pack(x_rn, own, block=BLOCK, nbytes=packed_bytes(x_rn.shape[1]))
    return quantize_and_pack_reference(x_rn, own)


def unpack_and_sum(own_n: Tensor, packed_m: Tensor, own: int) -> None:
    """Replace rank `own`'s slice, fp32 `[n]`, by the sum of all ranks' in order; `packed_m`: the other ranks'."""
    assert own_n.dtype == torch.float32
    if own_n.is_cuda:
        from megafp8.kernels import fp8_reduce

        fp8_reduce.unpack_and_sum(own_n, packed_m, own, block=BLOCK)
    else:
        unpack_and_sum_reference(own_n, packed_m, own)


def quantize_and_pack_reference(x_rn: Tensor, own: int) -> Tensor:
    """`quantize_and_pack` in plain PyTorch."""
    x_mn = torch.cat([x_rn[:own], x_rn[own + 1 :]])
    m, n = x_mn.shape
    x_b64 = x_mn.reshape(-1, BLOCK)
    amax_b1 = block_amax(x_b64, ROW)
    scale_b1 = scale_from_amax(amax_b1, E4M3.max, power_of_two=True)
    exponent_b1 = torch.where(amax_b1.isfinite(), 254 - (scale_b1.view(torch.int32) >> 23), 255).to(torch.uint8)
    data = quantize(x_b64, scale_b1, E4M3).view(torch.uint8).view(m, n)
    packed = torch.cat([data, exponent_b1.view(m, n // BLOCK)], dim=1)
    return F.pad(packed, (0, packed_bytes(n) - packed.shape[1]))


def unpack_and_sum_reference(own_n: Tensor, packed_m: Tensor, own: int) -> None:
    """`unpack_and_sum` in plain PyTorch."""
    n = own_n.numel()
    data_mb64 = packed_m[:, :n].view(E4M3.dtype).unflatten(1, (-1, BLOCK))
    scale_inv_mb1 = e8m0_decode(packed_m[:, n : n + n // BLOCK].contiguous()).unsqueeze(-1)
    terms = [dequantize(data, scale_inv).flatten() for data, scale_inv in zip(data_mb64, scale_inv_mb1)]
    total = torch.zeros_like(own_n)
    for term in [*terms[:own], own_n, *terms[own:]]:
        total += term
    own_n.copy_(total)
