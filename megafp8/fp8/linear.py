"""The three GEMMs of a linear layer, in FP8 or in high precision, as autograd Functions.

    fprop  y  = x8 · w8ᵀ
    dgrad  dx = dy8 · (w8ᵀ copy)ᵀ
    wgrad  dw = (dy8ᵀ copy) · (x8ᵀ copy)ᵀ

Tensor cores want FP8 operands row-major along the summed dim, so w, x and dy are each needed in both orientations, as
the rows and the columns of an `Operand`; one kernel writes both in a single pass. The weight is quantized once an
optimizer step and keeps both copies until `invalidate_weight`. Backward keeps the columns of x: FP8, half the memory of
bf16. Under sequence parallelism it may keep this rank's tokens of them alone, and gathers them while dgrad runs; those
of dy may come cut likewise (`megafp8.fp8.gathering`).

What enters a layer may be quantized already, by a norm or an activation that was fused with the cast; and what comes
back into it too. What is kept for wgrad may be made again instead (`megafp8.fp8.handover` has both).

A layer behind SwiGLU may have its input smoothed (`megafp8.fp8.smoothing`): then its weight's columns are divided
before they are cast, and so is dw.

Each GEMM can be kept in high precision instead; then what it needs is kept unquantized.

A weight may have an attribute `grad_sink`, set by whoever gathers gradients (`GradSink`): dw `[n, k]` is then added to
its `main_grad`, by the GEMM itself where that can be. Autograd sees no gradient for the weight, which spares a bf16
gradient and its rounding. Without a sink, dw is returned in the weight's dtype. A sink may have a store that, while it
is open, takes wgrad for later (`megafp8.fp8.deferred`).

Shapes: m tokens (all leading dims), k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megafp8.fp8.deferred import WgradStore
from megafp8.fp8.gathering import gather_columns
from megafp8.fp8.gemm import Fp8Gemm, gemm
from megafp8.fp8.handover import Again, Computed, GradSlot, Input, Quantized, Remake
from megafp8.fp8.matrix import Operand, Scaled
from megafp8.fp8.quantizers import Quantizer
from megafp8.fp8.recipe import PerGemm
from megafp8.fp8.report import ObservedQuantizer, Recorder
from megafp8.fp8.smoothing import ChannelScales
from megafp8.fp8.sources import Plain, ScaledColumns


class GradSink(Protocol):
    """Where a weight's gradient goes: called with dw, or told that dw has been added to `main_grad`, its fp32 sum.

    `wgrads` takes wgrad for later while it is open; None where there is no later.
    """

    main_grad: Tensor
    wgrads: WgradStore | None

    def __call__(self, grad: Tensor) -> None: ...

    def added(self) -> None: ...


class LinearOp(Protocol):
    """`x wᵀ + bias`: x `[..., k]`, weight `[n, k]`, bias `[n]` -> `[..., n]` in x's dtype."""

    def __call__(self, x: Tensor | Computed, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor: ...


class StandIn(Protocol):
    """What runs instead of an FP8 layer, on values, while it is `active`."""

    @property
    def active(self) -> bool: ...

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor: ...


def high_precision_linear(x: Tensor | Computed, weight: nn.Parameter, bias: Tensor | None = None) -> Tensor:
    """The `LinearOp` that computes in x's dtype; a weight of another dtype is converted first."""
    values, again = x if isinstance(x, Computed) else (x, None)
    y = _HighPrecisionLinear.apply(values, weight, again)
    return y if bias is None else y + bias.to(y.dtype)


class Quantizers(NamedTuple):
    """How each operand of a layer is cast."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer


class Fp8Linear:
    """The `LinearOp` that computes in FP8 the GEMMs that `high_precision` does not claim.

    It belongs to one weight, whose FP8 copies it keeps from first use to `invalidate_weight` (`kept_weight`). With
    `gathered_weight`, codes `[n, k]` that others keep up to date, it casts none and never reads the weight. Its
    quantizers and its GEMM come once all layers are known (`set_up`). With `smoothing` it takes `Quantized` input only,
    with channels multiplied as that says, and divides its weight's columns.
    """

    def __init__(self, *, high_precision: PerGemm, fast_accum: PerGemm) -> None:
        self.high_precision, self.fast_accum = high_precision, fast_accum
        self.stand_in: StandIn | None = None
        self.smoothing: ChannelScales | None = None
        self._quantizers: Quantizers | None = None
        self._gemm: Fp8Gemm | None = None
        self.kept_weight: Operand | None = None
        self.gathered_weight: Scaled | None = None

    @property
    def quantizers(self) -> Quantizers:
        assert self._quantizers is not None, "call Fp8Manager.materialize(device) once the model is built"
        return self._quantizers

    @property
    def gemm(self) -> Fp8Gemm:
        assert self._gemm is not None
        return self._gemm

    @property
    def fusible(self) -> bool:
        """Whether the layer needs its input and the gradient of its output in FP8 only."""
        return self._running_stand_in is None and not any(self.high_precision)

    @property
    def _running_stand_in(self) -> StandIn | None:
        return self.stand_in if self.stand_in is not None and self.stand_in.active else None

    def set_up(self, quantizers: Quantizers, gemm: Fp8Gemm) -> None:
        self._quantizers, self._gemm = quantizers, gemm

    def show_to(self, recorder: Recorder, name: str) -> None:
        """From now on let `recorder` see what is quantized here, as layer `name`. Call after `set_up`."""
        named = self.quantizers._asdict()
        self._quantizers = Quantizers(*(ObservedQuantizer(named[k], recorder, name, k) for k in Quantizers._fields))

    def __call__(
        self, x: Input, weight: nn.Parameter, bias: Tensor | None = None, grad_slot: GradSlot | None = None
    ) -> Tensor:
        """`x wᵀ + bias`. `Quantized` input and `grad_slot` are for `fusible` layers; a slot excludes a bias."""
        if (stand_in := self._running_stand_in) is not None:
            assert not isinstance(x, Quantized)
            return stand_in(x.values if isinstance(x, Computed) else x, weight, bias)
        assert self.smoothing is None or isinstance(x, Quantized), "a smoothed layer cannot cast its input itself"
        again = None if isinstance(x, Tensor) else x.again
        operand = x.operand if isinstance(x, Quantized) else None
        values = x if isinstance(x, Tensor) else x[0]
        y = _Fp8LinearFunction.apply(values, weight, self, operand, grad_slot, torch.is_grad_enabled(), again)
        assert bias is None or grad_slot is None
        return y if bias is None else y + bias.to(y.dtype)

    def weight8(self, weight: Tensor, *, columns: bool) -> Operand:
        """The FP8 copies of `weight`, made at the first call since the last `invalidate_weight`.

        Rows alone until a call that wants `columns` too, as the first one that a backward will follow does.
        """
        if self.kept_weight is None or (columns and self.kept_weight.columns is None):
            rows, w = self.gathered_weight, weight.detach()
            if rows is not None:
                self.kept_weight = Operand(rows, rows.t() if columns else None)
            else:
                source = Plain(w) if self.smoothing is None else ScaledColumns(w, self.smoothing.scale_inv_f)
                self.kept_weight = self.quantizers.weight(source, rows=True, columns=columns)
        return self.kept_weight

    def invalidate_weight(self) -> None:
        """Forget the FP8 copies: the weight has changed."""
        self.kept_weight = None


def _matrix(x: Tensor) -> Tensor:
    """`[..., c]` -> `[r, c]`, row-major."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _wgrad_dtype(weight: Tensor) -> torch.dtype:
    """What dtype `_deliver` wants dw in."""
    has_sink = getattr(weight, "grad_sink", None) is not None
    return torch.promote_types(weight.dtype, torch.float32) if has_sink else weight.dtype


def _deliver(weight: Tensor, dw_nk: Tensor) -> Tensor | None:
    """Give dw to the weight's sink and autograd nothing, or autograd dw."""
    sink = getattr(weight, "grad_sink", None)
    if sink is None:
        return dw_nk
    sink(dw_nk)
    return None


def _open_store(weight: Tensor) -> WgradStore | None:
    """Where the weight's gradient is to be left for later, if it is."""
    store = getattr(getattr(weight, "grad_sink", None), "wgrads", None)
    return store if store is not None and store.is_open else None


def _wgrad(weight: Tensor, dy_mn: Tensor, x_mk: Tensor) -> Tensor | None:
    """dw in high precision, to its sink or back; on CUDA a sink's fp32 takes it in place."""
    main_grad = _summed_in_place(weight)
    if main_grad is None or not (dy_mn.is_cuda and dy_mn.dtype == x_mk.dtype == torch.bfloat16):
        return _deliver(weight, gemm(dy_mn.t(), x_mk, _wgrad_dtype(weight)))
    torch.addmm(main_grad, dy_mn.t(), x_mk, out_dtype=torch.float32, out=main_grad)
    weight.grad_sink.added()  # type: ignore[attr-defined]
    return None


def _wgrad_now_or_later(weight: Tensor, dy_mn: Tensor, x_mk: Tensor) -> Tensor | None:
    """`_wgrad`, or None and its operands in the open store."""
    store = _open_store(weight)
    if store is None:
        return _wgrad(weight, dy_mn, x_mk)
    finish = partial(_wgrad, weight, dy_mn.detach(), x_mk.detach())  # detached: the graph need not live on
    store.put(lambda: finish)
    return None


def _summed_in_place(weight: Tensor) -> Tensor | None:
    """The fp32 sum of the weight's gradients, if it has a sink with one."""
    main_grad = getattr(getattr(weight, "grad_sink", None), "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype == torch.float32 == _wgrad_dtype(weight) else None


def _shaped(y_mn: Tensor, x: Tensor) -> Tensor:
    """`[m, n]` with the leading dims of x. Not as a view: what a Function returns as one cannot be changed in place."""
    return torch.ops.aten._unsafe_view(y_mn, [*x.shape[:-1], y_mn.shape[1]])


class _HighPrecisionLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, again: Again | None) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        kept_x = () if not needs_dw else (x,) if again is None else again.tensors
        ctx.save_for_backward(weight if needs_dx else None, *kept_x)
        ctx.remake = None if again is None else again.how
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        y_mn = gemm(_matrix(x), weight.to(x.dtype).t(), x.dtype)
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, *kept_x = ctx.saved_tensors
        dy_mn = _matrix(dy)
        dx = dw = None
        x = _values(kept_x, ctx.remake) if kept_x else None  # under way until wgrad
        if weight is not None:
            dx = gemm(dy_mn, weight.to(dy.dtype), dy.dtype).view(ctx.x_shape)
        if x is not None:
            dw = _wgrad_now_or_later(ctx.weight, dy_mn, x())
        return dx, dw, None


def _values(kept_x: Sequence[Tensor | None], remake: Remake | None) -> Callable[[], Tensor]:
    """What gives x `[m, k]`, kept or made again."""
    if remake is not None:
        return remake.values(kept_x)
    (x,) = kept_x
    assert x is not None
    return lambda: _matrix(x)


class _Fp8LinearFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        op: Fp8Linear,
        x8: Operand | None,
        grad_slot: GradSlot | None,
        grad_enabled: bool,  # torch itself says that gradients are needed within no_grad too
        again: Again | None,
    ) -> Tensor:
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        high = op.high_precision
        w8: Operand | None = None
        columns_wanted = needs_dw and not high.wgrad and again is None
        if x8 is None and (not high.fprop or columns_wanted):
            x8 = op.quantizers.input(Plain(_matrix(x)), rows=not high.fprop, columns=columns_wanted)
        if not high.fprop or (needs_dx and not high.dgrad):
            w8 = op.weight8(weight, columns=needs_dx and not high.dgrad)

        kept_x: Any = ()
        if needs_dw and again is not None:
            kept_x = again.tensors
        elif needs_dw and high.wgrad:
            kept_x = (_matrix(x),)
        elif needs_dw:
            x_km = _columns(x8)
            kept_x = (x_km.data, x_km.scale_inv, x_km.tensor_scale)
            assert x8 is not None
            ctx.granularity, ctx.columns_group = x_km.granularity, x8.columns_group
        ctx.save_for_backward(weight if needs_dx and high.dgrad else None, *kept_x)
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        ctx.op, ctx.w8, ctx.grad_slot = op, w8, grad_slot
        ctx.remake = None if again is None else again.how

        if high.fprop:
            y_mn = gemm(_matrix(x), weight.to(x.dtype).t(), x.dtype)
        else:
            y_mn = op.gemm.tn(_rows(x8), _rows(w8), x.dtype, use_fast_accum=op.fast_accum.fprop)
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        op, high = ctx.op, ctx.op.high_precision
        weight, *kept_x = ctx.saved_tensors
        dx_in_fp8, dw_in_fp8 = needs_dx and not high.dgrad, needs_dw and not high.wgrad
        dx: Tensor | None = None
        dw: Tensor | None = None
        store = _open_store(ctx.weight)
        if dw_in_fp8:
            own_x, x_group = _kept_columns(ctx, kept_x)
            x_km = None if store is not None else gather_columns(own_x, x_group)  # under way until wgrad
        dy8: Operand | None = None if ctx.grad_slot is None else ctx.grad_slot.take()
        if dy8 is None and (dx_in_fp8 or dw_in_fp8):
            dy8 = op.quantizers.grad_output(Plain(_matrix(dy)), rows=dx_in_fp8, columns=dw_in_fp8)
        if dw_in_fp8:
            assert dy8 is not None
            own_dy, dy_group = _columns(dy8), dy8.columns_group
            dy_nm = None if store is not None else gather_columns(own_dy, dy_group)
        if dx_in_fp8:
            dx = op.gemm.tn(_rows(dy8), _columns(ctx.w8), dy.dtype, use_fast_accum=op.fast_accum.dgrad)
        elif needs_dx:
            dx = gemm(_matrix(dy), weight.to(dy.dtype), dy.dtype)
        if dw_in_fp8 and store is not None:
            store.put(partial(_begin_wgrad, op, ctx.weight, own_dy, dy_group, own_x, x_group))
        elif dw_in_fp8:
            assert dy_nm is not None
            assert x_km is not None
            dw = _fp8_wgrad(op, ctx.weight, dy_nm.wait(), x_km.wait())
        elif needs_dw:
            dw = _wgrad_now_or_later(ctx.weight, _matrix(dy), _values(kept_x, ctx.remake)())
        return None if dx is None else dx.view(ctx.x_shape), dw, *[None] * 5


