"""Kernels that include sinks in attention outputs, and that compute the gradients of sinks.

References: the functions of the same names in `megafp8.layers.attention.sink_op`.

PyTorch's operations convert outputs and their gradients to fp32 and store the products. These kernels read them once. A
program computes some rows of one head. PyTorch adds the partial gradients of all programs in a fixed order.

Shapes: s queries, b micro-batch, a heads, d head width.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, next_power_of_2
from megafp8.kernels.launch import TritonKernel

_ROWS = 64


@TritonKernel
def multiply_kernel(o, lse, sink, rows, b, d, o_s, o_b, o_a, lse_s, lse_b, lse_a, ROWS: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    """Multiply ROWS rows of one head by the share of the keys, in place."""
    row, head, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.arange(0, WIDTH)
    s, i = (row // b).to(tl.int64), row % b
    inside = (row < rows)[:, None] & (j < d)[None, :]
    difference = tl.load(lse + s * lse_s + i * lse_b + head * lse_a, mask=row < rows, other=0.0) - tl.load(sink + head)
    place = (s * o_s + i * o_b + head * o_a)[:, None] + j[None, :]
    value = tl.load(o + place, mask=inside, other=0.0).to(tl.float32) / (1 + tl.exp(-difference))[:, None]
    tl.store(o + place, value.to(o.dtype.element_ty), mask=inside)


@TritonKernel
def gradient_kernel(do, o, lse, sink, sums, rows, b, d, do_s, do_b, do_a, o_s, o_b, o_a, lse_s, lse_b, lse_a,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Write the sum over ROWS rows of one head's gradient to `sums` `[programs, a]`."""
    row, head, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.arange(0, WIDTH)
    s, i = (row // b).to(tl.int64), row % b
    inside = (row < rows)[:, None] & (j < d)[None, :]
    gradient = tl.load(do + (s * do_s + i * do_b + head * do_a)[:, None] + j[None, :], mask=inside, other=0.0)
    output = tl.load(o + (s * o_s + i * o_b + head * o_a)[:, None] + j[None, :], mask=inside, other=0.0)
    dots = tl.sum(gradient.to(tl.float32) * output.to(tl.float32), axis=1)
    difference = tl.load(sink + head) - tl.load(lse + s * lse_s + i * lse_b + head * lse_a, mask=row < rows, other=0.0)
    share = tl.where(row < rows, tl.exp(difference), 0.0)
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + head, -tl.sum(share * dots, axis=0))


def multiply_by_share(o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> None:
    """Multiply outputs by the share of the keys, in place.

    The last dim of `o_sbad` is contiguous. Log-sum-exps and sinks are fp32.
    """
    s, b, a, d = o_sbad.shape
    if o_sbad.numel():
        kernel = multiply_kernel.bind(ROWS=_ROWS, WIDTH=next_power_of_2(d))
        numbers = s * b, b, d, *o_sbad.stride()[:3], *lse_sba.stride()
        kernel.launch((ceil_div(s * b, _ROWS), a), (o_sbad, lse_sba, sink_a), numbers)


def sum_gradients(do_sbad: Tensor, o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> Tensor:
    """Return the gradient of sinks, fp32 `[a]`.

    The last dims of outputs and their gradients are contiguous. Log-sum-exps and sinks are fp32.
    """
    s, b, a, d = o_sbad.shape
    programs = ceil_div(s * b, _ROWS)
    sums = torch.empty(programs, a, dtype=torch.float32, device=o_sbad.device)
    if programs:
        kernel = gradient_kernel.bind(ROWS=_ROWS, WIDTH=next_power_of_2(d))
        numbers = s * b, b, d, *do_sbad.stride()[:3], *o_sbad.stride()[:3], *lse_sba.stride()
        kernel.launch((programs, a), (do_sbad, o_sbad, lse_sba, sink_a, sums), numbers)
    return sums.sum(dim=0)
