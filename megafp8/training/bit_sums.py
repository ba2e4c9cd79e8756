"""Checksums of tensors' bits that are exact for small changes and cheap on a GPU.

The bits of a tensor are read as n little-endian 32-bit words w, signed, the last one filled up with zero bytes. Its
*bit sums* are, modulo 2^64,

    sum of w[i]                sum of (i + 1) · w[i]

Two tensors of one size that differ in one word differ in the first sum. If they differ in two words, either the first
sum differs, or the differences are d and -d, with |d| < 2^32, and the second sum differs by (i - j) · d, which is not 0
modulo 2^64 while there are fewer than 2^31 words between them. So any change of one or two words is seen, whichever
bits: a flipped bit, a NaN, two values that changed places. Other changes go unseen with a probability of about 2^-64.

A CRC-32 or a hash would have to read bytes in their order; these sums are reductions, at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1 << 20  # words whose products are in memory at a time


def words_of(x: Tensor) -> Tensor:
    """The bits of `x`, of any dtype, as int32 `[n]`: a view where memory allows it, else a copy."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4 or flat.data_ptr() % 4 or flat.storage_offset() % 4:
        flat = F.pad(flat, (0, -flat.numel() % 4)).clone()
    return flat.view(torch.int32)


def bit_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The bit sums of each of `tensors`: int64 `[t, 2]` on `device`, where most of them are. Does not wait for it."""
    words = [words_of(x.to(device)) for x in tensors]
    if device.type == "cuda" and words:
        from megafp8.kernels.bit_sums import bit_sums as on_gpu  # needs Triton, which comes with CUDA builds

        return on_gpu(words)
    return reference(words)


def reference(words: Sequence[Tensor]) -> Tensor:
    """The bit sums of `words`, int32 `[n]` each, in plain PyTorch: int64 `[t, 2]`."""
    sums = torch.zeros(len(words), 2, dtype=torch.int64)
    for row, w_n in zip(sums, words):
        for start in range(0, w_n.numel(), _CHUNK):
            chunk = w_n[start : start + _CHUNK].long()
            place = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            row += torch.stack([chunk.sum(), (chunk * place).sum()]).cpu()
    return sums
