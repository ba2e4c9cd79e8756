"""Sum of the partial products that the ranks of a group have computed, in one pass.

torch's kernel for a sum over the first dim reaches only half of the bandwidth. Adding two tensors at a time would round
in between and pass over memory again. Here a program reads a range of every partial sum, adds them in fp32 in the order
of the ranks, and rounds once.

Shapes: t partial sums of n elements.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div
from megafp8.kernels.launch import TritonKernel
from megafp8.parallel import tp_overlap

_STRETCH = 2048  # elements per program: in bf16, each thread loads 16 bytes of each partial sum twice


@TritonKernel
def sum_kernel(partials_tn, sum_n, n, T: tl.constexpr, STRETCH: tl.constexpr):
    """Sum a range of all T partial sums."""
    i = tl.program_id(0).to(tl.int64) * STRETCH + tl.arange(0, STRETCH)
    inside = i < n
    total = tl.load(partials_tn + i, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, T):
        total += tl.load(partials_tn + rank * n + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_n + i, total.to(sum_n.dtype.element_ty), mask=inside)


def sum_partials(partials_trn: Tensor) -> Tensor:
    """Sum the contiguous tensor `partials_trn` over its first dim: `[t, ...]` to `[...]`.

    Reference: `tp_overlap.sum_partials`, which also computes the sums of float64.
    """
    if partials_trn.dtype == torch.float64:
        return tp_overlap.sum_partials(partials_trn)
    assert partials_trn.is_contiguous()
    total = torch.empty_like(partials_trn[0])
    n = total.numel()
    if n:
        kernel = sum_kernel.bind(T=len(partials_trn), STRETCH=_STRETCH, num_warps=4)
        kernel.launch((ceil_div(n, _STRETCH), 1), (partials_trn, total), (n,))
    return total
