"""Weighted sum of each token's rows, and its backward. References: `megafp8.layers.experts.permute_op`'s functions of
these names.

PyTorch gathers the rows `[n, k, h]`, multiplies them into an fp32 tensor of that shape, and reads this again to add it
up. Here a row is read once, from where its expert left it.

*Sum.* A program has some columns of a token, 16 bytes for each of its threads, in all k rows, whose loads do not wait
for each other. It multiplies and adds in fp32, in the order of choices, without contraction, and rounds once: bit for
bit the reference.

*Backward.* A program has one row. It reads the gradient of the row's token, scales it, and sums the products with the
row, so there are no atomics and the result is deterministic. The k programs of a token are next to each other: memory
is read once for all of them, the L2 cache k - 1 times. Only the weight's gradient, a sum over h, may differ from the
reference in rounding.

Copying tokens to rows has no kernel: of aligned rows, torch's indexing copies 16 bytes a thread itself.

Where a rank has rows for some choices alone, programs look at `num_rows` and leave out the others.

Shapes: n tokens, k experts of each, h hidden, m rows. `inverse_nk`: int64, the rows of each token. `num_rows`: int32
`[1]`, rows from there on are not this rank's; None: all are.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.launch import TritonKernel

_BYTES, _WARPS = 2048, 4  # of a row, for a program of the sum: 16 bytes a thread


@TritonKernel
def sum_kernel(rows_mh, inverse_nk, weights_nk, sum_nh, num_rows, h, K: tl.constexpr, WEIGHTED: tl.constexpr,
               COUNTED: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Some columns of a token."""
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
    """The row of one choice of a token."""
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
    """`[n, h]`: each token's rows, bf16 or fp32, times their weights (fp32) if there are any, added up in fp32."""
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
    of_rows: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Gradients of the rows, bf16 or fp32 like `dy_nh`, None unless `of_rows`, and of the weights, fp32."""
    (n, k), h = inverse_nk.shape, rows_mh.shape[1]
    assert weights_nk.dtype == torch.float32
    dy, rows = kernel_input(dy_nh.contiguous()), kernel_input(rows_mh.contiguous())
    drows_mh = torch.empty_like(rows) if of_rows else None
    dweights_nk = torch.empty((n, k), dtype=torch.float32, device=rows.device)
    if n:
        width = next_power_of_2(h)
        warps = min(16, max(4, width // 512))
        kernel = backward_kernel.bind(
            K=k, COUNTED=num_rows is not None, OF_ROWS=of_rows, WIDTH=width, num_warps=warps, enable_fp_fusion=False
        )
        tensors = (dy, rows, weights_nk.contiguous(), inverse_nk.contiguous(), drows_mh, dweights_nk, num_rows)
        kernel.launch((n * k, 1), tensors, (h,))
    return None if drows_mh is None else drows_mh.to(rows_mh.dtype), dweights_nk
