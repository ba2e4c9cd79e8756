"""The three GEMMs of a linear layer, in FP8 or in high precision, as autograd Functions.

    fprop  y  = x8 · w8ᵀ dgrad  dx = dy8 · (w8ᵀ copy)ᵀ wgrad  dw = (dy8ᵀ copy) · (x8ᵀ copy)ᵀ

Tensor cores take FP8 operands row-major along the summed dim, so w, x and dy are each needed rowwise and columnwise
(`QuantizedTensor`); one kernel writes both in a single pass. The weight is quantized once per optimizer step and keeps
both copies until `LinearState.invalidate_weight`. Backward keeps x columnwise: FP8, half the memory of bf16. Under
sequence parallelism it may keep this rank's tokens only and gather them while dgrad runs
(`megafp8.ops.quantized_gather`).

How a layer runs is its `LinearPlan` (`megafp8.plan`). The input may have been quantized by the operation before the
layer, and the output's gradient by the one after (`megafp8.ops.fusion`). A GEMM in high precision keeps its operands
unquantized.

With smooth SwiGLU (`megafp8.fp8.smoothing`) the weight's columns are divided before they are quantized, and so is dw.

dw goes where `megafp8.ops.wgrad` says. Communication at the two ends of a tensor-parallel layer (`TPComm`) overlaps
with the GEMMs: dx is reduced while wgrad is computed (`megafp8.distributed.tp_overlap`).

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

from megafp8.distributed.tp_overlap import NO_COMM, AllGatherHandle, Product, ReduceHandle, TPOverlap
from megafp8.fp8.gemm.dispatch import gemm
from megafp8.fp8.linear_state import LinearState, QuantizedGradHandoff
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor
from megafp8.ops.autograd import once_differentiable
from megafp8.ops.deferred_wgrad import Wgrad
from megafp8.ops.fusion import LinearInput, Recompute, RecomputedInput, as_matrix, check_alignment
from megafp8.ops.packed_weight import PackedWeight
from megafp8.ops.quantized_gather import LOCAL_COMM, Rows, TPComm, gather_columns
from megafp8.ops.wgrad import deliver, open_store, summed_in_place, wgrad_dtype, wgrad_now_or_later

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
    """`x wᵀ + bias` as `state.plan` says: x `[..., k]`, weight `[n, k]`, bias `[n]` -> `[..., n]` in x's dtype.

    `handoff`: `state.grad_handoff()`, given to the operation after the layer too; excludes a bias. With `comm` the
    first dim of y is not that of x, and the bias is added after the sum over ranks.
    """
    plan = state.plan
    if state.packed_weight is not None:
        return _packed_linear(x if isinstance(x, Tensor) else x.tensor, state.packed_weight, bias, comm)
    if plan.calibrating:
        assert isinstance(x, Tensor) or x.quantized is None
        return _calibrating_linear(x if isinstance(x, Tensor) else x.tensor, weight, state, bias, comm)
    if not plan.fp8:
        return high_precision_linear(x, weight, bias, comm=comm)
    fused = x if isinstance(x, LinearInput) else LinearInput(x, None, None)
    assert not plan.smoothed or fused.quantized is not None, "a smoothed layer cannot quantize its input itself"
    assert bias is None or handoff is None
    if plan.fp8_only and comm == LOCAL_COMM:
        return _LocalFp8Linear.apply(
            fused.tensor, weight, bias, state, fused.quantized, handoff, torch.is_grad_enabled()
        )
    y = _Fp8Linear.apply(fused.tensor, weight, state, fused, handoff, torch.is_grad_enabled(), comm)
    return with_bias(y, bias)


def high_precision_linear(
    x: Tensor | LinearInput, weight: nn.Parameter, bias: Tensor | None = None, *, comm: TPComm = LOCAL_COMM
) -> Tensor:
    """`x wᵀ + bias` in x's dtype; a weight of another dtype is converted first."""
    values, recompute = (x, None) if isinstance(x, Tensor) else (x.tensor, x.recompute)
    if recompute is None and comm == LOCAL_COMM:
        return _LocalLinear.apply(values, weight, bias)
    y = _HighPrecisionLinear.apply(values, weight, recompute, comm)
    return with_bias(y, bias)


def _packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, comm: TPComm) -> Tensor:
    """With a weight in another form than the parameter's; there are no gradients."""
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
    """`y + bias` in y's dtype."""
    return y if bias is None else y + bias.to(y.dtype)


def _calibrating_linear(
    x: Tensor, weight: nn.Parameter, state: LinearState, bias: Tensor | None, comm: TPComm
) -> Tensor:
    """In high precision, recording the amaxes from which static scales are made."""
    state.record_amax("input", x)
    state.record_amax("weight", weight)
    y = high_precision_linear(x, weight, bias, comm=comm)
    if y.requires_grad:
        y.register_hook(partial(state.record_amax, "grad_output"))
    return y


