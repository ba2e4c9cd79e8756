"""Kernels that add each row's expert bias, and sum the gradients of biases.

References: the functions of the same names in `megafp8.layers.experts.bias_op`.

PyTorch would need a matrix product with ones for the addition, and another one for the sums. Both read and write all
rows for which the buffers have room. A program of these kernels reads the ends of the experts' rows and leaves out the
rest.

*Addition.* A program adds to some columns of adjacent rows, in place. It finds the expert of a row by comparing the row
with all ends. The sum is rounded once.

*Sums.* A program sums some columns over all rows of one expert in fp32, in the order of rows within each row of its
tile. The order does not depend on the run.

Shapes: m rows, n columns, e experts.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel

_ROWS, _COLUMNS = 16, 256  # tile of the addition
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 64  # tile of the sums


@TritonKernel
def add_kernel(y_mn, bias_en, ends_e, n, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Add the biases to COLUMNS columns of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(0) * ROWS < tl.load(ends_e + experts - 1):
        number = tl.arange(0, EXPERTS)
        ends = tl.load(ends_e + number, mask=number < experts, other=2147483647)
        expert = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)
        inside = (expert < experts)[:, None] & (j < n)[None, :]
        place = row.to(tl.int64)[:, None] * n + j[None, :]
        y = tl.load(y_mn + place, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_en + expert.to(tl.int64)[:, None] * n + j[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(y_mn + place, (y + bias).to(y_mn.dtype.element_ty), mask=inside)


@TritonKernel
def sums_kernel(dy_mn, ends_e, sums_en, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum COLUMNS columns over the rows of one expert."""
    expert = tl.program_id(0)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(ends_e + expert)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(tl.load(ends_e + expert - 1, mask=expert > 0, other=0), end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (j < n)[None, :]
        total += tl.load(dy_mn + row.to(tl.int64)[:, None] * n + j[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(sums_en + expert.to(tl.int64) * n + j, tl.sum(total, axis=0), mask=j < n)


def add_biases(y_mn: Tensor, bias_en: Tensor, ends_e: Tensor) -> None:
    """Add the bias of its expert to each row, in place. `y_mn` is bf16, fp16 or fp32."""
    assert y_mn.is_contiguous()
    (m, n), e = y_mn.shape, len(ends_e)
    if m:
        y = kernel_input(y_mn)
        kernel = add_kernel.bind(EXPERTS=next_power_of_2(e), ROWS=_ROWS, COLUMNS=_COLUMNS)
        kernel.launch((ceil_div(m, _ROWS), ceil_div(n, _COLUMNS)), (y, kernel_input(bias_en), ends_e), (n, e))
        if y is not y_mn:
            y_mn.copy_(y)


def sum_by_expert(dy_mn: Tensor, ends_e: Tensor) -> Tensor:
    """Return the sums over each expert's rows, fp32 `[e, n]`. `dy_mn` is bf16, fp16 or fp32."""
    n, e = dy_mn.shape[1], len(ends_e)
    sums_en = torch.empty(e, n, dtype=torch.float32, device=dy_mn.device)
    kernel = sums_kernel.bind(ROWS=_SUMMED_ROWS, COLUMNS=_SUMMED_COLUMNS)
    kernel.launch((e, ceil_div(n, _SUMMED_COLUMNS)), (kernel_input(dy_mn.contiguous()), ends_e, sums_en), (n,))
    return sums_en
