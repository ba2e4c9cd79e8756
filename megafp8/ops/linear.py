"""The three GEMMs of a linear layer, in FP8 or in high precision, as autograd Functions.

    fprop  y  = x8 · w8ᵀ
    dgrad  dx = dy8 · (w8ᵀ copy)ᵀ
    wgrad  dw = (dy8ᵀ copy) · (x8ᵀ copy)ᵀ

Tensor cores want FP8 operands row-major along the summed dim, so w, x and dy are each needed in both orientations, as
the rows and the columns of an `QuantizedTensor`; one kernel writes both in a single pass. The weight is quantized
once an
optimizer step and keeps both copies until `invalidate_weight`. Backward keeps the columns of x: FP8, half the memory of
bf16. Under sequence parallelism it may keep this rank's tokens of them alone, and gathers them while dgrad runs; those
of dy may come cut likewise (`megafp8.ops.quantized_gather`).

What enters a layer may be quantized already, by a norm or an activation that was fused with the cast; and what comes
back into it too. What is kept for wgrad may be made again instead (`megafp8.ops.fusion` has both).

A layer behind SwiGLU may have its input smoothed (`megafp8.fp8.smoothing`): then its weight's columns are divided
before they are cast, and so is dw.

Each GEMM can be kept in high precision instead; then what it needs is kept unquantized.

Where dw goes says `megafp8.ops.wgrad`. Where tokens are cut over ranks, or shares of a product are to be summed, the
layer's `TPComm` exchange them as the GEMMs run; dx is on its way while wgrad is computed
(`megafp8.distributed.tp_overlap`).

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

from megafp8.distributed.tp_overlap import NO_COMM, AllGatherHandle, Product, ReduceHandle, TPOverlap
from megafp8.fp8.gemm.dispatch import Fp8Gemm, gemm
from megafp8.fp8.health import ObservedQuantizer, Recorder
from megafp8.fp8.quantizers import Quantizer
from megafp8.fp8.recipes.base import PerGemm
from megafp8.fp8.smoothing import ChannelScales
from megafp8.fp8.sources import Plain, ScaledColumns
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor
from megafp8.ops.deferred_wgrad import Wgrad
from megafp8.ops.fusion import Again, Computed, Input, Quantized, QuantizedGradHandoff, Remake
from megafp8.ops.quantized_gather import LOCAL_COMM, Rows, TPComm, gather_columns
from megafp8.ops.wgrad import deliver, open_store, summed_in_place, wgrad_dtype, wgrad_now_or_later


class LinearOp(Protocol):
    """`x wᵀ + bias`: x `[..., k]`, weight `[n, k]`, bias `[n]` -> `[..., n]` in x's dtype.

    Through `comm` that exchange tokens, the first dim of y is not that of x.
    """

    def __call__(
        self, x: Tensor | Computed, weight: nn.Parameter, bias: Tensor | None = None, *, comm: TPComm = LOCAL_COMM
    ) -> Tensor: ...


class HighPrecisionFallback(Protocol):
    """What runs instead of an FP8 layer, on values, while it is `active`."""

    @property
    def active(self) -> bool: ...

    def __call__(
        self, x: Tensor, weight: nn.Parameter, bias: Tensor | None = None, *, comm: TPComm = LOCAL_COMM
    ) -> Tensor: ...


def high_precision_linear(
    x: Tensor | Computed, weight: nn.Parameter, bias: Tensor | None = None, *, comm: TPComm = LOCAL_COMM
) -> Tensor:
    """The `LinearOp` that computes in x's dtype; a weight of another dtype is converted first."""
    values, again = x if isinstance(x, Computed) else (x, None)
    y = _HighPrecisionLinear.apply(values, weight, again, comm)
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
    quantizers and its GEMM come once all layers are known (`set_up`). A `transient` weight is there while the layer
    runs and gone in between, and no copies of it are kept either: backward makes its own. With `smoothing` it takes
    `Quantized` input only, with channels multiplied as that says, and divides its weight's columns.
    """

    def __init__(self, *, high_precision: PerGemm, fast_accum: PerGemm) -> None:
        self.high_precision, self.fast_accum = high_precision, fast_accum
        self.fallback: HighPrecisionFallback | None = None
        self.smoothing: ChannelScales | None = None
        self._quantizers: Quantizers | None = None
        self._gemm: Fp8Gemm | None = None
        self.kept_weight: QuantizedTensor | None = None
        self.gathered_weight: ScaledTensor | None = None
        self.transient = False

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
        return self._active_fallback is None and not any(self.high_precision)

    @property
    def _active_fallback(self) -> HighPrecisionFallback | None:
        return self.fallback if self.fallback is not None and self.fallback.active else None

    def set_up(self, quantizers: Quantizers, gemm: Fp8Gemm) -> None:
        self._quantizers, self._gemm = quantizers, gemm

    def show_to(self, recorder: Recorder, name: str) -> None:
        """From now on let `recorder` see what is quantized here, as layer `name`. Call after `set_up`."""
        named = self.quantizers._asdict()
        self._quantizers = Quantizers(*(ObservedQuantizer(named[k], recorder, name, k) for k in Quantizers._fields))

    def __call__(
        self,
        x: Input,
        weight: nn.Parameter,
        bias: Tensor | None = None,
        grad_slot: QuantizedGradHandoff | None = None,
        *,
        comm: TPComm = LOCAL_COMM,
    ) -> Tensor:
        """`x wᵀ + bias`. `Quantized` input and `grad_slot` are for `fusible` layers; a slot excludes a bias."""
        if (fallback := self._active_fallback) is not None:
            assert not isinstance(x, Quantized)
            return fallback(x.values if isinstance(x, Computed) else x, weight, bias, comm=comm)
        assert self.smoothing is None or isinstance(x, Quantized), "a smoothed layer cannot cast its input itself"
        again = None if isinstance(x, Tensor) else x.again
        operand = x.operand if isinstance(x, Quantized) else None
        values = x if isinstance(x, Tensor) else x[0]
        y = _Fp8LinearFunction.apply(values, weight, self, operand, grad_slot, torch.is_grad_enabled(), again, comm)
        assert bias is None or grad_slot is None
        return y if bias is None else y + bias.to(y.dtype)

    def weight8(self, weight: Tensor, *, columnwise: bool) -> QuantizedTensor:
        """The FP8 copies of `weight`, made at the first call since the last `invalidate_weight`.

        Rows alone until a call that wants `columns` too, as the first one that a backward will follow does.
        """
        if self.transient:
            return self._cast_weight(weight, rowwise=True, columnwise=columnwise)
        if self.kept_weight is None or (columnwise and self.kept_weight.columnwise is None):
            self.kept_weight = self._cast_weight(weight, rowwise=True, columnwise=columnwise)
        return self.kept_weight

    def dgrad_weight(self, weight: Tensor, w8: QuantizedTensor | None) -> ScaledTensor:
        """The columns of `weight` in backward, where forward has kept `w8`."""
        return _columns(self._cast_weight(weight, rowwise=False, columnwise=True) if w8 is None else w8)

    def _cast_weight(self, weight: Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        codes = self.gathered_weight
        if codes is not None:
            return QuantizedTensor(codes if rowwise else None, codes.t() if columnwise else None)
        w = weight.detach()
        source = Plain(w) if self.smoothing is None else ScaledColumns(w, self.smoothing.scale_inv_f)
        return self.quantizers.weight(source, rowwise=rowwise, columnwise=columnwise)

    def invalidate_weight(self) -> None:
        """Forget the FP8 copies: the weight has changed."""
        self.kept_weight = None


def _matrix(x: Tensor) -> Tensor:
    """`[..., c]` -> `[r, c]`, row-major."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _shaped(y_mn: Tensor, x: Tensor) -> Tensor:
    """`[m, n]` with the leading dims of x, the first of which grew or shrank with m.

    Not as a view: what a Function returns as one cannot be changed in place.
    """
    lead, tokens = list(x.shape[:-1]), x.shape[:-1].numel()
    if y_mn.shape[0] != tokens:
        lead[0] = lead[0] * y_mn.shape[0] // tokens
    return torch.ops.aten._unsafe_view(y_mn, [*lead, y_mn.shape[1]])


