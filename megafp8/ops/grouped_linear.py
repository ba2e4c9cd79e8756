"""Linear layers of many experts at once: consecutive rows of the input are multiplied with weights of their own.

The weights of all experts are one parameter, so that a single kernel can multiply them. How many rows an expert has is
known on the device only. On CUDA kernels read it there, so the host does not wait: in bf16, and in FP8 with one scale
per tensor or row or blocks of 128. An expert may have no rows: its weight gradient is then zero.

*In FP8* each expert is a layer of its own: its input, weight and gradient are quantized as the recipe says, with scales
that no other expert shares. Where kernels do not compute all experts at once (`GroupState.joint_quantizers`), the host
reads how many rows each has, and starts the casts and GEMMs of one expert after the other.

The weight gradient goes where `megafp8.ops.wgrad` says; on CUDA kernels add to the fp32 sum themselves.

Shapes: m rows, e experts, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from megafp8.fp8 import group_state
from megafp8.fp8.gemm.dispatch import gemm
from megafp8.fp8.group_state import GroupQuantizers, GroupState
from megafp8.fp8.groups import RowGroups
from megafp8.fp8.linear_state import LinearState
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import Granularity, QuantizedTensor, ScaledTensor
from megafp8.ops.autograd import once_differentiable
from megafp8.ops.wgrad import deliver, open_store, summed_in_place, wgrad_dtype


def grouped_linear(x_mk: Tensor, weight: nn.Parameter, ends_e: Tensor, state: GroupState | None = None) -> Tensor:
    """`[m, n]` in x's dtype: the rows of each expert times the transpose of its weight, as `state` has it planned.

    `weight`: `[e·n, k]`, one expert after the other. `ends_e`: int32 `[e]`, where the rows of each expert end; they
    begin where those of the expert before end, and the last ends at m. Without a `state` all is in high precision.
    """
    if state is None or state.high_precision:
        return _GroupedLinear.apply(x_mk, weight, ends_e)
    quantizers = state.joint_quantizers(x_mk, weight)
    if quantizers is None:
        return _OneByOneFp8Linear.apply(x_mk, weight, ends_e, state.states, torch.is_grad_enabled())
    return _JointFp8Linear.apply(x_mk, weight, ends_e, state, quantizers, torch.is_grad_enabled())


def _kernels() -> ModuleType:
    from megafp8.kernels import grouped_gemm  # needs Triton, which comes with torch's CUDA builds

    return grouped_gemm


def _slices(ends_e: Tensor) -> Iterator[slice]:
    """The rows of each expert; synchronizes with the device."""
    start = 0
    for end in ends_e.tolist():
        yield slice(start, end)
        start = end


def _product(a_mk: Tensor, b_ekn: Tensor, ends_e: Tensor) -> Tensor:
    """`[m, n]`: rows of `a` times the matrix of their expert."""
    if group_state.has_kernels(a_mk, *b_ekn.shape[1:]):
        return grouped_mm(a_mk, b_ekn, offs=ends_e)
    out = a_mk.new_empty(len(a_mk), b_ekn.shape[2])
    for rows, b_kn in zip(_slices(ends_e), b_ekn, strict=True):
        out[rows] = gemm(a_mk[rows], b_kn, a_mk.dtype)
    return out


def _wgrad(weight: Tensor, dy_mn: Tensor, x_mk: Tensor, ends_e: Tensor) -> Tensor | None:
    """dw `[e·n, k]` to the weight's sink or back."""
    if group_state.has_kernels(x_mk, dy_mn.shape[1], x_mk.shape[1]):
        kernels = _kernels()
        sums = partial(kernels.sums_over_rows, dy_mn, x_mk, ends_e)
        return _wgrad_by_kernel(weight, sums, len(ends_e))
    dtype = wgrad_dtype(weight)
    dw_enk = torch.zeros(len(ends_e), dy_mn.shape[1], x_mk.shape[1], dtype=dtype, device=x_mk.device)
    for rows, dw_nk in zip(_slices(ends_e), dw_enk, strict=True):
        if rows.start < rows.stop:
            dw_nk.copy_(gemm(dy_mn[rows].t(), x_mk[rows], dtype))
    return deliver(weight, dw_enk.flatten(0, 1))


