"""Gradients on their way to the rank that sums them: FP8 codes, a power of two for each 64, one message a rank.

A bucket of gradients is cut into a slice for each rank. Each rank casts the slices of the others and sends each to its
owner, who adds what the others sent to its own, in fp32 and in the order of ranks. So a gradient is rounded once, at
most, and its sum not at all in FP8: a ring that adds on the way, as NCCL's reductions do, would round at every hop. The
owner's share is not rounded.

Cast as in MXFP8: E4M3 under a factor that brings a block's largest value into (224, 448], so nothing saturates and only
the cast rounds, `x` by at most `max(|x| / 16, factor / 1024)`, that is, half a unit of a 3-bit mantissa, or of the
subnormals. A block is 64 neighbours because slices are multiples of 64 (`megafp8.data_parallel.buckets`). Its factor
travels as its exponent, E8M0, one byte. With both in one message there is one collective for a bucket.

What is not finite must arrive, for the norm to become so and the step to be skipped. Codes cannot say it, an infinity
saturates; so a block with an infinity or a NaN in it has the factor NaN, and all of it is NaN in the sum.

A message `[n + e]` of bytes: n codes, then the n / 64 exponents, padded to a multiple of 64 so that all messages begin
aligned. A rank sends, and receives, `65 / 64 · (r - 1) / r` bytes a gradient, and holds both until they are added up.
On CUDA casting is one kernel and adding up another; the plain versions here are what they must reproduce bit for bit.

Shapes: r ranks, n elements of a slice, b blocks of it, m messages: r - 1, in the order of the other ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.formats import E4M3
from megafp8.fp8.quantize import block_amax, dequantize, quantize, scale_from_amax
from megafp8.fp8.recipes.mxfp8 import e8m0_decode
from megafp8.fp8.tensor import ROW

BLOCK = 64


def message_bytes(n: int) -> int:
    """Of a slice of n elements, a multiple of 64."""
    return n + -(-n // BLOCK**2) * BLOCK


def pack(x_rn: Tensor, own: int) -> Tensor:
    """Cast a bucket, fp32 `[r, n]`, a row for each rank: messages to all but `own`, uint8 `[m, message_bytes(n)]`."""
    assert x_rn.dtype == torch.float32
    assert x_rn.shape[1] % BLOCK == 0
    if x_rn.is_cuda:
        from megafp8.kernels import fp8_reduce as messages  # needs Triton, which comes with torch's CUDA builds

        return messages.pack(x_rn, own)
    return pack_plain(x_rn, own)


def add_up(own_n: Tensor, messages_m: Tensor, own: int) -> None:
    """Replace rank `own`'s slice, fp32 `[n]`, by the sum of all ranks' in their order, with what the others sent."""
    assert own_n.dtype == torch.float32
    if own_n.is_cuda:
        from megafp8.kernels import fp8_reduce as messages

        messages.add_up(own_n, messages_m, own)
    else:
        add_up_plain(own_n, messages_m, own)


def pack_plain(x_rn: Tensor, own: int) -> Tensor:
    """`pack` in plain PyTorch."""
    x_mn = torch.cat([x_rn[:own], x_rn[own + 1 :]])
    m, n = x_mn.shape
    x_b64 = x_mn.reshape(-1, BLOCK)
    amax_b1 = block_amax(x_b64, ROW)
    scale_b1 = scale_from_amax(amax_b1, E4M3.max, power_of_two=True)
    exponent_b1 = torch.where(amax_b1.isfinite(), 254 - (scale_b1.view(torch.int32) >> 23), 255).to(torch.uint8)
    codes = quantize(x_b64, scale_b1, E4M3).view(torch.uint8).view(m, n)
    exponents = exponent_b1.view(m, n // BLOCK)
    return F.pad(torch.cat([codes, exponents], dim=1), (0, message_bytes(n) - n - n // BLOCK))


def add_up_plain(own_n: Tensor, messages_m: Tensor, own: int) -> None:
    """`add_up` in plain PyTorch."""
    n = own_n.numel()
    codes_mb64 = messages_m[:, :n].view(E4M3.dtype).unflatten(1, (-1, BLOCK))
    factor_mb1 = e8m0_decode(messages_m[:, n : n + n // BLOCK].contiguous()).unsqueeze(-1)
    terms = [dequantize(codes, factors).flatten() for codes, factors in zip(codes_mb64, factor_mb1)]
    total = torch.zeros_like(own_n)
    for term in [*terms[:own], own_n, *terms[own:]]:
        total += term
    own_n.copy_(total)
