"""Linear layer in FP8 or in high precision, as an autograd Function on top of `megafp8.linear.gemms`.

The weight is quantized once per optimizer step, and both copies are kept until `LinearState.invalidate_weight`. For
backward, the layer keeps x columnwise in FP8, half the memory of bf16. Under sequence parallelism it may keep only this
rank's tokens and gather them while dgrad runs (`megafp8.linear.quantized_gather`).

The `LinearPlan` says how a layer runs (`megafp8.plan`). The operation before the layer may have quantized the input,
and the operation after it the output gradient (`megafp8.linear.fusion`). A GEMM in high precision keeps its operands
unquantized.

dw is added to the gradient sink of the weight (`megafp8.linear.grad_sink`). Communication at the two ends of a
tensor-parallel layer (`TPComm`) overlaps with the GEMMs: dx is reduced while wgrad is computed
(`megafp8.parallel.tp_overlap`). A layer without communication uses a separate Function with less host overhead.

Shapes: m tokens (all leading dims), k inputs, n outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import LinearInput, RecomputedInput, as_matrix, check_alignment
from megafp8.linear.gemms import (
    HIGH_PRECISION,
    INVARIANT_HIGH_PRECISION,
    NOTHING,
    Operand,
    detached,
    dgrad,
    fp8_weight,
    fprop,
    in_dtype,
    operand_of,
    quantize_grad_output,
    quantize_input,
    tensors_of,
    wgrad,
)
from megafp8.linear.grad_sink import begin_or_defer, now_or_later, open_store
from megafp8.linear.packed_weight import PackedWeight
from megafp8.linear.quantized_gather import LOCAL_COMM, Rows, TPComm, gather_columns
from megafp8.linear.state import LinearState, QuantizedGradHandoff
from megafp8.linear.weight_forms import WeightForm
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import QuantizedTensor, ScaledTensor
from megafp8.parallel.tp_overlap import NO_COMM, Product, ReduceHandle, TPOverlap

_unsafe_view = torch.ops.aten._unsafe_view.default


def linear(
    x: Tensor | LinearInput,
    weight: nn.Parameter,
    state: LinearState,
    *,
    bias: Tensor | None = None,
    handoff: QuantizedGradHandoff | None = None,
    comm: TPComm = LOCAL_COMM,
) -> Tensor:
    """Return `x wᵀ + bias`, `[..., n]` in x's dtype, computed as `state.plan` says.

    Args:
        x: Input `[..., k]`.
        weight: Weight `[n, k]`.
        state: State of the layer.
        bias: Bias `[n]`. With `comm`, it is added after the sum over ranks.
        handoff: `state.grad_handoff()`, which the operation after the layer also gets. Excludes a bias.
        comm: Communication at the ends of a tensor-parallel layer. The first dim of the output then differs from x.
    """
    values, quantized, recompute = (x, None, None) if isinstance(x, Tensor) else x
    if state.packed_weight is not None:
        return _packed_linear(values, state.packed_weight, bias, comm)
    plan = state.plan
    assert bias is None or handoff is None
    if comm != LOCAL_COMM:
        y = _ShardedLinear.apply(values, weight, state, quantized, recompute, handoff, torch.is_grad_enabled(), comm)
        return with_bias(y, bias)
    options = quantized, recompute, handoff, torch.is_grad_enabled()
    if bias is None or plan.fp8_only or (not plan.fp8 and recompute is None):
        return _Linear.apply(values, weight, bias, state, options)
    return with_bias(_Linear.apply(values, weight, None, state, options), bias)  # the output is rounded twice


def high_precision_linear(
    x: Tensor | LinearInput, weight: nn.Parameter, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """Return `x wᵀ + bias` in x's dtype. A weight of another dtype is converted first."""
    return linear(x, weight, INVARIANT_HIGH_PRECISION if batch_invariant else HIGH_PRECISION, bias=bias)


def _packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, comm: TPComm) -> Tensor:
    """Compute a linear layer with a packed weight instead of the parameter, without gradients."""
    assert not torch.is_grad_enabled()
    if comm == LOCAL_COMM:
        return _shaped(weight.product(as_matrix(x), bias), x)
    arriving = comm.input.gather([as_matrix(x)])

    def compute(part: slice, out: Tensor | None) -> Tensor:
        y_mn = weight.product(arriving.gathered[0][part])
        return y_mn if out is None else out.copy_(y_mn)

    y_mn = comm.output.sum(Product(arriving, weight.shape[0], x.dtype, compute)).wait()
    return with_bias(_shaped(y_mn, x), bias)


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return `y + bias` in y's dtype."""
    return y if bias is None else y + bias.to(y.dtype)


