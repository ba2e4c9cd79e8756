"""The largest values of each row, in their order: the experts of a token.

Reference: a stable sort of all values, `torch.sort(x, dim=1, descending=True, stable=True)`, which costs as much as a
linear layer of the router. Here a row stays in registers, and its maximum is taken k times. A value and its column are
one integer of 64 bits: the value's bits so that they have its order, then the column counted from the last, so that of
equal values the first is the largest. NaN is larger than all numbers, and zeros of either sign are equal.

Shapes: n rows, e columns, k values of a row.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, next_power_of_2
from megafp8.kernels.launch import TritonKernel

MOST_COLUMNS = 1024
"""Most columns of a row: more would not fit into registers."""
_ELEMENTS = 512  # of a program, which is one warp: maxima need no shared memory


@TritonKernel
def largest_kernel(x_ne, columns_nk, n, e, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of the K largest values of ROWS rows: K maxima of pairs of a value and its column."""
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
    """Columns of the `count` largest values of each row, int64 `[n, count]`; of equal ones the first comes first.

    `x_ne`: contiguous fp32 of at most `MOST_COLUMNS` columns.
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
