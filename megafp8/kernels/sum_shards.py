"""Sum of partial products of the ranks of a group, in one pass. Reference: `tp_overlap.add_shares` on a CPU.

To torch this is a reduction over the first dim, whose kernel reaches half of the bandwidth here; adding two at a time
would round in between and pass over memory again. So a program reads a block of every rank's, adds them in fp32 in the
order of ranks, and rounds once.

Shapes: t partial products of n elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # of a program: in bf16, two 16-byte loads from each rank's for each of its threads


@triton.jit
def add_kernel(partial_tn, sum_n, n, T: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = tl.load(partial_tn + i, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, T):
        total += tl.load(partial_tn + rank * n + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_n + i, total.to(sum_n.dtype.element_ty), mask=inside)


def add(partial_trn: Tensor) -> Tensor:
    """`[t, ...]`, contiguous, fp32 or narrower -> `[...]`."""
    assert partial_trn.is_contiguous()
    total = torch.empty_like(partial_trn[0])
    n = total.numel()
    if n:
        add_kernel[(-(-n // _BLOCK),)](partial_trn, total, n, T=len(partial_trn), BLOCK=_BLOCK, num_warps=4)
    return total
