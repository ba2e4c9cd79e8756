"""Gradient of an embedding: add each token's gradient to its row of the sum, and touch no other row.

The reference is `megafp8.layers.embedding.op.add_rows_`. A micro-batch of 8192 tokens looks up a few thousand of
128,256 rows. A dense gradient is written as zeros, filled, and read again with the whole sum, which moves gigabytes for
megabytes of data. Here the tokens are sorted, so that the tokens of a row form a contiguous *run*, in their order. One
program sums the first tokens of a run for some columns and adds the sum to the row in place. The host never waits, and
there are no atomics, so the result is deterministic.

**The order of additions**, which is the same in the reference: the gradients of a row are summed CHUNK at a time, in
the order of tokens, starting from zero. Each of these sums is then added to the row, in order, as if each were a
micro-batch. All sums have the dtype of `sum_vh`. The order depends only on the row's own tokens, and not on which rank
has the row.

**Why chunks.** Frequent tokens have long runs: a comma occurs hundreds of times, and padding may fill all 8192 tokens.
A loop over such a run would keep a few programs busy for milliseconds. With chunks of 64 tokens, 128 programs share the
columns of such a run. The sums of later chunks go to memory, and a second kernel adds these 127 sums to the row. 64 is
about the root of a usual micro-batch, so neither loop is long.

The sum of a later chunk that begins at position i of the sorted tokens is stored in row i / CHUNK of that memory. No
other chunk uses this row: the other chunks of the same run begin at least CHUNK positions away, and a later chunk of
another run has its first chunk in between.

Shapes: n tokens, sorted from the kernels' inputs on; v rows of this rank's shard of the table, h hidden; w = n / CHUNK.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel

_COLUMNS, _WARPS = 1024, 4  # columns and warps per program: 16 bytes of bf16 per thread


@TritonKernel
def chunks_kernel(dy_nh, rows_n, order_n, begin_n, end_n, later_wh, sum_vh, h, v, CHUNK: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """Sum some columns of the chunk that begins at position `program_id(0)` of the sorted tokens, if there is one."""
    i = tl.program_id(0)
    row = tl.load(rows_n + i).to(tl.int64)
    before = i - tl.load(begin_n + i)
    if (row < 0) | (row >= v) | (before % CHUNK != 0):
        return
    end = tl.minimum(i + CHUNK, tl.load(end_n + i))
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], sum_vh.dtype.element_ty)
    for k in range(i, end):
        dy = dy_nh + tl.load(order_n + k) * h
        total += tl.load(dy + j, mask=j < h, other=0.0).to(total.dtype)
    if before == 0:
        to = sum_vh + row * h + j
        tl.store(to, tl.load(to, mask=j < h) + total, mask=j < h)
    else:
        tl.store(later_wh + (i // CHUNK).to(tl.int64) * h + j, total, mask=j < h)


@TritonKernel
def later_kernel(rows_n, begin_n, end_n, later_wh, sum_vh, n, h, v, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Add some columns of a run's later chunks to its row.

    A program handles the run whose second chunk begins in its window of positions, if there is one.
    """
    w = tl.program_id(0)
    positions = w * CHUNK + tl.arange(0, CHUNK)
    begins = tl.load(begin_n + positions, mask=positions < n, other=n)
    i = tl.max(tl.where(positions - begins == CHUNK, positions, -1), axis=0)
    if i < 0:
        return
    row = tl.load(rows_n + i).to(tl.int64)
    if (row < 0) | (row >= v):
        return
    chunks = (tl.load(end_n + i) - i + CHUNK - 1) // CHUNK
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    to = sum_vh + row * h + j
    later = later_wh + w.to(tl.int64) * h + j
    total = tl.load(to, mask=j < h, other=0.0)
    for _ in range(chunks):
        total += tl.load(later, mask=j < h, other=0.0)
        later += h
    tl.store(to, total, mask=j < h)


def add_rows_(sum_vh: Tensor, dy_nh: Tensor, rows_n: Tensor, *, chunk: int) -> None:
    """Add `dy_nh[i]` to `sum_vh[rows_n[i]]` for each i, in the order above; ignore rows outside `[0, v)`.

    `sum_vh` is contiguous fp32 or fp64, `dy_nh` is contiguous of any floating dtype, `rows_n` holds integers, and
    `chunk` is a power of 2. Does not synchronize with the device.
    """
    (v, h), n = sum_vh.shape, len(rows_n)
    assert sum_vh.dtype in (torch.float32, torch.float64)
    assert sum_vh.is_contiguous()
    assert dy_nh.is_contiguous()
    assert dy_nh.shape == (n, h)
    if not n * v * h:
        return
    rows_n, order_n = rows_n.sort(stable=True)
    begin_n = torch.searchsorted(rows_n, rows_n, out_int32=True)
    end_n = torch.searchsorted(rows_n, rows_n, right=True, out_int32=True)
    windows, columns = ceil_div(n, chunk), min(_COLUMNS, next_power_of_2(h))
    blocks = ceil_div(h, columns)
    later_wh = torch.empty((windows, h), dtype=sum_vh.dtype, device=sum_vh.device)
    options = {"CHUNK": chunk, "COLUMNS": columns, "num_warps": _WARPS, "enable_fp_fusion": False}
    dy_nh = kernel_input(dy_nh)
    chunks = chunks_kernel.bind(**options)
    chunks.launch((n, blocks), (dy_nh, rows_n, order_n, begin_n, end_n, later_wh, sum_vh), (h, v))
    if windows > 1:
        later = later_kernel.bind(**options)
        later.launch((windows, blocks), (rows_n, begin_n, end_n, later_wh, sum_vh), (n, h, v))
