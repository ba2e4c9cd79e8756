"""Sum of the partial products that the ranks of a group computed, in one pass.

torch's kernel for a sum over the first dim reaches half of the bandwidth here; and adding two at a time would round in
between and pass over memory again. Here a program reads a stretch of every partial sum, adds them in fp32 in the order
of ranks, and rounds once.

Shapes: t partial sums of n elements.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div
from megafp8.kernels.launch import TritonKernel
from megafp8.parallel import tp_overlap

_STRETCH = 2048  # elements of a program: two 16-byte loads of each partial sum for each of its threads, in bf16


@TritonKernel
def sum_kernel(partials_tn, sum_n, n, T: tl.constexpr, STRETCH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = i < n
    total = tl.load(partials_tn + i, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, T):
        total += tl.load(partials_tn + rank * n + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_n + i, total.to(sum_n.dtype.element_ty), mask=inside)


def sum_partials(partials_trn: Tensor) -> Tensor:
    """`[t, ...]`, contiguous -> `[...]`. Reference, and used for float64: `tp_overlap.sum_partials`."""
    if partials_trn.dtype == torch.float64:
        return tp_overlap.sum_partials(partials_trn)
    assert partials_trn.is_contiguous()
    total = torch.empty_like(partials_trn[0])
    n = total.numel()
    if n:
        kernel = sum_kernel.bind(T=len(partials_trn), STRETCH=_STRETCH, num_warps=4)
        kernel.launch((ceil_div(n, _STRETCH), 1), (partials_trn, total), (n,))
    return total