def _wgrad_by_kernel(weight: Tensor, sums: Callable[..., None], experts: int) -> Tensor | None:
    """dw `[e·n, k]` to the weight's sink, by a kernel that adds to its fp32 sum, or back."""
    main_grad = summed_in_place(weight)
    dw = torch.empty(weight.shape, dtype=wgrad_dtype(weight), device=weight.device) if main_grad is None else main_grad
    sums(dw.view(experts, -1, weight.shape[1]), accumulate=main_grad is not None)
    if main_grad is None:
        return deliver(weight, dw)
    weight.grad_sink.added()  # type: ignore[attr-defined]
    return None


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
            dw = _now_or_later(ctx.weight, partial(_wgrad, ctx.weight, dy_mn.detach(), x_mk.detach(), ends_e))
        return dx, dw, None


def _now_or_later(weight: Tensor, wgrad: Callable[[], Tensor | None]) -> Tensor | None:
    """What `wgrad` returns; or None, and `wgrad` in the weight's open store."""
    store = open_store(weight)
    if store is None:
        return wgrad()
    store.put(lambda: wgrad)
    return None


class _Operand(NamedTuple):
    """What a GEMM multiplies: FP8 data with its scales, or values."""

    data: Tensor | None
    scale_inv: Tensor | None = None
    tensor_scale: Tensor | None = None

    @property
    def values(self) -> Tensor:
        assert self.data is not None
        return self.data


class _OneByOneFp8Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight: Tensor, ends_e: Tensor, states: Sequence[LinearState], grad_enabled: bool
    ) -> Tensor:
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        w_enk = weight.detach().view(len(states), -1, weight.shape[1])
        y_mn = x_mk.new_empty(len(x_mk), w_enk.shape[1])
        ctx.weight, ctx.states = weight, states
        ctx.rows = [(e, rows) for e, rows in enumerate(_slices(ends_e)) if rows.start < rows.stop]
        with_rows = {e for e, _ in ctx.rows}
        for e, (state, w_nk) in enumerate(zip(states, w_enk, strict=True)):
            if state.plan.calibrating:
                state.record_amax("weight", w_nk)
            high = state.high_precision
            if e not in with_rows and state.plan.fp8 and not (high.fprop and high.dgrad):
                state.fp8_weight(w_nk, columnwise=False)  # its amax is recorded whether or not tokens come
        kept: list[Tensor | None] = []
        ctx.granularity = []
        for e, rows in ctx.rows:
            y_mn[rows], x, granularity = _forward(states[e], x_mk[rows], w_enk[e], needs_dx, needs_dw)
            kept += x
            ctx.granularity.append(granularity)
        ctx.save_for_backward(*kept)
        return y_mn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        dy_mn, saved, weight = dy_mn.contiguous(), ctx.saved_tensors, ctx.weight
        w_enk = weight.detach().view(len(ctx.states), -1, weight.shape[1])
        dx_mk = dy_mn.new_empty(len(dy_mn), weight.shape[1]) if needs_dx else None
        wgrads: list[_Wgrad] = []
        for i, (e, rows) in enumerate(ctx.rows):
            state, dy = ctx.states[e], dy_mn[rows]
            high = state.high_precision
            if state.plan.calibrating:
                state.record_amax("grad_output", dy)
            rowwise, columnwise = needs_dx and not high.dgrad, needs_dw and not high.wgrad
            dy8 = None
            if rowwise or columnwise:
                dy8 = state.quantizers.grad_output(Plain(dy), rowwise=rowwise, columnwise=columnwise)
            if dx_mk is not None:
                dx_mk[rows] = _dgrad(state, dy, dy8, w_enk[e])
            if needs_dw:
                x = _Operand(*saved[3 * i : 3 * i + 3])
                wgrads.append(_Wgrad(e, state, dy if high.wgrad else dy8, x, ctx.granularity[i]))
        dw = _now_or_later(weight, partial(_fp8_wgrad, weight, len(ctx.states), wgrads)) if needs_dw else None
        return dx_mk, dw, None, None, None


