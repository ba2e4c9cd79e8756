"""FP8 linear layers of experts, one after the other, each computed as a layer of its own.

The host reads how many rows each expert has, and starts the casts and GEMMs of one expert after the other. It is what
`megafp8.ops.grouped_linear` is held to where kernels compute all experts at once, and runs where they cannot.

Shapes: m rows, e experts, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from megafp8.fp8.gemm.dispatch import gemm
from megafp8.fp8.groups import row_slices
from megafp8.fp8.linear_state import LinearState
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import Granularity, QuantizedTensor, ScaledTensor
from megafp8.ops.autograd import once_differentiable
from megafp8.ops.wgrad import now_or_later, wgrad_by


class _Operand(NamedTuple):
    """What a GEMM multiplies: FP8 data with its scales, or values."""

    data: Tensor | None
    scale_inv: Tensor | None = None
    tensor_scale: Tensor | None = None

    @property
    def values(self) -> Tensor:
        assert self.data is not None
        return self.data


class OneByOneFp8Linear(Function):
    """`megafp8.ops.grouped_linear` in FP8, each expert as its own `LinearState` says."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight: Tensor, ends_e: Tensor, states: Sequence[LinearState], grad_enabled: bool
    ) -> Tensor:
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        w_enk = weight.detach().view(len(states), -1, weight.shape[1])
        y_mn = x_mk.new_empty(len(x_mk), w_enk.shape[1])
        ctx.weight, ctx.states = weight, states
        ctx.rows = list(row_slices(ends_e))
        for e, (state, w_nk) in enumerate(zip(states, w_enk, strict=True)):
            if state.plan.calibrating:
                state.record_amax("weight", w_nk)
            high = state.high_precision
            if _is_empty(ctx.rows[e]) and state.plan.fp8 and not (high.fprop and high.dgrad):
                state.fp8_weight(w_nk, columnwise=False)  # its amax is recorded whether or not tokens come
        kept: list[Tensor | None] = []
        ctx.granularity = []
        for rows, state, w_nk in zip(ctx.rows, states, w_enk, strict=True):
            x, granularity = _Operand(None), None
            if not _is_empty(rows):
                y_mn[rows], x, granularity = _forward(state, x_mk[rows], w_nk, needs_dx, needs_dw)
            elif state.token_group is not None:
                _cast_input(state, x_mk[rows], needs_dw)
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
        for e, (rows, state) in enumerate(zip(ctx.rows, ctx.states, strict=True)):
            if _is_empty(rows) and state.token_group is None:
                continue
            dy, high = dy_mn[rows], state.high_precision
            if state.plan.calibrating:
                state.record_amax("grad_output", dy)
            rowwise, columnwise = needs_dx and not high.dgrad, needs_dw and not high.wgrad
            dy8 = None
            if rowwise or columnwise:
                dy8 = state.quantizers.grad_output(Plain(dy), rowwise=rowwise, columnwise=columnwise)
            if _is_empty(rows):
                continue
            if dx_mk is not None:
                dx_mk[rows] = _dgrad(state, dy, dy8, w_enk[e])
            if needs_dw:
                x = _Operand(*saved[3 * e : 3 * e + 3])
                wgrads.append(_Wgrad(e, state, dy if high.wgrad else dy8, x, ctx.granularity[e]))
        dw = None
        if needs_dw:
            dw = now_or_later(weight, partial(wgrad_by, weight, len(ctx.states), partial(_add_wgrads, wgrads)))
        return dx_mk, dw, None, None, None


def _is_empty(rows: slice) -> bool:
    return bool(rows.start == rows.stop)


def _cast_input(state: LinearState, x: Tensor, needs_dw: bool) -> QuantizedTensor | None:
    """An expert's input in FP8, in the orientations that its GEMMs take.

    Where other ranks have other rows of the expert, the cast may reduce an amax with them. So it is called for no rows
    too, as the cast of the gradient is.
    """
    high = state.high_precision
    rowwise, columnwise = not high.fprop, needs_dw and not high.wgrad
    if not rowwise and not columnwise:
        return None
    return state.quantizers.input(Plain(x), rowwise=rowwise, columnwise=columnwise)


def _forward(
    state: LinearState, x: Tensor, w_nk: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, _Operand, Granularity | None]:
    """An expert's output; what wgrad needs of its input, with its granularity where it is FP8."""
    high = state.high_precision
    if state.plan.calibrating:
        state.record_amax("input", x)
    x8, columnwise = _cast_input(state, x, needs_dw), needs_dw and not high.wgrad
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


def _add_wgrads(wgrads: Sequence[_Wgrad], dw_enk: Tensor, *, accumulate: bool) -> None:
    """Write dw to `dw_enk`, zero for experts without rows, or add it."""
    if not accumulate:
        dw_enk.zero_()
    for expert, state, dy, x, granularity in wgrads:
        if isinstance(dy, QuantizedTensor):
            assert granularity is not None
            assert x.scale_inv is not None
            x_km = ScaledTensor(x.values, x.scale_inv, granularity, x.tensor_scale)
            fast = state.fast_accum.wgrad
            state.gemm.accumulate_tn(dy.required_columnwise, x_km, dw_enk[expert], use_fast_accum=fast)
        else:
            assert dy is not None
            dw_enk[expert] += gemm(dy.t(), x.values, dw_enk.dtype)
