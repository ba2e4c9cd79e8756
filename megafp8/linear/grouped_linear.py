"""Linear layers of many experts together: consecutive rows of the input are multiplied by the weights of their expert.

One parameter holds the weights of all experts, so a single kernel can multiply them. The number of rows of each expert
is known only on the device. On CUDA, kernels read it there, so the host does not wait: in bf16, and in FP8 with one
scale per tensor, row or block of 128. An expert may have no rows; its weight gradient is then zero.

*In FP8*, each expert is a separate layer: the recipe quantizes its input, weight and gradient with scales that no other
expert shares. If kernels cannot compute all experts together (`GroupState.joint_quantizers`), the host reads the number
of rows of each expert, and computes the experts one by one like ordinary layers (`megafp8.linear.gemms`). This path is
the reference for the kernels.

The weight gradient is added to the weight's sink (`megafp8.linear.grad_sink`); on CUDA, the kernels themselves add to
the fp32 sum.

Shapes: m rows, e experts, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from megafp8.linear import group_state
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import LinearInput
from megafp8.linear.gemms import (
    HIGH_PRECISION,
    NOTHING,
    Operand,
    add_wgrad,
    dgrad,
    fp8_weight,
    fprop,
    in_dtype,
    operand_of,
    quantize_grad_output,
    quantize_input,
    tensors_of,
)
from megafp8.linear.grad_sink import deliver, now_or_later, paired_wgrad_by, wgrad_by, wgrad_dtype
from megafp8.linear.group_state import GroupState, JointLayer
from megafp8.linear.state import LinearState, QuantizedGradHandoff
from megafp8.linear.weight_forms import WeightForm, parts_of
from megafp8.numerics.groups import RowGroups, row_slices
from megafp8.numerics.implementations import triton_module
from megafp8.numerics.tensor import BLOCK_1X128, TENSOR, Granularity, QuantizedTensor, ScaledTensor
from megafp8.plan import PerGemm

_kernels = triton_module("megafp8.kernels.grouped_gemm")


def grouped_linear(
    x_mk: Tensor | LinearInput,
    weight: nn.Parameter,
    groups: RowGroups,
    state: GroupState | None = None,
    handoff: QuantizedGradHandoff | None = None,
) -> Tensor:
    """Multiply the rows of each expert by the transpose of its weight, and return `[m, n]` in x's dtype.

    Args:
        x_mk: Rows of all experts, one expert after the other.
        weight: Weights of all experts `[e·n, k]`, one expert after the other.
        groups: End of each expert's rows. An expert's rows begin where the previous expert's rows end; the last end is
            m.
        state: State of the experts' layers. Without it, everything runs in high precision.
        handoff: `state.grad_handoff`, which the operation after the layer also gets.
    """
    values, quantized = (x_mk, None) if isinstance(x_mk, Tensor) else (x_mk.tensor, x_mk.quantized)
    experts, grad_enabled = len(groups.ends_e), torch.is_grad_enabled()
    states = [HIGH_PRECISION] * experts if state is None else state.states
    layer: LinearState | JointLayer = states[0]
    if state is None or state.high_precision:
        joint = group_state.has_kernels(values, len(weight) // experts, weight.shape[1])
    elif joint := state.joint_quantizers(values, weight) is not None:
        layer = state.as_layer(groups)
    if joint:
        return _JointLinear.apply(values, weight, quantized, groups, layer, handoff, grad_enabled)
    return _OneByOneLinear.apply(values, weight, groups.ends_e, states, grad_enabled)


class _JointLinear(Function):
    """All experts together as one `layer`, computed by kernels. If `x8` is given, the values of `x_mk` are not read."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight: Tensor, x8: QuantizedTensor | None, groups: RowGroups,
        layer: LinearState | JointLayer, handoff: QuantizedGradHandoff | None, grad_enabled: bool,
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        high, ends_e = layer.high_precision, groups.ends_e
        n, k = len(weight) // len(ends_e), weight.shape[1]
        if x8 is None:
            x8 = quantize_input(layer, x_mk, for_wgrad=needs_dw)
        w8 = fp8_weight(layer, weight, needs_dx=needs_dx)
        if high.fprop and layer.batch_invariant:
            y_mn = _kernels().values_times_matrices(x_mk, in_dtype(weight, x_mk.dtype), ends_e, n)
        elif high.fprop:
            y_mn = grouped_mm(x_mk, in_dtype(weight, x_mk.dtype).view(-1, n, k).transpose(1, 2), offs=ends_e)
        else:
            y_mn = _kernels().rows_times_matrices(
                x8.required_rowwise, w8.required_rowwise, ends_e, n, x_mk.dtype, columnwise=False,
                fast=layer.fast_accum.fprop,
            )  # fmt: skip
        x: Operand | None = None
        if needs_dw:
            x = x_mk if high.wgrad else x8.required_columnwise
        ctx.granularity = x.granularity if isinstance(x, ScaledTensor) else None
        ends = ends_e if x is x_mk else None  # the ends of the rows are saved together with high-precision values
        ctx.save_for_backward(weight if needs_dx and high.dgrad else None, ends, *tensors_of(x))
        ctx.weight, ctx.layer, ctx.groups, ctx.handoff, ctx.w8 = weight, layer, groups, handoff, w8
        return y_mn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        layer, groups, weight, (w, _, *kept_x) = ctx.layer, ctx.groups, ctx.weight, ctx.saved_tensors
        high, ends_e, k = layer.high_precision, groups.ends_e, weight.shape[1]
        dy8 = None if ctx.handoff is None else ctx.handoff.take()
        if dy8 is None:
            dy_mn = dy_mn.contiguous()
            dy8 = quantize_grad_output(layer, high, dy_mn, needs_dx=needs_dx, needs_dw=needs_dw)
        dx = dw = None
        if needs_dx and high.dgrad:
            dx = grouped_mm(dy_mn, in_dtype(w, dy_mn.dtype).view(len(ends_e), -1, k), offs=ends_e)
        elif needs_dx:
            dx = _kernels().rows_times_matrices(
                dy8.required_rowwise, ctx.w8.required_columnwise, ends_e, k, dy_mn.dtype, columnwise=True,
                fast=layer.fast_accum.dgrad,
            )  # fmt: skip
        if needs_dw:
            x = operand_of(kept_x, ctx.granularity)
            dy = dy_mn.detach() if high.wgrad else dy8.required_columnwise
            dw = now_or_later(weight, partial(_joint_wgrad, weight, dy, x, groups, layer.fast_accum.wgrad))
        return dx, dw, None, None, None, None, None