def _product(a: AllGatherHandle, b_kn: Tensor, dtype: torch.dtype) -> Product:
    """`a · b` in high precision."""
    return Product(a, b_kn.shape[1], dtype, lambda part, out: gemm(a.gathered[0][part], b_kn, dtype, out))


class _HighPrecisionLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, again: Again | None, comm: TPComm) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        arriving = comm.input.gather([_matrix(x)])
        y_mn = comm.output.sum(_product(arriving, weight.to(x.dtype).t(), x.dtype)).wait()
        kept_x = () if not needs_dw else arriving.gathered if again is None else again.tensors
        ctx.save_for_backward(weight if needs_dx else None, *kept_x)
        ctx.remake = None if again is None else again.how
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        ctx.comm = comm
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *kept_x = ctx.saved_tensors
        arriving = ctx.comm.output.gather([_matrix(dy)])
        x = _values(kept_x, ctx.remake) if kept_x else None  # under way until wgrad
        dx = dw = None
        if weight is not None:
            dx = ctx.comm.input.sum(_product(arriving, weight.to(dy.dtype), dy.dtype))  # under way until wgrad is done
        (dy_mn,) = arriving.wait()
        if x is not None:
            dw = wgrad_now_or_later(ctx.weight, dy_mn, x())
        return None if dx is None else dx.wait().view(ctx.x_shape), dw, None, None