def _shaped(y_mn: Tensor, x: Tensor) -> Tensor:
    """Reshape `[m, n]` to the leading dims of x, with the first dim scaled if m differs from x's tokens.

    The result is not a view, because a view that a Function returns cannot be changed in place.
    """
    (m, n), lead = y_mn.shape, list(x.shape[:-1])
    tokens = math.prod(lead)
    if m != tokens:
        lead[0] = lead[0] * m // tokens
    return _unsafe_view(y_mn, [*lead, n])


def _calibrate(state: LinearState, x: Tensor, weight: Tensor) -> None:
    """Record the amaxes for static scales, except the output gradient's amax."""
    state.record_amax("input", x)
    state.record_amax("weight", weight)


def _keep(ctx: Any, weight: Tensor | None, x: Operand | None, recompute: RecomputedInput | None) -> None:
    """Save the tensors that backward reads: the weight's values for dgrad; x or its recomputation inputs for wgrad."""
    kept: Sequence[Tensor | None]
    if recompute is not None:
        kept, ctx.recompute = recompute
    elif isinstance(x, ScaledTensor):
        ctx.recompute, ctx.granularity, kept = None, x.granularity, tensors_of(x)
    else:
        ctx.recompute, kept = None, (x,)
    ctx.save_for_backward(weight, *kept)


def _kept_columnwise(
    ctx: Any, kept: Sequence[Tensor | None], state: LinearState, group: ProcessGroup | None
) -> tuple[ScaledTensor, ProcessGroup | None]:
    """Return the columnwise input, saved or recomputed, and the group to gather it over."""
    if ctx.recompute is not None:
        return ctx.recompute.columnwise(kept, state.quantizers.input)
    x_km = operand_of(kept, ctx.granularity)
    assert isinstance(x_km, ScaledTensor)
    return x_km, group


def _kept_values(ctx: Any, kept: Sequence[Tensor | None]) -> Callable[[], Tensor]:
    """Return a function that returns x `[m, k]`, saved or recomputed."""
    if ctx.recompute is not None:
        return ctx.recompute.values(kept)
    x_mk = kept[0]
    assert x_mk is not None
    return lambda: x_mk


