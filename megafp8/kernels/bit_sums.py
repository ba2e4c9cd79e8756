"""Bit sums of many tensors in one launch. Reference: `megafp8.training.consistency.bit_sums_reference`.

`_PROGRAMS` programs read blocks of a tensor's words in turn, and add their two sums to the tensor's sums by atomics.
Sums are integers modulo 2^64, so the order of additions makes no difference. Tensors are read in place, by address, and
each byte is read once.

Shapes: t tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256  # per tensor; with a small tensor, some are idle
_BLOCK = 2048


@triton.jit
def bit_sums_kernel(addresses_t, words_t, sums_t2, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Add a program's words of one tensor, plain and weighted by position, to the tensor's two sums."""
    tensor, program = tl.program_id(1), tl.program_id(0)
    count = tl.load(words_t + tensor)
    if program * BLOCK < count:
        base = tl.load(addresses_t + tensor).to(tl.pointer_type(tl.int32))
        plain = tl.zeros([BLOCK], dtype=tl.int64)
        weighted = tl.zeros([BLOCK], dtype=tl.int64)
        start = program.to(tl.int64) * BLOCK
        while start < count:
            i = start + tl.arange(0, BLOCK)
            word = tl.load(base + i, mask=i < count, other=0).to(tl.int64)
            plain += word
            weighted += word * (i + 1)
            start += PROGRAMS * BLOCK
        tl.atomic_add(sums_t2 + 2 * tensor, tl.sum(plain), sem="relaxed")
        tl.atomic_add(sums_t2 + 2 * tensor + 1, tl.sum(weighted), sem="relaxed")


def bit_sums(words: Sequence[Tensor]) -> Tensor:
    """Return the two bit sums of each tensor, int64 `[t, 2]`; each of `words` is int32 `[n]`, all on one device."""
    assert all(w.dtype == torch.int32 and w.is_contiguous() for w in words)
    device = words[0].device
    sums_t2 = torch.zeros(len(words), 2, dtype=torch.int64, device=device)
    table = torch.tensor([[w.data_ptr(), w.numel()] for w in words], dtype=torch.int64).T.contiguous().to(device)
    bit_sums_kernel[(_PROGRAMS, len(words))](table[0], table[1], sums_t2, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK)
    return sums_t2
