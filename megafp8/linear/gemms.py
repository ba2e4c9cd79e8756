"""The three GEMMs of a linear layer: what each of its forms calls.

    fprop  y  = x wᵀ        dgrad  dx = dy w        wgrad  dw = dyᵀ x

A layer's plan says which GEMMs run in FP8, so in which form their operands are: an operand is a `ScaledTensor`, or
values. `quantize_input` and `quantize_grad_output` cast what the GEMMs in FP8 read of x and dy, and `fp8_weight` gives
the form of the weight that they read; fprop, dgrad and wgrad then multiply two operands of one form.

Tensor cores take FP8 operands row-major along the summed dim, so w, x and dy are each needed rowwise and columnwise:

    fprop  x8 [m, k], w8 [n, k]        dgrad  dy8 [m, n], w8 [k, n]        wgrad  dy8 [n, m], x8 [k, m]

Values are x `[m, k]`, w `[n, k]` and dy `[m, n]` in all of them. So are dequantized operands in memory
(`megafp8.numerics.tensor`): GEMMs in bf16 read those that are columnwise as transposes.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megafp8.gemm import invariant
from megafp8.gemm.dispatch import gemm
from megafp8.linear.grad_sink import deliver, in_place, wgrad_dtype
from megafp8.linear.state import LinearState, Quantizers
from megafp8.linear.weight_forms import WeightForm
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import Granularity, QuantizedTensor, ScaledTensor
from megafp8.plan import LinearSite, PerGemm

Operand = Tensor | ScaledTensor
NOTHING = QuantizedTensor(None, None)
"""What is quantized of an operand where no GEMM in FP8 reads it."""


class Layer(Protocol):
    """What a layer's casts follow from: a `LinearState`, or all experts of a layer together."""

    @property
    def high_precision(self) -> PerGemm: ...

    @property
    def fast_accum(self) -> PerGemm: ...

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def quantizers(self) -> Quantizers: ...

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> WeightForm: ...


HIGH_PRECISION, INVARIANT_HIGH_PRECISION = (
    LinearState(LinearSite(), None, high_reason="called without a state", batch_invariant=invariant)
    for invariant in (False, True)
)
"""States of layers that are called without one of their own, in models that are not batch-invariant and that are."""


def tensors_of(x: Operand | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The tensors of an operand, to be saved for backward."""
    return (x.data, x.scale_inv, x.tensor_scale_inv) if isinstance(x, ScaledTensor) else (x, None, None)


def operand_of(tensors: Sequence[Tensor | None], granularity: Granularity | None) -> Operand:
    """The operand with these `tensors_of`, of that granularity; None for values."""
    data, scale_inv, tensor_scale_inv = tensors
    assert data is not None
    if granularity is None:
        return data
    assert scale_inv is not None
    return ScaledTensor(data, scale_inv, granularity, tensor_scale_inv)


def detached(x: Operand) -> Operand:
    """The operand without the graph that made it."""
    return x if isinstance(x, ScaledTensor) else x.detach()


def quantize_input(layer: Layer, x_mk: Tensor, *, for_wgrad: bool) -> QuantizedTensor:
    """What GEMMs in FP8 read of x: fprop rowwise, and wgrad columnwise if it follows."""
    high = layer.high_precision
    rowwise, columnwise = not high.fprop, for_wgrad and not high.wgrad
    if not rowwise and not columnwise:
        return NOTHING
    return layer.quantizers.input(Plain(x_mk), rowwise=rowwise, columnwise=columnwise)


def quantize_grad_output(
    layer: Layer, high: PerGemm, dy_mn: Tensor, *, needs_dx: bool, needs_dw: bool
) -> QuantizedTensor:
    """What GEMMs in FP8, all but those that are `high`, read of dy: dgrad rowwise, wgrad columnwise."""
    rowwise, columnwise = needs_dx and not high.dgrad, needs_dw and not high.wgrad
    if not rowwise and not columnwise:
        return NOTHING
    return layer.quantizers.grad_output(Plain(dy_mn), rowwise=rowwise, columnwise=columnwise)


def fp8_weight(layer: Layer, weight: Tensor, *, needs_dx: bool) -> WeightForm:
    """What GEMMs in FP8 read of the weight: fprop rowwise, and dgrad columnwise if it follows."""
    high = layer.high_precision
    columnwise = needs_dx and not high.dgrad
    return NOTHING if high.fprop and not columnwise else layer.fp8_weight(weight, columnwise=columnwise)


def in_dtype(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter's values in `dtype`; itself where they are."""
    return parameter if parameter.dtype == dtype else parameter.to(dtype)


def fprop(
    state: LinearState, x: Operand, w: Operand, dtype: torch.dtype, *, out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`x wᵀ + bias`, `[m, n]` in `dtype`; into `out` if given."""
    if state.batch_invariant:
        w = w if isinstance(w, ScaledTensor) or isinstance(x, ScaledTensor) else in_dtype(w, x.dtype)
        return invariant.product(x, w, dtype, fast=state.fast_accum.fprop, out=out, bias=bias)
    if isinstance(x, ScaledTensor):
        assert isinstance(w, ScaledTensor)
        return state.gemm.tn(x, w, dtype, use_fast_accum=state.fast_accum.fprop, out=out, bias=bias)
    assert not isinstance(w, ScaledTensor)
    return gemm(x, in_dtype(w, x.dtype).t(), dtype, out, bias)


def dgrad(state: LinearState, dy: Operand, w: Operand, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """`dy w`, `[m, k]` in `dtype`; into `out` if given."""
    if isinstance(dy, ScaledTensor):
        assert isinstance(w, ScaledTensor)
        return state.gemm.tn(dy, w, dtype, use_fast_accum=state.fast_accum.dgrad, out=out)
    assert not isinstance(w, ScaledTensor)
    return gemm(dy, in_dtype(w, dy.dtype), dtype, out)


def wgrad(state: LinearState, weight: Tensor, dy: Operand, x: Operand) -> Tensor | None:
    """Add dw `[n, k]` to its sink, by the GEMM itself where possible; return it if the weight has no sink."""
    buffer = in_place(weight)
    if buffer is None:
        return deliver(weight, _wgrad(state, dy, x, wgrad_dtype(weight)))
    if buffer.accumulate:
        add_wgrad(state, dy, x, buffer.main_grad)
    else:
        _wgrad(state, dy, x, torch.float32, buffer.main_grad)
    buffer.added()
    return None


def add_wgrad(state: LinearState, dy: Operand, x: Operand, sum_nk: Tensor) -> None:
    """Add dw to `sum_nk`, in place by the GEMM where it is fp32."""
    if isinstance(dy, ScaledTensor):
        assert isinstance(x, ScaledTensor)
        state.gemm.accumulate_tn(dy, x, sum_nk, use_fast_accum=state.fast_accum.wgrad)
        return
    assert not isinstance(x, ScaledTensor)
    in_place = dy.is_cuda and dy.dtype == x.dtype and dy.dtype.itemsize == 2 and sum_nk.dtype == torch.float32
    if in_place:
        torch.addmm(sum_nk, dy.t(), x, out_dtype=torch.float32, out=sum_nk)
    else:
        sum_nk.add_(_wgrad(state, dy, x, sum_nk.dtype))


def _wgrad(state: LinearState, dy: Operand, x: Operand, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if isinstance(dy, ScaledTensor):
        assert isinstance(x, ScaledTensor)
        return state.gemm.tn(dy, x, dtype, use_fast_accum=state.fast_accum.wgrad, out=out)
    assert not isinstance(x, ScaledTensor)
    return gemm(dy.t(), x, dtype, out)