def _values(kept_x: Sequence[Tensor | None], remake: Remake | None) -> Callable[[], Tensor]:
    """What gives x `[m, k]`, kept or made again."""
    if remake is not None:
        return remake.values(kept_x)
    (x_mk,) = kept_x
    assert x_mk is not None
    return lambda: x_mk


class _Fp8LinearFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        op: Fp8Linear,
        x8: QuantizedTensor | None,
        grad_slot: QuantizedGradHandoff | None,
        grad_enabled: bool,  # torch itself says that gradients are needed within no_grad too
        again: Again | None,
        comm: TPComm,
    ) -> Tensor:
        needs_dx, needs_dw, *_ = (needed and grad_enabled for needed in ctx.needs_input_grad)
        high = op.high_precision
        columns_wanted = needs_dw and not high.wgrad and again is None
        entry = comm.input if x8 is not None else NO_COMM  # values come before they are cast
        if x8 is None:
            (x_mk,) = comm.input.gather([_matrix(x)]).wait()
            if not high.fprop or columns_wanted:
                x8 = op.quantizers.input(Plain(x_mk), rowwise=not high.fprop, columnwise=columns_wanted)
        w8: QuantizedTensor | None = None
        columns_kept = needs_dx and not high.dgrad and not op.transient
        if not high.fprop or columns_kept:
            w8 = op.weight8(weight, columnwise=columns_kept)

        if high.fprop:
            product = _product(NO_COMM.gather([x_mk]), weight.to(x.dtype).t(), x.dtype)
        else:
            assert x8 is not None
            rows = Rows(x8.required_rowwise, entry)
            product = _fp8_product(op, rows, _rows(w8), x.dtype, op.fast_accum.fprop)
        y_mn = comm.output.sum(product).wait()

        kept_x: Any = ()
        if needs_dw and again is not None:
            kept_x = again.tensors
        elif needs_dw and high.wgrad:
            kept_x = (x_mk,)
        elif needs_dw:
            assert x8 is not None
            x_km = rows.columns() if x8.columnwise is None else x8.columnwise
            kept_x = (x_km.data, x_km.scale_inv, x_km.tensor_scale)
            ctx.granularity, ctx.columns_group = x_km.granularity, None if x8.columnwise is None else entry.group
        ctx.save_for_backward(weight if needs_dx and high.dgrad else None, *kept_x)
        ctx.weight, ctx.x_shape = weight, x.shape  # saved tensors may come back as other objects, without their sink
        ctx.op, ctx.w8, ctx.grad_slot, ctx.comm = op, w8 if columns_kept else None, grad_slot, comm
        ctx.remake = None if again is None else again.how
        return _shaped(y_mn, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        op, high, comm = ctx.op, ctx.op.high_precision, ctx.comm
        weight, *kept_x = ctx.saved_tensors
        dx_in_fp8, dw_in_fp8 = needs_dx and not high.dgrad, needs_dw and not high.wgrad
        if dw_in_fp8:
            own_x, x_group = _kept_columns(ctx, kept_x)
        dy8, dy_mn, way = _grad_output(ctx, dy, rowwise=dx_in_fp8, columnwise=dw_in_fp8)
        rows = None if dy8 is None or dy8.rowwise is None else Rows(dy8.rowwise, way)

        begin: Wgrad | None = None
        finish: Callable[[], Tensor | None] | None = None
        store = open_store(ctx.weight)
        if dw_in_fp8 and dy8 is not None and dy8.columnwise is not None:
            begin = partial(_begin_wgrad, op, ctx.weight, dy8.columnwise, way.group, own_x, x_group)
            finish = begin() if store is None else None  # columns that are cut travel while dgrad runs
        dx: ReduceHandle | None = None
        if dx_in_fp8:
            assert rows is not None
            w_kn = op.dgrad_weight(ctx.weight, ctx.w8)
            dx = comm.input.sum(_fp8_product(op, rows, w_kn, dy.dtype, op.fast_accum.dgrad))
        elif needs_dx:
            assert dy_mn is not None
            dx = comm.input.sum(_product(NO_COMM.gather([dy_mn]), weight.to(dy.dtype), dy.dtype))
        if dw_in_fp8 and begin is None:
            assert rows is not None
            begin = partial(_begin_wgrad, op, ctx.weight, rows.columns(), None, own_x, x_group)
            finish = begin() if store is None else None

        dw: Tensor | None = None
        if finish is not None:
            dw = finish()
        elif begin is not None:
            assert store is not None
            store.put(begin)
        elif needs_dw:
            assert dy_mn is not None
            dw = wgrad_now_or_later(ctx.weight, dy_mn, _values(kept_x, ctx.remake)())
        return None if dx is None else dx.wait().view(ctx.x_shape), dw, *[None] * 6


def _fp8_product(op: Fp8Linear, rows: Rows, b_nk: ScaledTensor, dtype: torch.dtype, use_fast_accum: bool) -> Product:
    """`a · bᵀ` in FP8, of the rows of a that arrive."""

    def compute(part: slice, out: Tensor | None) -> Tensor:
        return op.gemm.tn(rows.part(part), b_nk, dtype, use_fast_accum=use_fast_accum, out=out)

    return Product(rows.arriving, b_nk.data.shape[0], dtype, compute)


def _grad_output(
    ctx: Any, dy: Tensor, *, rowwise: bool, columnwise: bool
) -> tuple[QuantizedTensor | None, Tensor | None, TPOverlap]:
    """dy in FP8, and how that is to be exchanged to be of all tokens; and in values, where it was gathered so."""
    dy8: QuantizedTensor | None = None if ctx.grad_slot is None else ctx.grad_slot.take()
    if dy8 is not None:
        return dy8, None, NO_COMM
    comm, dy_mn = ctx.comm, _matrix(dy)
    cast = comm.grad_cast
    if cast is not None and dy_mn.shape[0] % cast.shard_alignment == 0:
        return cast(Plain(dy_mn), rowwise=True, columnwise=not cast.per_tensor), None, comm.output
    (dy_mn,) = comm.output.gather([dy_mn]).wait()
    if rowwise or columnwise:
        dy8 = ctx.op.quantizers.grad_output(Plain(dy_mn), rowwise=rowwise, columnwise=columnwise)
    return dy8, dy_mn, NO_COMM


def _kept_columns(ctx: Any, kept_x: Sequence[Tensor | None]) -> tuple[ScaledTensor, ProcessGroup | None]:
    """The input's columns, kept or made again, and the group to gather them over."""
    if ctx.remake is not None:
        return ctx.remake.columns(kept_x, ctx.op.quantizers.input)
    codes, factors, tensor_scale = kept_x
    assert codes is not None
    assert factors is not None
    return ScaledTensor(codes, factors, ctx.granularity, tensor_scale), ctx.columns_group


def _begin_wgrad(
    op: Fp8Linear,
    weight: Tensor,
    dy_nm: ScaledTensor,
    dy_group: ProcessGroup | None,
    x_km: ScaledTensor,
    x_group: ProcessGroup | None,
) -> Callable[[], Tensor | None]:
    """Start gathering the columns that are cut; `_fp8_wgrad` of what arrives."""
    x, dy = gather_columns(x_km, x_group), gather_columns(dy_nm, dy_group)
    alive = (x_km, dy_nm)  # what is being gathered, until it has arrived

    def finish() -> Tensor | None:
        assert alive
        return _fp8_wgrad(op, weight, dy.wait(), x.wait())

    return finish


def _fp8_wgrad(op: Fp8Linear, weight: Tensor, dy_nm: ScaledTensor, x_km: ScaledTensor) -> Tensor | None:
    """dw to its sink, and None; or dw. A sink of the dtype that GEMMs sum in takes it in place.

    Not with smoothing, where dw is that of the weight that was cast, with divided columns.
    """
    if op.smoothing is not None:
        dw_nk = op.gemm.tn(dy_nm, x_km, wgrad_dtype(weight), use_fast_accum=op.fast_accum.wgrad)
        return deliver(weight, dw_nk.mul_(op.smoothing.scale_inv_f))
    main_grad = summed_in_place(weight)
    if main_grad is not None:
        op.gemm.accumulate_tn(dy_nm, x_km, main_grad, use_fast_accum=op.fast_accum.wgrad)
        weight.grad_sink.added()  # type: ignore[attr-defined]
        return None
    return deliver(weight, op.gemm.tn(dy_nm, x_km, wgrad_dtype(weight), use_fast_accum=op.fast_accum.wgrad))


def _rows(operand: QuantizedTensor | None) -> ScaledTensor:
    assert operand is not None
    assert operand.rowwise is not None
    return operand.rowwise


def _columns(operand: QuantizedTensor | None) -> ScaledTensor:
    assert operand is not None
    assert operand.columnwise is not None
    return operand.columnwise