def _joint_wgrad(weight: Tensor, dy: Operand, x: Operand, groups: RowGroups, fast: bool) -> Tensor | None:
    """Add dw `[e·n, k]` to the weight's sink, or return it if there is no sink."""
    if isinstance(x, ScaledTensor):
        operands, add = (dy, x, groups.padded_ends_e), partial(_add_sums, fast=fast)
        if x.granularity in (TENSOR, BLOCK_1X128):
            return paired_wgrad_by(weight, len(groups.ends_e), operands, add)
        sums = partial(add, [operands])
    elif wgrad_dtype(weight) == x.dtype:  # faster than our kernel, which can add to fp32
        assert isinstance(dy, Tensor)
        return deliver(weight, grouped_mm(dy.t(), x, offs=groups.ends_e).flatten(0, 1))
    else:
        sums = partial(_kernels().sums_over_rows, dy, x.detach(), groups.ends_e)
    return wgrad_by(weight, len(groups.ends_e), sums)


def _add_sums(
    of_micro_batches: Sequence[tuple[ScaledTensor, ScaledTensor, Tensor]],
    dw_enk: Tensor,
    *,
    accumulate: bool,
    fast: bool,
) -> None:
    """Write or add the weight gradient of one or two micro-batches to `dw_enk`.

    Each micro-batch is a tuple of dy, x and the padded ends of the experts' rows.
    """
    *earlier, (dy, x, padded_ends_e) = of_micro_batches
    _kernels().sums_over_rows(
        dy, x, padded_ends_e, dw_enk, accumulate=accumulate, fast=fast, earlier=earlier[0] if earlier else None
    )