def _shaped(y_mn: Tensor, x: Tensor) -> Tensor:
    """`[m, n]` with the leading dims of x, the first of which grew or shrank with m.

    Not as a view: what a Function returns as one cannot be changed in place.
    """
    (m, n), lead = y_mn.shape, list(x.shape[:-1])
    tokens = math.prod(lead)
    if m != tokens:
        lead[0] = lead[0] * m // tokens
    return _unsafe_view(y_mn, [*lead, n])


class _LocalLinear(Function):
    """`_HighPrecisionLinear` without communication and recompute, and with the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        x_mk, w_nk = as_matrix(x), _in_dtype(weight, x.dtype)
        ctx.save_for_backward(weight if needs_dx else None, x_mk if needs_dw else None)
        ctx.weight = weight  # saved tensors may come back as other objects, without their sink
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else _in_dtype(bias, x.dtype)
        # Matrices of our own: where a dim is 1, torch.matmul may not see that x is one, and multiplies row by row.
        return _unsafe_view(gemm(x_mk, w_nk.t(), x.dtype, bias=bias), [*x.shape[:-1], w_nk.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight, x_mk = ctx.saved_tensors
        dy_mn = as_matrix(dy)
        dx = dw = None
        if weight is not None:
            dx = gemm(dy_mn, _in_dtype(weight, dy.dtype), dy.dtype).view(*dy.shape[:-1], weight.shape[1])
        if x_mk is not None:
            dw = wgrad_now_or_later(ctx.weight, dy_mn, x_mk)
        return dx, dw, _bias_grad(dy_mn, ctx.bias_dtype) if ctx.needs_input_grad[2] else None


def _in_dtype(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return parameter if parameter.dtype == dtype else parameter.to(dtype)


def _bias_grad(dy_mn: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over tokens, in fp32 for 16-bit dtypes, rounded once to the bias's."""
    return dy_mn.sum(0, dtype=dtype)


def _product(a: AllGatherHandle, b_kn: Tensor, dtype: torch.dtype) -> Product:
    """`a · b` in high precision."""
    return Product(a, b_kn.shape[1], dtype, lambda part, out: gemm(a.gathered[0][part], b_kn, dtype, out))


class _HighPrecisionLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recompute: RecomputedInput | None, comm: TPComm) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        arriving = comm.input.gather([as_matrix(x)])
        y_mn = comm.output.sum(_product(arriving, weight.to(x.dtype).t(), x.dtype)).wait()
        kept_x = () if not needs_dw else arriving.gathered if recompute is None else recompute.tensors
        ctx.save_for_backward(weight if needs_dx else None, *kept_x)
        ctx.recompute = None if recompute is None else recompute.how
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        ctx.comm = comm
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *kept_x = ctx.saved_tensors
        arriving = ctx.comm.output.gather([as_matrix(dy)])
        x = _values(kept_x, ctx.recompute) if kept_x else None  # under way until wgrad
        dx = dw = None
        if weight is not None:
            dx = ctx.comm.input.sum(_product(arriving, weight.to(dy.dtype), dy.dtype))  # under way until wgrad is done
        (dy_mn,) = arriving.wait()
        if x is not None:
            dw = wgrad_now_or_later(ctx.weight, dy_mn, x())
        return None if dx is None else dx.wait().view(ctx.x_shape), dw, None, None


def _values(kept_x: Sequence[Tensor | None], recompute: Recompute | None) -> Callable[[], Tensor]:
    """What gives x `[m, k]`, kept or recomputed."""
    if recompute is not None:
        return recompute.values(kept_x)
    (x_mk,) = kept_x
    assert x_mk is not None
    return lambda: x_mk