def _forward(
    state: LinearState, x: Tensor, w_nk: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, _Operand, Granularity | None]:
    """An expert's output; what wgrad needs of its input, with its granularity where it is FP8."""
    high = state.high_precision
    if state.plan.calibrating:
        state.record_amax("input", x)
    columnwise = needs_dw and not high.wgrad
    x8 = None
    if not high.fprop or columnwise:
        x8 = state.quantizers.input(Plain(x), rowwise=not high.fprop, columnwise=columnwise)
    if high.fprop or x8 is None:
        y = gemm(x, w_nk.to(x.dtype).t(), x.dtype)
    else:
        w8 = state.fp8_weight(w_nk, columnwise=needs_dx and not high.dgrad and not state.transient_weight)
        fast = state.fast_accum.fprop
        y = state.gemm.tn(x8.required_rowwise, w8.required_rowwise, x.dtype, use_fast_accum=fast)
    if columnwise and x8 is not None:
        kept = x8.required_columnwise
        return y, _Operand(kept.data, kept.scale_inv, kept.tensor_scale), kept.granularity
    return y, _Operand(x.clone() if needs_dw else None), None  # not a view, which would keep the rows of all experts


def _dgrad(state: LinearState, dy: Tensor, dy8: QuantizedTensor | None, w_nk: Tensor) -> Tensor:
    """The gradient of an expert's input."""
    if dy8 is None or state.high_precision.dgrad:
        return gemm(dy, w_nk.to(dy.dtype), dy.dtype)
    kept = None if state.transient_weight else state.fp8_weight(w_nk, columnwise=True)
    w_kn = state.dgrad_weight(w_nk, kept)
    return state.gemm.tn(dy8.required_rowwise, w_kn, dy.dtype, use_fast_accum=state.fast_accum.dgrad)


class _Wgrad(NamedTuple):
    """The operands of an expert's weight gradient; `granularity`: of x where both are FP8."""

    expert: int
    state: LinearState
    dy: Tensor | QuantizedTensor | None
    x: _Operand
    granularity: Granularity | None


def _fp8_wgrad(weight: Tensor, experts: int, wgrads: Sequence[_Wgrad]) -> Tensor | None:
    """dw `[e·n, k]` to the weight's sink or back; zero for experts without rows."""
    main_grad, dtype = summed_in_place(weight), wgrad_dtype(weight)
    dw = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if main_grad is None else main_grad
    dw_enk = dw.view(experts, -1, weight.shape[1])
    for expert, state, dy, x, granularity in wgrads:
        if isinstance(dy, QuantizedTensor):
            assert granularity is not None
            assert x.scale_inv is not None
            x_km = ScaledTensor(x.values, x.scale_inv, granularity, x.tensor_scale)
            fast = state.fast_accum.wgrad
            state.gemm.accumulate_tn(dy.required_columnwise, x_km, dw_enk[expert], use_fast_accum=fast)
        else:
            assert dy is not None
            dw_enk[expert] += gemm(dy.t(), x.values, dw.dtype)
    if main_grad is None:
        return deliver(weight, dw)
    weight.grad_sink.added()  # type: ignore[attr-defined]
    return None


class _JointFp8Linear(Function):
    """All experts at once; `state.states` are alike."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight: Tensor, ends_e: Tensor, state: GroupState, quantizers: GroupQuantizers,
        grad_enabled: bool,
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        kernels, high, fast = _kernels(), state.states[0].high_precision, state.states[0].fast_accum
        experts, n = len(ends_e), len(weight) // len(ends_e)
        groups = RowGroups.of(ends_e, len(x_mk))
        columnwise = needs_dw and not high.wgrad
        x8 = None
        if not high.fprop or columnwise:
            x8 = quantizers.input(Plain(x_mk), groups, rowwise=not high.fprop, columnwise=columnwise)
        if high.fprop or x8 is None:
            y_mn = grouped_mm(x_mk, weight.to(x_mk.dtype).view(experts, n, -1).transpose(1, 2), offs=ends_e)
        else:
            w8 = state.fp8_weight(weight, columnwise=needs_dx and not high.dgrad)
            operands = (x8.required_rowwise, w8.required_rowwise)
            y_mn = kernels.rows_times_matrices(*operands, ends_e, n, x_mk.dtype, columnwise=False, fast=fast.fprop)
        ctx.weight, ctx.state, ctx.quantizers, ctx.groups = weight, state, quantizers, groups
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
        dy_mn = dy_mn.contiguous()
        rowwise, columnwise = needs_dx and not high.dgrad, needs_dw and not high.wgrad
        dy8 = QuantizedTensor(None, None)
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
                sums = partial(kernels.sums_over_rows, *operands, groups.places_e, fast=fast.wgrad)
            else:
                sums = partial(kernels.sums_over_rows, dy_mn.detach(), x, groups.ends_e)
            dw = _now_or_later(weight, partial(_wgrad_by_kernel, weight, sums, experts))
        return dx, dw, None, None, None, None
