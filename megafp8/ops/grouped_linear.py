"""Linear layers of many experts at once: consecutive rows of the input are multiplied with weights of their own.

The weights of all experts are one parameter, so that a single kernel can multiply them. How many rows an expert has is
known on the device only. On CUDA kernels read it there, so the host does not wait: in bf16, and in FP8 with scales of
tensors, rows or blocks of 128. An expert may have no rows: its weight gradient is then zero.

*In FP8* each expert is a layer of its own: its input, weight and gradient are quantized as the recipe says, with scales
that no other expert shares. Where kernels do not compute all experts at once (`GroupState.joint_quantizers`), the host
reads how many rows each has, and starts one expert after the other (`experts_one_by_one`).

The weight gradient goes where `megafp8.ops.wgrad` says; on CUDA kernels add to the fp32 sum themselves.

Shapes: m rows, e experts, k inputs, n outputs.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from megafp8.fp8 import group_state
from megafp8.fp8.gemm.dispatch import gemm
from megafp8.fp8.group_state import GroupQuantizers, GroupState
from megafp8.fp8.groups import RowGroups, row_slices
from megafp8.fp8.linear_state import QuantizedGradHandoff
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor
from megafp8.ops.autograd import once_differentiable
from megafp8.ops.experts_one_by_one import OneByOneFp8Linear
from megafp8.ops.fusion import LinearInput
from megafp8.ops.wgrad import deliver, now_or_later, wgrad_by, wgrad_dtype


def grouped_linear(
    x_mk: Tensor | LinearInput,
    weight: nn.Parameter,
    groups: RowGroups,
    state: GroupState | None = None,
    handoff: QuantizedGradHandoff | None = None,
) -> Tensor:
    """`[m, n]` in x's dtype: the rows of each expert times the transpose of its weight, as `state` has it planned.

    `weight`: `[e·n, k]`, one expert after the other. `groups`: where the rows of each expert end; they begin where
    those of the expert before end, and the last ends at m. Without a `state` all is in high precision. `handoff`:
    `state.grad_handoff`, given to the operation after the layer too.
    """
    values, quantized = (x_mk, None) if isinstance(x_mk, Tensor) else (x_mk.tensor, x_mk.quantized)
    if state is None or state.high_precision:
        return _GroupedLinear.apply(values, weight, groups.ends_e)
    quantizers, grad_enabled = state.joint_quantizers(values, weight), torch.is_grad_enabled()
    if quantizers is None:
        return OneByOneFp8Linear.apply(values, weight, groups.ends_e, state.states, grad_enabled)
    return _JointFp8Linear.apply(values, weight, quantized, groups, state, quantizers, handoff, grad_enabled)


def _kernels() -> ModuleType:
    from megafp8.kernels import grouped_gemm  # needs Triton, which comes with torch's CUDA builds

    return grouped_gemm


def _product(a_mk: Tensor, b_ekn: Tensor, ends_e: Tensor) -> Tensor:
    """`[m, n]`: rows of `a` times the matrix of their expert."""
    if group_state.has_kernels(a_mk, *b_ekn.shape[1:]):
        return grouped_mm(a_mk, b_ekn, offs=ends_e)
    out = a_mk.new_empty(len(a_mk), b_ekn.shape[2])
    for rows, b_kn in zip(row_slices(ends_e), b_ekn, strict=True):
        out[rows] = gemm(a_mk[rows], b_kn, a_mk.dtype)
    return out


def _wgrad(weight: Tensor, dy_mn: Tensor, x_mk: Tensor, ends_e: Tensor) -> Tensor | None:
    """dw `[e·n, k]` to the weight's sink or back."""
    dtype = wgrad_dtype(weight)
    if group_state.has_kernels(x_mk, dy_mn.shape[1], x_mk.shape[1]):
        if dtype == x_mk.dtype:  # faster than ours, which can add to fp32
            return deliver(weight, grouped_mm(dy_mn.t(), x_mk, offs=ends_e).flatten(0, 1))
        return wgrad_by(weight, len(ends_e), partial(_kernels().sums_over_rows, dy_mn, x_mk, ends_e))
    dw_enk = torch.zeros(len(ends_e), dy_mn.shape[1], x_mk.shape[1], dtype=dtype, device=x_mk.device)
    for rows, dw_nk in zip(row_slices(ends_e), dw_enk, strict=True):
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
            dw = now_or_later(ctx.weight, partial(_wgrad, ctx.weight, dy_mn.detach(), x_mk.detach(), ends_e))
        return dx, dw, None