class _OneByOneLinear(Function):
    """Experts computed one by one, each with its own `LinearState`."""

    @staticmethod
    def forward(
        ctx: Any, x_mk: Tensor, weight: Tensor, ends_e: Tensor, states: Sequence[LinearState], grad_enabled: bool
    ) -> Tensor:
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        weights = _weights(weight, states)
        y_mn = x_mk.new_empty(len(x_mk), len(weight) // len(states))
        kept: list[Operand | None] = []
        ctx.experts = []
        for rows, state, w_nk in zip(row_slices(ends_e), states, weights, strict=True):
            high, is_empty, x, kept_x = state.high_precision, rows.start == rows.stop, x_mk[rows], None
            w8 = fp8_weight(state, w_nk, needs_dx=needs_dx)
            if state.plan.calibrating:
                state.record_amax("weight", w_nk)
            if is_empty and w8 is not NOTHING:
                assert w8.required_rowwise  # cast the weight, to record its amax even without tokens
            # If other ranks have more rows of the expert, casts of x and dy may reduce an amax with these ranks.
            if not is_empty or state.token_group is not None:
                x8 = quantize_input(state, x, for_wgrad=needs_dw)
            if not is_empty:
                if state.plan.calibrating:
                    state.record_amax("input", x)
                if high.fprop:
                    y_mn[rows] = fprop(state, x, w_nk, x.dtype)
                else:
                    y_mn[rows] = fprop(state, x8.required_rowwise, w8.required_rowwise, x.dtype)
                if needs_dw and not high.wgrad:
                    kept_x = x8.required_columnwise
            kept.append(kept_x)
            granularity = None if kept_x is None else kept_x.granularity
            ctx.experts.append(_Expert(rows, state, high, state.plan.calibrating, w8, granularity))
        values = x_mk if needs_dw and any(state.high_precision.wgrad for state in states) else None
        ends = None if values is None else ends_e  # the ends are saved together with high-precision values
        ctx.save_for_backward(values, ends, *(tensor for x in kept for tensor in tensors_of(x)))
        ctx.weight = weight
        return y_mn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mn: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        dy_mn, weight, (values, _, *saved) = dy_mn.contiguous(), ctx.weight, ctx.saved_tensors
        weights = _weights(weight, [expert.state for expert in ctx.experts])
        dx_mk = dy_mn.new_empty(len(dy_mn), weight.shape[1]) if needs_dx else None
        wgrads: list[_Wgrad] = []
        for e, (rows, state, high, calibrating, w8, granularity) in enumerate(ctx.experts):
            is_empty, dy = rows.start == rows.stop, dy_mn[rows].detach()
            if is_empty and state.token_group is None:
                state.skip_grad_output()
                continue
            if calibrating:
                state.record_amax("grad_output", dy)
            dy8 = quantize_grad_output(state, high, dy, needs_dx=needs_dx, needs_dw=needs_dw)
            if is_empty:
                continue
            if dx_mk is not None and high.dgrad:
                dx_mk[rows] = dgrad(state, dy, weights[e], dy.dtype)
            elif dx_mk is not None:
                dx_mk[rows] = dgrad(state, dy8.required_rowwise, w8.required_columnwise, dy.dtype)
            if needs_dw and high.wgrad:
                wgrads.append(_Wgrad(e, state, dy, values[rows].detach()))
            elif needs_dw:
                x = operand_of(saved[3 * e : 3 * e + 3], granularity)
                wgrads.append(_Wgrad(e, state, dy8.required_columnwise, x))
        dw = None
        if needs_dw:
            dw = now_or_later(weight, partial(wgrad_by, weight, len(ctx.experts), partial(_add_wgrads, wgrads)))
        return dx_mk, dw, None, None, None


def _weights(weight: Tensor, states: Sequence[LinearState]) -> Sequence[Tensor]:
    """Return the weight of each expert.

    Weights gathered in FP8 have no values per expert; every expert then gets the whole weight.
    """
    if states[0].gathered_weight is not None:
        return [weight] * len(states)
    weights: Sequence[Any] = weight.detach().view(len(states), -1, weight.shape[1]).unbind()
    parts = parts_of(weight)
    if len(parts) > 1:  # a view of the joined tensor does not show writes to the parameters that were joined
        for w_nk, part in zip(weights, parts, strict=True):
            w_nk.parts = (part,)
    return weights


class _Expert(NamedTuple):
    """Rows of an expert in one forward, and how its layer ran.

    `granularity` belongs to the saved input; None means high-precision values.
    """

    rows: slice
    state: LinearState
    high: PerGemm
    calibrating: bool
    w8: WeightForm
    granularity: Granularity | None


class _Wgrad(NamedTuple):
    """Operands of an expert's weight gradient."""

    expert: int
    state: LinearState
    dy: Operand
    x: Operand


def _add_wgrads(wgrads: Sequence[_Wgrad], dw_enk: Tensor, *, accumulate: bool) -> None:
    """Write dw to `dw_enk`, with zeros for experts without rows, or add dw to it."""
    if not accumulate:
        dw_enk.zero_()
    for expert, state, dy, x in wgrads:
        add_wgrad(state, dy, x, dw_enk[expert])
