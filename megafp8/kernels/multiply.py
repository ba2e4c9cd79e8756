"""Multiplication in place by a factor on the device, without a pass over memory where the factor is 1.

Gradients are clipped in few of the steps of a run. torch's `mul_` reads and writes all of them in every step, unless
the host looks at the factor first, and waits for it. Here each program looks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div

_STRETCH = 4096  # elements that a program multiplies at a time
_PROGRAMS = 2048


@triton.jit
def multiply_kernel(x_n, factor, n, STRETCH: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:
        i = tl.program_id(0).to(tl.int64) * STRETCH
        while i < n:
            at = i + tl.arange(0, STRETCH)
            tl.store(x_n + at, tl.load(x_n + at, mask=at < n, other=0.0) * by, mask=at < n)
            i += tl.num_programs(0) * STRETCH


def multiply_(x_n: Tensor, factor: Tensor) -> None:
    """`x_n *= factor`, fp32: contiguous x and a scalar tensor."""
    assert x_n.is_contiguous()
    n = x_n.numel()
    if n:
        multiply_kernel[(min(_PROGRAMS, ceil_div(n, _STRETCH)),)](x_n, factor, n, STRETCH=_STRETCH, num_warps=8)