class _JointFp8Linear(Function):
    """All experts at once; `state.states` are alike. With `x8` the values of `x_mk` are not read."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight: Tensor, x8: QuantizedTensor | None, groups: RowGroups, state: GroupState,
        quantizers: GroupQuantizers, handoff: QuantizedGradHandoff | None, grad_enabled: bool,
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        ends_e = groups.ends_e
        kernels, high, fast = _kernels(), state.states[0].high_precision, state.states[0].fast_accum
        experts, n = len(ends_e), len(weight) // len(ends_e)
        columnwise = needs_dw and not high.wgrad
        if x8 is None and (not high.fprop or columnwise):
            x8 = quantizers.input(Plain(x_mk), groups, rowwise=not high.fprop, columnwise=columnwise)
        if high.fprop or x8 is None:
            y_mn = grouped_mm(x_mk, weight.to(x_mk.dtype).view(experts, n, -1).transpose(1, 2), offs=ends_e)
        else:
            w8 = state.fp8_weight(weight, columnwise=needs_dx and not high.dgrad)
            operands = (x8.required_rowwise, w8.required_rowwise)
            y_mn = kernels.rows_times_matrices(*operands, ends_e, n, x_mk.dtype, columnwise=False, fast=fast.fprop)
        ctx.weight, ctx.state, ctx.quantizers, ctx.groups, ctx.handoff = weight, state, quantizers, groups, handoff
        if columnwise and x8 is not None:
            kept = x8.required_columnwise
            ctx.save_for_backward(kept.data, kept.scale_inv)
            ctx.granularity = kept.granularity
        else:
            ctx.save_for_backward(x_mk if needs_dw else None, None)
        return y_mn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        kernels, state, groups, weight = _kernels(), ctx.state, ctx.groups, ctx.weight
        high, fast = state.states[0].high_precision, state.states[0].fast_accum
        experts, k = len(groups.ends_e), weight.shape[1]
        rowwise, columnwise = needs_dx and not high.dgrad, needs_dw and not high.wgrad
        dy8 = None if ctx.handoff is None else ctx.handoff.take()
        if dy8 is None:
            dy_mn, dy8 = dy_mn.contiguous(), QuantizedTensor(None, None)
            if rowwise or columnwise:
                dy8 = ctx.quantizers.grad_output(Plain(dy_mn), groups, rowwise=rowwise, columnwise=columnwise)
        dx = dw = None
        if rowwise:
            operands = (dy8.required_rowwise, state.dgrad_weight(weight).required_columnwise)
            dx = kernels.rows_times_matrices(*operands, groups.ends_e, k, dy_mn.dtype, columnwise=True, fast=fast.dgrad)
        elif needs_dx:
            dx = grouped_mm(dy_mn, weight.to(dy_mn.dtype).view(experts, -1, k), offs=groups.ends_e)
        if needs_dw:
            x, scale_inv = ctx.saved_tensors
            if columnwise:
                operands = (dy8.required_columnwise, ScaledTensor(x, scale_inv, ctx.granularity))
                sums = partial(kernels.sums_over_rows, *operands, groups.padded_ends_e, fast=fast.wgrad)
            else:
                sums = partial(kernels.sums_over_rows, dy_mn.detach(), x, groups.ends_e)
            dw = now_or_later(weight, partial(wgrad_by, weight, experts, sums))
        return dx, dw, None, None, None, None, None, None
