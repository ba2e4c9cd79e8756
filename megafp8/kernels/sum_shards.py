"""Adding up the shares of a product that the ranks of a group computed, in one pass.

A sum over the first dim is a reduction to torch, whose kernel for those reaches half of the bandwidth here; and adding
two at a time would round in between and pass over memory again. So a program reads a stretch of every share, adds them
in fp32 in the order of ranks, and rounds once.

Shapes: t shares of n elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRETCH = 2048  # of a program: two 16-byte loads of each share for each of its threads, in bf16


@triton.jit
def add_kernel(shares_tn, sum_n, n, T: tl.constexpr, STRETCH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = i < n
    total = tl.load(shares_tn + i, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, T):
        total += tl.load(shares_tn + rank * n + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_n + i, total.to(sum_n.dtype.element_ty), mask=inside)


def add(shares_trn: Tensor) -> Tensor:
    """`[t, ...]`, contiguous, fp32 or narrower -> `[...]`. Twin: `exchange.add_shares` on a CPU."""
    assert shares_trn.is_contiguous()
    total = torch.empty_like(shares_trn[0])
    n = total.numel()
    if n:
        add_kernel[(-(-n // _STRETCH),)](shares_trn, total, n, T=len(shares_trn), STRETCH=_STRETCH, num_warps=4)
    return total
