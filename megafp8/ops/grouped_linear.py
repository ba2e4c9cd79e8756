"""Linear layers of many experts at once: consecutive rows of the input are multiplied with weights of their own.

The weights of all experts are one parameter, so that a single kernel can multiply them. How many rows an expert has is
known on the device only; on CUDA the kernels read it there (`torch.nn.functional.grouped_mm`), so the host does not
wait. An expert may have no rows: its weight gradient is then zero.

The weight gradient goes where `megafp8.ops.wgrad` says; on CUDA, where torch computes it in bf16, it is rounded once a
micro-batch before it is added to the fp32 sum.

Shapes: m rows, e experts, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from megafp8.fp8.gemm.dispatch import gemm
from megafp8.ops.autograd import once_differentiable
from megafp8.ops.wgrad import deliver, open_store, wgrad_dtype


def grouped_linear(x_mk: Tensor, weight: nn.Parameter, ends_e: Tensor) -> Tensor:
    """`[m, n]` in x's dtype: the rows of expert i times the transpose of its weight.

    `weight`: `[e·n, k]`, one expert after the other. `ends_e`: int32 `[e]`, where the rows of each expert end; they
    begin where those of the expert before end, and the last ends at m.
    """
    return _GroupedLinear.apply(x_mk, weight, ends_e)


def _in_torch(x: Tensor) -> bool:
    """Whether torch has a kernel that reads `ends_e` on the device."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _slices(ends_e: Tensor) -> Iterator[slice]:
    """The rows of each expert; synchronizes with the device."""
    start = 0
    for end in ends_e.tolist():
        yield slice(start, end)
        start = end


def _product(a_mk: Tensor, b_ekn: Tensor, ends_e: Tensor) -> Tensor:
    """`[m, n]`: rows of `a` times the matrix of their expert."""
    if _in_torch(a_mk):
        return grouped_mm(a_mk, b_ekn, offs=ends_e)
    out = a_mk.new_empty(len(a_mk), b_ekn.shape[2])
    for rows, b_kn in zip(_slices(ends_e), b_ekn, strict=True):
        out[rows] = gemm(a_mk[rows], b_kn, a_mk.dtype)
    return out


def _wgrad(weight: Tensor, dy_mn: Tensor, x_mk: Tensor, ends_e: Tensor) -> Tensor | None:
    """dw `[e·n, k]` to the weight's sink or back."""
    if _in_torch(x_mk):
        return deliver(weight, grouped_mm(dy_mn.t(), x_mk, offs=ends_e).flatten(0, 1))
    dtype = wgrad_dtype(weight)
    dw_enk = torch.zeros(len(ends_e), dy_mn.shape[1], x_mk.shape[1], dtype=dtype, device=x_mk.device)
    for rows, dw_nk in zip(_slices(ends_e), dw_enk, strict=True):
        if rows.start < rows.stop:
            dw_nk.copy_(gemm(dy_mn[rows].t(), x_mk[rows], dtype))
    return deliver(weight, dw_enk.flatten(0, 1))


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, weight: Tensor, ends_e: Tensor) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        w_enk = weight.to(x_mk.dtype).view(len(ends_e), -1, weight.shape[1])
        ctx.save_for_backward(weight if needs_dx else None, x_mk if needs_dw else None, ends_e)
        ctx.weight = weight  # saved tensors may come back as other objects, without their sink
        return _product(x_mk, w_enk.transpose(1, 2), ends_e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, x_mk, ends_e = ctx.saved_tensors
        dy_mn = dy_mn.contiguous()
        dx = dw = None
        if weight is not None:
            dx = _product(dy_mn, weight.to(dy_mn.dtype).view(len(ends_e), -1, weight.shape[1]), ends_e)
        if x_mk is not None:
            compute = partial(_wgrad, ctx.weight, dy_mn.detach(), x_mk.detach(), ends_e)
            store = open_store(ctx.weight)
            if store is None:
                dw = compute()
            else:
                store.put(lambda: compute)
        return dx, dw, None