class _Linear(Function):
    """Linear layer without communication.

    `given` is a tuple of the quantized input, its recomputation, the handoff, and whether gradients are enabled
    outside: within a Function, torch reports that gradients are needed even under no_grad.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState,
        given: tuple[QuantizedTensor | None, RecomputedInput | None, QuantizedGradHandoff | None, bool],
    ) -> Tensor:  # fmt: skip
        x8, recompute, handoff, grad_enabled = given
        needs_dx, needs_dw, *_ = ctx.needs_input_grad if grad_enabled else (False, False)
        plan, high, dtype, bias_dtype = state.plan, state.high_precision, x.dtype, None
        w8: WeightForm = NOTHING
        if x8 is None:
            # Reshape x to a matrix ourselves: if a dim is 1, torch.matmul may miss that x is one, and multiply by row.
            x_mk = as_matrix(x)
        if plan.fp8:
            if x8 is None:
                x8 = quantize_input(state, x_mk, for_wgrad=needs_dw and recompute is None)
            w8 = fp8_weight(state, weight, needs_dx=needs_dx)
        elif plan.calibrating:
            _calibrate(state, x, weight)
        x8 = x8 or NOTHING
        if bias is not None:
            bias_dtype, bias = bias.dtype, in_dtype(bias, dtype)
        kept_x: Operand | None = None
        if high.fprop:
            y_mn = fprop(state, x_mk, weight, dtype, bias=bias)
        else:
            y_mn = fprop(state, x8.required_rowwise, w8.required_rowwise, dtype, bias=bias)
        if not needs_dw:
            recompute = None
        elif recompute is None:
            kept_x = x_mk if high.wgrad else x8.required_columnwise
        _keep(ctx, weight if needs_dx and high.dgrad else None, kept_x, recompute)
        ctx.forward = weight, state, plan, high, handoff, w8 if needs_dx else None, bias_dtype
        return _unsafe_view(y_mn, [*x.shape[:-1], y_mn.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        weight, state, plan, high, handoff, w8, bias_dtype = ctx.forward
        w_nk, *kept_x = ctx.saved_tensors
        dy8 = None if handoff is None else handoff.take()
        if dy8 is None:
            dy_mn = as_matrix(dy)
            dy8 = NOTHING
            if plan.fp8:
                dy8 = quantize_grad_output(state, high, dy_mn, needs_dx=needs_dx, needs_dw=needs_dw)
            elif plan.calibrating:
                state.record_amax("grad_output", dy)
        # Sum in fp32 for 16-bit dtypes, and round once to the bias's dtype.
        db = dy_mn.sum(0, dtype=bias_dtype) if needs_db else None
        dx = dw = None
        if needs_dx:
            if high.dgrad:
                dx = dgrad(state, dy_mn, w_nk, dy.dtype)
            else:
                dx = dgrad(state, dy8.required_rowwise, w8.required_columnwise, dy.dtype)
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        if needs_dw:
            if high.wgrad:
                x_mk = kept_x[0] if ctx.recompute is None else ctx.recompute.values(kept_x)()
                operands: tuple[Operand, Operand] = dy_mn, x_mk
            else:
                operands = dy8.required_columnwise, _kept_columnwise(ctx, kept_x, state, None)[0]
            if open_store(weight) is None:
                dw = wgrad(state, weight, *operands)
            else:  # detach, so that the store does not keep the graph alive
                dw = now_or_later(weight, partial(wgrad, state, weight, *map(detached, operands)))
        return dx, dw, db, None, None


def _product_rows(
    multiply: Callable[..., Tensor], state: LinearState, rows: Rows, w: Operand, dtype: torch.dtype, part: slice,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute fprop or dgrad of the rows `part`, into `out` if given."""
    return multiply(state, rows.part(part), w, dtype, out=out)