class _LocalFp8Linear(Function):
    """`_Fp8Linear` without communication and with the bias, of a layer whose plan is `fp8_only`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: LinearState,
        x8: QuantizedTensor | None,
        handoff: QuantizedGradHandoff | None,
        grad_enabled: bool,  # torch itself says that gradients are needed within no_grad too
    ) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad if grad_enabled else (False, False)
        if x8 is None:
            x8 = state.quantizers.input(Plain(as_matrix(x)), rowwise=True, columnwise=needs_dw)
        w8 = state.fp8_weight(weight, columnwise=needs_dx)
        fast = state.fast_accum.fprop
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else _in_dtype(bias, x.dtype)
        y_mn = state.gemm.tn(x8.required_rowwise, w8.required_rowwise, x.dtype, use_fast_accum=fast, bias=bias)
        if needs_dw:
            data, scale_inv, ctx.granularity, tensor_scale = x8.required_columnwise
            ctx.save_for_backward(data, scale_inv, tensor_scale)
        ctx.weight, ctx.state, ctx.w8, ctx.handoff = weight, state, w8 if needs_dx else None, handoff
        return _unsafe_view(y_mn, [*x.shape[:-1], y_mn.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        state, weight = ctx.state, ctx.weight
        db = _bias_grad(as_matrix(dy), ctx.bias_dtype) if needs_db else None
        dy8 = None if ctx.handoff is None else ctx.handoff.take()
        if dy8 is None:
            dy8 = state.quantizers.grad_output(Plain(as_matrix(dy)), rowwise=needs_dx, columnwise=needs_dw)
        dx = dw = None
        if needs_dx:
            fast = state.fast_accum.dgrad
            dx = state.gemm.tn(dy8.required_rowwise, ctx.w8.required_columnwise, dy.dtype, use_fast_accum=fast)
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        if needs_dw:
            data, scale_inv, tensor_scale = ctx.saved_tensors
            x_km, dy_nm = ScaledTensor(data, scale_inv, ctx.granularity, tensor_scale), dy8.required_columnwise
            store = open_store(weight)
            if store is None:
                dw = _fp8_wgrad(state, weight, dy_nm, x_km)
            else:
                store.put(partial(_begin_wgrad, state, weight, dy_nm, None, x_km, None))
        return dx, dw, db, *[None] * 4


class _Fp8Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        state: LinearState,
        fused: LinearInput,
        handoff: QuantizedGradHandoff | None,
        grad_enabled: bool,  # torch itself says that gradients are needed within no_grad too
        comm: TPComm,
    ) -> Tensor:
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        x8, recompute = fused.quantized, fused.recompute
        high = state.high_precision
        columnwise_wanted = needs_dw and not high.wgrad and recompute is None
        overlap = comm.input if x8 is not None else NO_COMM  # values are gathered before they are quantized
        if x8 is None:
            (x_mk,) = comm.input.gather([as_matrix(x)]).wait()
            if not high.fprop or columnwise_wanted:
                x8 = state.quantizers.input(Plain(x_mk), rowwise=not high.fprop, columnwise=columnwise_wanted)
        w8: QuantizedTensor | None = None
        weight_kept = needs_dx and not high.dgrad and not state.transient_weight
        if not high.fprop or weight_kept:
            w8 = state.fp8_weight(weight, columnwise=weight_kept)

        if high.fprop:
            product = _product(NO_COMM.gather([x_mk]), weight.to(x.dtype).t(), x.dtype)
        else:
            assert x8 is not None
            assert w8 is not None
            rows = Rows(x8.required_rowwise, overlap)
            product = _fp8_product(state, rows, w8.required_rowwise, x.dtype, state.fast_accum.fprop)
        y_mn = comm.output.sum(product).wait()

        kept_x: Any = ()
        if needs_dw and recompute is not None:
            kept_x = recompute.tensors
        elif needs_dw and high.wgrad:
            kept_x = (x_mk,)
        elif needs_dw:
            assert x8 is not None
            x_km = rows.columnwise() if x8.columnwise is None else x8.columnwise
            kept_x = (x_km.data, x_km.scale_inv, x_km.tensor_scale)
            ctx.granularity, ctx.x_group = x_km.granularity, None if x8.columnwise is None else overlap.group
        ctx.save_for_backward(weight if needs_dx and high.dgrad else None, *kept_x)
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        ctx.state, ctx.w8, ctx.handoff, ctx.comm = state, w8 if weight_kept else None, handoff, comm
        ctx.recompute = None if recompute is None else recompute.how
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        state, high, comm = ctx.state, ctx.state.high_precision, ctx.comm
        weight, *kept_x = ctx.saved_tensors
        dx_in_fp8, dw_in_fp8 = needs_dx and not high.dgrad, needs_dw and not high.wgrad
        if dw_in_fp8:
            own_x, x_group = _columnwise_input(ctx, kept_x)
        dy8, dy_mn, overlap = _grad_output(ctx, dy, rowwise=dx_in_fp8, columnwise=dw_in_fp8)
        rows = None if dy8 is None or dy8.rowwise is None else Rows(dy8.rowwise, overlap)

        begin: Wgrad | None = None
        finish: Callable[[], Tensor | None] | None = None
        store = open_store(ctx.weight)
        if dw_in_fp8 and dy8 is not None and dy8.columnwise is not None:
            begin = partial(_begin_wgrad, state, ctx.weight, dy8.columnwise, overlap.group, own_x, x_group)
            finish = begin() if store is None else None  # a sharded one is gathered while dgrad runs
        dx: ReduceHandle | None = None
        if dx_in_fp8:
            assert rows is not None
            w_kn = state.dgrad_weight(ctx.weight, ctx.w8)
            dx = comm.input.sum(_fp8_product(state, rows, w_kn, dy.dtype, state.fast_accum.dgrad))
        elif needs_dx:
            assert dy_mn is not None
            dx = comm.input.sum(_product(NO_COMM.gather([dy_mn]), weight.to(dy.dtype), dy.dtype))
        if dw_in_fp8 and begin is None:
            assert rows is not None
            begin = partial(_begin_wgrad, state, ctx.weight, rows.columnwise(), None, own_x, x_group)
            finish = begin() if store is None else None

        dw: Tensor | None = None
        if finish is not None:
            dw = finish()
        elif begin is not None:
            assert store is not None
            store.put(begin)
        elif needs_dw:
            assert dy_mn is not None
            dw = wgrad_now_or_later(ctx.weight, dy_mn, _values(kept_x, ctx.recompute)())
        return None if dx is None else dx.wait().view(ctx.x_shape), dw, *[None] * 5


def _fp8_product(state: LinearState, rows: Rows, b_nk: ScaledTensor, dtype: torch.dtype, fast: bool) -> Product:
    """`a · bᵀ` in FP8, of the rows of a as they arrive."""

    def compute(part: slice, out: Tensor | None) -> Tensor:
        return state.gemm.tn(rows.part(part), b_nk, dtype, use_fast_accum=fast, out=out)

    return Product(rows.arriving, b_nk.data.shape[0], dtype, compute)


def _grad_output(
    ctx: Any, dy: Tensor, *, rowwise: bool, columnwise: bool
) -> tuple[QuantizedTensor | None, Tensor | None, TPOverlap]:
    """dy in FP8 and how it is gathered over tokens; and its values, where these were gathered."""
    dy8: QuantizedTensor | None = None if ctx.handoff is None else ctx.handoff.take()
    if dy8 is not None:
        return dy8, None, NO_COMM
    comm, dy_mn = ctx.comm, as_matrix(dy)
    quantizer = ctx.state.shard_grad_quantizer
    if quantizer is not None:
        check_alignment(dy_mn.shape[0], quantizer.shard_alignment)
        return quantizer(Plain(dy_mn), rowwise=True, columnwise=not quantizer.per_tensor), None, comm.output
    (dy_mn,) = comm.output.gather([dy_mn]).wait()
    if rowwise or columnwise:
        dy8 = ctx.state.quantizers.grad_output(Plain(dy_mn), rowwise=rowwise, columnwise=columnwise)
    return dy8, dy_mn, NO_COMM


def _columnwise_input(ctx: Any, kept_x: Sequence[Tensor | None]) -> tuple[ScaledTensor, ProcessGroup | None]:
    """The input columnwise, kept or recomputed, and the group to gather it over."""
    if ctx.recompute is not None:
        return ctx.recompute.columnwise(kept_x, ctx.state.quantizers.input)
    data, scale_inv, tensor_scale = kept_x
    assert data is not None
    assert scale_inv is not None
    return ScaledTensor(data, scale_inv, ctx.granularity, tensor_scale), ctx.x_group


def _begin_wgrad(
    state: LinearState,
    weight: Tensor,
    dy_nm: ScaledTensor,
    dy_group: ProcessGroup | None,
    x_km: ScaledTensor,
    x_group: ProcessGroup | None,
) -> Callable[[], Tensor | None]:
    """Start gathering what is sharded; returns `_fp8_wgrad` of what arrives."""
    x, dy = gather_columns(x_km, x_group), gather_columns(dy_nm, dy_group)
    alive = (x_km, dy_nm)  # what is being gathered, until it has arrived

    def finish() -> Tensor | None:
        assert alive
        return _fp8_wgrad(state, weight, dy.wait(), x.wait())

    return finish


def _fp8_wgrad(state: LinearState, weight: Tensor, dy_nm: ScaledTensor, x_km: ScaledTensor) -> Tensor | None:
    """dw to its sink, and None; or dw. Added in place to a sink of the dtype that GEMMs accumulate in.

    Not with smoothing, where dw is that of the quantized weight, whose columns are divided.
    """
    if state.smoothing is not None:
        dw_nk = state.gemm.tn(dy_nm, x_km, wgrad_dtype(weight), use_fast_accum=state.fast_accum.wgrad)
        return deliver(weight, dw_nk.mul_(state.smoothing.scale_inv_f))
    main_grad = summed_in_place(weight)
    if main_grad is not None:
        state.gemm.accumulate_tn(dy_nm, x_km, main_grad, use_fast_accum=state.fast_accum.wgrad)
        weight.grad_sink.added()  # type: ignore[attr-defined]
        return None
    return deliver(weight, state.gemm.tn(dy_nm, x_km, wgrad_dtype(weight), use_fast_accum=state.fast_accum.wgrad))