def _kept_columns(ctx: Any, kept_x: Sequence[Tensor | None]) -> tuple[Scaled, ProcessGroup | None]:
    """The input's columns, kept or made again, and the group to gather them over."""
    if ctx.remake is not None:
        return ctx.remake.columns(kept_x, ctx.op.quantizers.input)
    codes, factors, tensor_scale = kept_x
    assert codes is not None
    assert factors is not None
    return Scaled(codes, factors, ctx.granularity, tensor_scale), ctx.columns_group


def _begin_wgrad(
    op: Fp8Linear,
    weight: Tensor,
    dy_nm: Scaled,
    dy_group: ProcessGroup | None,
    x_km: Scaled,
    x_group: ProcessGroup | None,
) -> Callable[[], Tensor | None]:
    """Start gathering the columns that are cut; `_fp8_wgrad` of what arrives."""
    x, dy = gather_columns(x_km, x_group), gather_columns(dy_nm, dy_group)
    alive = (x_km, dy_nm)  # what is being gathered, until it has arrived

    def finish() -> Tensor | None:
        assert alive
        return _fp8_wgrad(op, weight, dy.wait(), x.wait())

    return finish


def _fp8_wgrad(op: Fp8Linear, weight: Tensor, dy_nm: Scaled, x_km: Scaled) -> Tensor | None:
    """dw to its sink, and None; or dw. A sink of the dtype that GEMMs sum in takes it in place.

    Not with smoothing, where dw is that of the weight that was cast, with divided columns.
    """
    if op.smoothing is not None:
        dw_nk = op.gemm.tn(dy_nm, x_km, _wgrad_dtype(weight), use_fast_accum=op.fast_accum.wgrad)
        return _deliver(weight, dw_nk.mul_(op.smoothing.scale_inv_f))
    main_grad = _summed_in_place(weight)
    if main_grad is not None:
        op.gemm.accumulate_tn(dy_nm, x_km, main_grad, use_fast_accum=op.fast_accum.wgrad)
        weight.grad_sink.added()  # type: ignore[attr-defined]
        return None
    return _deliver(weight, op.gemm.tn(dy_nm, x_km, _wgrad_dtype(weight), use_fast_accum=op.fast_accum.wgrad))


def _rows(operand: Operand | None) -> Scaled:
    assert operand is not None
    assert operand.rows is not None
    return operand.rows


def _columns(operand: Operand | None) -> Scaled:
    assert operand is not None
    assert operand.columns is not None
    return operand.columns
