"""The three GEMMs of a linear layer, for all precisions of their operands.

    fprop  y  = x wᵀ        dgrad  dx = dy w        wgrad  dw = dyᵀ x

A layer's plan says which GEMMs run in FP8, and thereby the form of their operands: an operand is a `ScaledTensor`, or
high-precision values. `quantize_input` and `quantize_grad_output` cast the parts of x and dy that FP8 GEMMs read, and
`fp8_weight` returns the form of the weight that they read. fprop, dgrad and wgrad then multiply two operands of the
same form.

Tensor cores take FP8 operands row-major along the summed dim, so w, x and dy are each needed rowwise and columnwise:

    fprop  x8 [m, k], w8 [n, k]        dgrad  dy8 [m, n], w8 [k, n]        wgrad  dy8 [n, m], x8 [k, m]

High-precision values always have the shapes x `[m, k]`, w `[n, k]` and dy `[m, n]`. Dequantized operands have the same
shapes in memory (`megafp8.numerics.tensor`): bf16 GEMMs read columnwise ones as transposes.

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
"""Quantized operand that no FP8 GEMM reads."""


class Layer(Protocol):
    """Settings that determine a layer's casts: a `LinearState`, or all experts of a layer together."""

    @property
    def high_precision(self) -> PerGemm:
        """GEMMs that run in high precision."""

    @property
    def fast_accum(self) -> PerGemm:
        """FP8 GEMMs that use fast accumulation."""

    @property
    def batch_invariant(self) -> bool:
        """Whether fprop sums in an order that does not depend on the number of rows."""

    @property
    def quantizers(self) -> Quantizers:
        """Quantizer of each operand."""

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> WeightForm:
        """Return the form of the weight that FP8 GEMMs read; see `LinearState.fp8_weight`."""


HIGH_PRECISION, INVARIANT_HIGH_PRECISION = (
    LinearState(LinearSite(), None, high_reason="called without a state", batch_invariant=invariant)
    for invariant in (False, True)
)
"""States of layers that are called without a state, in models without and with batch invariance."""


def tensors_of(x: Operand | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the tensors of an operand, to be saved for backward."""
    return (x.data, x.scale_inv, x.tensor_scale_inv) if isinstance(x, ScaledTensor) else (x, None, None)


def operand_of(tensors: Sequence[Tensor | None], granularity: Granularity | None) -> Operand:
    """Rebuild the operand from its `tensors_of`. A granularity of None means high-precision values."""
    data, scale_inv, tensor_scale_inv = tensors
    assert data is not None
    if granularity is None:
        return data
    assert scale_inv is not None
    return ScaledTensor(data, scale_inv, granularity, tensor_scale_inv)


def detached(x: Operand) -> Operand:
    """Return the operand without the graph that made it."""
    return x if isinstance(x, ScaledTensor) else x.detach()


def quantize_input(layer: Layer, x_mk: Tensor, *, for_wgrad: bool) -> QuantizedTensor:
    """Quantize x for FP8 GEMMs: rowwise for fprop, and columnwise if an FP8 wgrad follows."""
    high = layer.high_precision
    rowwise, columnwise = not high.fprop, for_wgrad and not high.wgrad
    if not rowwise and not columnwise:
        return NOTHING
    return layer.quantizers.input(Plain(x_mk), rowwise=rowwise, columnwise=columnwise)


def quantize_grad_output(
    layer: Layer, high: PerGemm, dy_mn: Tensor, *, needs_dx: bool, needs_dw: bool
) -> QuantizedTensor:
    """Quantize dy for FP8 GEMMs, all GEMMs that are not `high`: rowwise for dgrad, columnwise for wgrad."""
    rowwise, columnwise = needs_dx and not high.dgrad, needs_dw and not high.wgrad
    if not rowwise and not columnwise:
        return NOTHING
    return layer.quantizers.grad_output(Plain(dy_mn), rowwise=rowwise, columnwise=columnwise)


def fp8_weight(layer: Layer, weight: Tensor, *, needs_dx: bool) -> WeightForm:
    """Return the weight for FP8 GEMMs: rowwise for fprop, and columnwise if an FP8 dgrad follows."""
    high = layer.high_precision
    columnwise = needs_dx and not high.dgrad
    return NOTHING if high.fprop and not columnwise else layer.fp8_weight(weight, columnwise=columnwise)


def in_dtype(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the parameter's values in `dtype`; the parameter itself if it has this dtype."""
    return parameter if parameter.dtype == dtype else parameter.to(dtype)


def fprop(
    state: LinearState, x: Operand, w: Operand, dtype: torch.dtype, *, out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `x wᵀ + bias`, `[m, n]` in `dtype`, written to `out` if given."""
    if state.batch_invariant:
        w = w if isinstance(w, ScaledTensor) or isinstance(x, ScaledTensor) else in_dtype(w, x.dtype)
        return invariant.product(x, w, dtype, fast=state.fast_accum.fprop, out=out, bias=bias)
    if isinstance(x, ScaledTensor):
        assert isinstance(w, ScaledTensor)
        return state.gemm.tn(x, w, dtype, use_fast_accum=state.fast_accum.fprop, out=out, bias=bias)
    assert not isinstance(w, ScaledTensor)
    return gemm(x, in_dtype(w, x.dtype).t(), dtype, out, bias)


def dgrad(state: LinearState, dy: Operand, w: Operand, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return `dy w`, `[m, k]` in `dtype`, written to `out` if given."""
    if isinstance(dy, ScaledTensor):
        assert isinstance(w, ScaledTensor)
        return state.gemm.tn(dy, w, dtype, use_fast_accum=state.fast_accum.dgrad, out=out)
    assert not isinstance(w, ScaledTensor)
    return gemm(dy, in_dtype(w, dy.dtype), dtype, out)


def wgrad(state: LinearState, weight: Tensor, dy: Operand, x: Operand) -> Tensor | None:
    """Add dw `[n, k]` to the weight's sink, in the GEMM itself if possible; return it if the weight has no sink."""
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
    """Add dw to `sum_nk`, in the GEMM itself if the sum is fp32."""
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
    """Return dw `[n, k]` in `dtype`, written to `out` if given."""
    if isinstance(dy, ScaledTensor):
        assert isinstance(x, ScaledTensor)
        return state.gemm.tn(dy, x, dtype, use_fast_accum=state.fast_accum.wgrad, out=out)
    assert not isinstance(x, ScaledTensor)
    return gemm(dy.t(), x, dtype, out)
