"""Kernels for the weighted sum of each token's rows, and for its backward.

References: the functions of the same names in `megafp8.layers.experts.permute_op`.

PyTorch gathers the rows `[n, k, h]`, multiplies them into an fp32 tensor of that shape, and reads this tensor again to
add it up. The kernel reads each row once, directly from the experts' output.

*Sum.* A program computes some columns of one token, 16 bytes per thread, from all k rows. The loads of the rows do not
wait for each other. The program multiplies and adds in fp32, in the order of choices, without contraction, and rounds
once. The result equals the reference bit for bit.

*Backward.* A program computes one row. It reads the gradient of the row's token, scales it, and sums the products with
the row, so there are no atomics and the result is deterministic. The k programs of a token are adjacent: the first
reads memory, and the other k - 1 read the L2 cache. Only the weight gradient, a sum over h, may differ from the
reference in rounding.

Copying tokens to rows needs no kernel: PyTorch's indexing already copies 16 bytes per thread if rows are aligned.

If a rank has rows for only some of the choices, programs read `num_rows` and skip the other choices.

Shapes: n tokens, k experts per token, h hidden size, m rows. `inverse_nk` has the rows of each token, int64. Rows from
`num_rows` (int32 `[1]`) on belong to other ranks; None means that all rows are this rank's.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel

_BYTES, _WARPS = 2048, 4  # bytes of a row per program of the sum, 16 per thread


@TritonKernel
def sum_kernel(rows_mh, inverse_nk, weights_nk, sum_nh, num_rows, h, K: tl.constexpr, WEIGHTED: tl.constexpr,
               COUNTED: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Sum COLUMNS columns of one token over its K rows."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for choice in tl.static_range(K):
        row = tl.load(inverse_nk + token * K + choice)
        width = tl.where(row < tl.load(num_rows), h, 0) if COUNTED else h
        x = tl.load(rows_mh + row * h + j, mask=j < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weights_nk + token * K + choice)
        if choice == 0:
            total = x
        else:
            total = total + x
    tl.store(sum_nh + token * h + j, total.to(sum_nh.dtype.element_ty), mask=j < h)


@TritonKernel
def backward_kernel(dy_nh, rows_mh, weights_nk, inverse_nk, drows_mh, dweights_nk, num_rows, h, K: tl.constexpr,
                    COUNTED: tl.constexpr, OF_ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Compute the gradients of the row and the weight of one choice of a token."""
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(inverse_nk + choice)
    j = tl.arange(0, WIDTH)
    width = tl.where(row < tl.load(num_rows), h, 0) if COUNTED else h
    dy = tl.load(dy_nh + choice // K * h + j, mask=j < width, other=0.0).to(tl.float32)
    x = tl.load(rows_mh + row * h + j, mask=j < width, other=0.0).to(tl.float32)
    if OF_ROWS:
        weight = tl.load(weights_nk + choice)
        tl.store(drows_mh + row * h + j, (dy * weight).to(drows_mh.dtype.element_ty), mask=j < width)
    tl.store(dweights_nk + choice, tl.sum(x * dy))


def sum_choices(
    rows_mh: Tensor, inverse_nk: Tensor, weights_nk: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """Return the sum of each token's rows in fp32, rounded once to their dtype, `[n, h]`.

    Rows are bf16 or fp32. They are multiplied by `weights_nk` (fp32) if it is given.
    """
    (n, k), h = inverse_nk.shape, rows_mh.shape[1]
    assert weights_nk is None or weights_nk.dtype == torch.float32
    rows = kernel_input(rows_mh.contiguous())
    sum_nh = rows.new_empty(n, h)
    if n:
        columns = min(_BYTES // rows.element_size(), next_power_of_2(h))
        kernel = sum_kernel.bind(
            K=k, WEIGHTED=weights_nk is not None, COUNTED=num_rows is not None, COLUMNS=columns, num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        weights = None if weights_nk is None else weights_nk.contiguous()
        kernel.launch((n, ceil_div(h, columns)), (rows, inverse_nk.contiguous(), weights, sum_nh, num_rows), (h,))
    return sum_nh.to(rows_mh.dtype)


def combine_backward(
    dy_nh: Tensor, rows_mh: Tensor, weights_nk: Tensor, inverse_nk: Tensor, num_rows: Tensor | None = None, *,
    needs_rows: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of the rows, in their dtype (bf16 or fp32), and of the weights, fp32.

    The gradient of the rows is None unless `needs_rows`.
    """
    (n, k), h = inverse_nk.shape, rows_mh.shape[1]
    assert weights_nk.dtype == torch.float32
    dy, rows = kernel_input(dy_nh.contiguous()), kernel_input(rows_mh.contiguous())
    drows_mh = torch.empty_like(rows) if needs_rows else None
    dweights_nk = torch.empty((n, k), dtype=torch.float32, device=rows.device)
    if n:
        width = next_power_of_2(h)
        warps = min(16, max(4, width // 512))
        kernel = backward_kernel.bind(
            K=k, COUNTED=num_rows is not None, OF_ROWS=needs_rows, WIDTH=width, num_warps=warps, enable_fp_fusion=False
        )
        tensors = (dy, rows, weights_nk.contiguous(), inverse_nk.contiguous(), drows_mh, dweights_nk, num_rows)
        kernel.launch((n * k, 1), tensors, (h,))
    return None if drows_mh is None else drows_mh.to(rows_mh.dtype), dweights_nk
