"""In-place multiplication by a factor on the device, without a pass over memory if the factor is 1.

Gradients are clipped only in few steps of a run. torch's `mul_` reads and writes all gradients in every step, unless
the host checks the factor first and waits for it. Here each program of the kernel checks the factor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div

_STRETCH = 4096  # elements that a program multiplies in one iteration
_PROGRAMS = 2048


@triton.jit
def multiply_kernel(x_n, factor, n, STRETCH: tl.constexpr):
    """Multiply every element by the factor, unless the factor is 1."""
    by = tl.load(factor)
    if by != 1.0:
        i = tl.program_id(0).to(tl.int64) * STRETCH
        while i < n:
            at = i + tl.arange(0, STRETCH)
            tl.store(x_n + at, tl.load(x_n + at, mask=at < n, other=0.0) * by, mask=at < n)
            i += tl.num_programs(0) * STRETCH


def multiply_(x_n: Tensor, factor: Tensor) -> None:
    """Multiply the contiguous fp32 tensor `x_n` in place by `factor`, fp32 `[]`."""
    assert x_n.is_contiguous()
    n = x_n.numel()
    if n:
        multiply_kernel[(min(_PROGRAMS, ceil_div(n, _STRETCH)),)](x_n, factor, n, STRETCH=_STRETCH, num_warps=8)
