"""Kernel that finds the largest values of each row in descending order: the experts of a token.

Reference: a stable sort of all values, `torch.sort(x, dim=1, descending=True, stable=True)`. It costs as much as the
router's linear layer. The kernel keeps a row in registers and takes its maximum k times. A value and its column form
one 64-bit integer. The high half holds the value's bits, mapped so that integers have the order of the values. The low
half holds the column, counted from the last, so that the first of equal values is the largest. NaN is larger than all
numbers, and zeros of either sign are equal.

Shapes: n rows, e columns, k values per row.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, next_power_of_2
from megafp8.kernels.launch import TritonKernel

MOST_COLUMNS = 1024
"""Largest number of columns. More would not fit into registers."""
_ELEMENTS = 512  # per program. A program is one warp, so that maxima need no shared memory


@TritonKernel
def largest_kernel(x_ne, columns_nk, n, e, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the columns of the K largest values of ROWS rows, as K maxima over pairs of value and column."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    inside = (i < n)[:, None] & (j < e)[None, :]
    x = tl.load(x_ne + i.to(tl.int64)[:, None] * e + j[None, :], mask=inside, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(x != x, 0x7FFFFFFF, order)
    order = tl.where(inside, order, -0x80000000)
    pairs = (order.to(tl.int64) << 32) + (WIDTH - 1 - j).to(tl.int64)[None, :]
    for k in tl.static_range(K):
        column = WIDTH - 1 - (tl.max(pairs, axis=1) & 0xFFFFFFFF)
        tl.store(columns_nk + i.to(tl.int64) * K + k, column, mask=i < n)
        pairs = tl.where(j[None, :] == column[:, None], -0x8000000000000000, pairs)


def largest(x_ne: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest values of each row in descending order, int64 `[n, count]`.

    Of equal values the first column comes first. `x_ne` is contiguous fp32 with at most `MOST_COLUMNS` columns.
    """
    n, e = x_ne.shape
    assert x_ne.dtype == torch.float32
    assert x_ne.is_contiguous()
    assert count <= e <= MOST_COLUMNS
    columns_nk = torch.empty(n, count, dtype=torch.int64, device=x_ne.device)
    if n:
        width = next_power_of_2(e)
        rows = max(1, _ELEMENTS // width)
        kernel = largest_kernel.bind(K=count, ROWS=rows, WIDTH=width, num_warps=1)
        kernel.launch((ceil_div(n, rows), 1), (x_ne, columns_nk), (n, e))
    return columns_nk