class _ShardedLinear(Function):
    """Linear layer with communication at its ends and without bias; otherwise like `_Linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, state: LinearState, x8: QuantizedTensor | None,
        recompute: RecomputedInput | None, handoff: QuantizedGradHandoff | None, grad_enabled: bool, comm: TPComm,
    ) -> Tensor:  # fmt: skip
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        plan, high, dtype = state.plan, state.high_precision, x.dtype
        if plan.calibrating:
            _calibrate(state, x, weight)
        overlap = comm.input
        if x8 is not None:
            rows = Rows(x8.required_rowwise, overlap)
        elif not plan.fp8:
            rows, x8 = Rows(as_matrix(x), overlap), NOTHING
        else:  # values are gathered before they are quantized
            (x_mk,) = overlap.gather([as_matrix(x)]).wait()
            overlap, x8 = NO_COMM, quantize_input(state, x_mk, for_wgrad=needs_dw and recompute is None)
            rows = Rows(x_mk if high.fprop else x8.required_rowwise, overlap)
        w8 = fp8_weight(state, weight, needs_dx=needs_dx)
        w: Operand = in_dtype(weight, dtype) if high.fprop else w8.required_rowwise
        product = partial(_product_rows, fprop, state, rows, w, dtype)
        y_mn = comm.output.sum(Product(rows.arriving, weight.shape[0], dtype, product)).wait()

        kept_x: Operand | None = None
        if needs_dw and recompute is None:
            if high.wgrad:
                kept_x = x_mk if plan.fp8 else rows.values()
            else:
                kept_x = rows.columnwise() if x8.columnwise is None else x8.columnwise
        ctx.x_group = None if x8.columnwise is None else overlap.group
        _keep(ctx, weight if needs_dx and high.dgrad else None, kept_x, recompute if needs_dw else None)
        ctx.weight, ctx.x_shape = weight, x.shape
        ctx.state, ctx.high, ctx.handoff, ctx.comm = state, high, handoff, comm
        ctx.w8, ctx.calibrating = w8 if needs_dx else None, plan.calibrating
        ctx.shard_grad_quantizer = state.shard_grad_quantizer
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        state, weight, high, comm, dtype = ctx.state, ctx.weight, ctx.high, ctx.comm, dy.dtype
        w_nk, *kept_x = ctx.saved_tensors
        if ctx.calibrating:
            state.record_amax("grad_output", dy)
        dw_in_fp8 = needs_dw and not high.wgrad
        if dw_in_fp8:
            x_km, x_group = _kept_columnwise(ctx, kept_x, state, ctx.x_group)
        dy8, rows, overlap, values = _gather_grad_output(ctx, dy, needs_dx=needs_dx, needs_dw=needs_dw)
        x = _kept_values(ctx, kept_x) if needs_dw and high.wgrad else None  # gathered until wgrad

        finish: Callable[[], Tensor | None] = _nothing
        if dw_in_fp8 and dy8.columnwise is not None:  # if dy is sharded, it is gathered while dgrad runs
            begin = partial(_begin_wgrad, state, weight, dy8.columnwise, overlap.group, x_km, x_group)
            finish = begin_or_defer(weight, begin)
        dx: ReduceHandle | None = None
        if needs_dx:
            w: Operand = in_dtype(w_nk, dtype) if high.dgrad else ctx.w8.required_columnwise
            product = partial(_product_rows, dgrad, state, rows, w, dtype)
            dx = comm.input.sum(Product(rows.arriving, weight.shape[1], dtype, product))  # reduced until wgrad is done
        if dw_in_fp8 and dy8.columnwise is None:  # one scale per tensor: all rows, transposed
            begin = partial(_begin_wgrad, state, weight, rows.columnwise(), None, x_km, x_group)
            finish = begin_or_defer(weight, begin)
        if x is not None:  # detach, so that the store does not keep the graph alive
            finish = partial(now_or_later, weight, partial(wgrad, state, weight, values().detach(), x().detach()))
        dw = finish()
        return None if dx is None else dx.wait().view(ctx.x_shape), dw, *[None] * 6


def _gather_grad_output(
    ctx: Any, dy: Tensor, *, needs_dx: bool, needs_dw: bool
) -> tuple[QuantizedTensor, Rows, TPOverlap, Callable[[], Tensor]]:
    """Gather dy, quantized if FP8 GEMMs read it.

    Returns:
        dy in FP8; its rows, being gathered, for dgrad; the overlap that gathers both; and a function that returns dy's
        values.
    """
    dy8: QuantizedTensor | None = None if ctx.handoff is None else ctx.handoff.take()
    output, quantizer = ctx.comm.output, ctx.shard_grad_quantizer
    if dy8 is not None:
        return dy8, Rows(dy8.required_rowwise, NO_COMM), NO_COMM, _no_values
    dy_mn = as_matrix(dy)
    if quantizer is not None:
        check_alignment(dy_mn.shape[0], quantizer.shard_alignment)
        dy8 = quantizer(Plain(dy_mn), rowwise=True, columnwise=not quantizer.per_tensor)
        return dy8, Rows(dy8.required_rowwise, output), output, _no_values
    if all(ctx.high):
        rows = Rows(dy_mn, output)
        return NOTHING, rows, output, rows.values
    (whole_mn,) = output.gather([dy_mn]).wait()  # values are gathered before they are quantized
    dy8 = quantize_grad_output(ctx.state, ctx.high, whole_mn, needs_dx=needs_dx, needs_dw=needs_dw)
    return dy8, Rows(whole_mn if dy8.rowwise is None else dy8.rowwise, NO_COMM), NO_COMM, lambda: whole_mn


def _nothing() -> None:
    """Finish nothing: the weight needs no gradient."""


def _no_values() -> Tensor:
    """Raise AssertionError: the gradient exists only in FP8."""
    raise AssertionError("a gradient that was quantized before it was gathered has no values")


def _begin_wgrad(
    state: LinearState,
    weight: Tensor,
    dy_nm: ScaledTensor,
    dy_group: ProcessGroup | None,
    x_km: ScaledTensor,
    x_group: ProcessGroup | None,
) -> Callable[[], Tensor | None]:
    """Start to gather the sharded operands, and return a function that computes `wgrad` once they arrive."""
    x, dy = gather_columns(x_km, x_group), gather_columns(dy_nm, dy_group)
    alive = (x_km, dy_nm)  # keep the tensors alive until they have been gathered

    def finish() -> Tensor | None:
        assert alive
        return wgrad(state, weight, dy.wait(), x.wait())

    return finish
