"""Custom ops that let torch.compile keep a standalone FP8 linear layer in one graph.

The compiler sees two opaque ops, forward and backward, that take and return tensors. Each op does exactly what the
layer does without the compiler, bit for bit: one kernel casts the input for both of its GEMMs, the weight is quantized
once per step, amaxes are recorded, and the first forward after an optimizer step ends the step.

*State.* The ops find the layer's state through a handle, an int64 tensor on the host. A Python number would be a
constant of the graph, and equal layers would be compiled separately. The format in which the input is saved for the
weight gradient is a constant, because it determines shapes (`StandaloneLinear.saved_format`): either FP8 columnwise, by
granularity, or values. Saving values is always correct, because backward can quantize them. Values are saved if the
format is unknown before the first forward, and while static scales are calibrated. A graph is therefore compiled once,
or twice if the format becomes known later.

*Inputs.* An input of several layers (q, k, v; gate, up) is quantized once if its scale depends only on its values. The
cast is then a separate op without state, and the compiler eliminates repeated calls.

*Outputs.* The graph owns the outputs and may reuse their memory, so no output is a view of the state: scales that the
recipe keeps are copied, and backward asks the state for the weight's FP8 copies again.

Shapes: m tokens (all leading dims), k inputs, n outputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.autocast import current, in_torch_autocast_dtype
from megafp8.fp8.standalone import VALUES, StandaloneLinear, input_quantizer, layer_of
from megafp8.linear.fusion import as_matrix
from megafp8.linear.gemms import HIGH_PRECISION, dgrad, fp8_weight, fprop, quantize_grad_output, quantize_input, wgrad
from megafp8.linear.linear import with_bias
from megafp8.linear.state import LinearState
from megafp8.numerics.formats import E4M3
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    DEQUANTIZED,
    ROW,
    TENSOR,
    Granularity,
    QuantizedTensor,
    ScaledTensor,
)

_GRANULARITIES = {
    granularity.name: granularity for granularity in (TENSOR, ROW, BLOCK_1X128, BLOCK_1X32, BLOCK_1X16, DEQUANTIZED)
}


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: StandaloneLinear, training: bool) -> Tensor:
    """Return `x wᵀ + bias` of a standalone layer within torch.compile, `[..., n]`; x is `[..., k]`."""
    context = current()
    if not context.enabled and not context.calibrating:
        return F.linear(x, weight, bias)
    x = in_torch_autocast_dtype(x)
    saved_format = layer.saved_format.get(context.recipe_key, VALUES) if context.enabled else VALUES
    grad = torch.is_grad_enabled()
    needs_dx, needs_dw = grad and x.requires_grad, grad and weight.requires_grad
    key = layer.input_key.get(context.recipe_key, "") if saved_format != VALUES else ""
    x8 = _quantize(x.detach(), key, needs_dw) if key else []
    y = _forward(x, weight, layer.handle, x8, saved_format, training, needs_dx, needs_dw)[0]
    return with_bias(y, bias)


@torch.library.custom_op("megafp8::quantize_input", mutates_args=())
def _quantize(x: Tensor, key: str, columnwise: bool) -> list[Tensor]:
    """Quantize x rowwise, and also columnwise if wanted.

    Each orientation is returned as data, scale_inv, and the tensor's scale if the format has two levels of scales.
    """
    quantizer, x_mk = input_quantizer(key, x.device), as_matrix(x)
    if not x.numel():
        return [torch.ones_like(part) for part in _quantized_like(x_mk, quantizer.granularity.name, columnwise)]
    with torch.autocast(x.device.type, enabled=False):
        made = quantizer(Plain(x_mk), rowwise=True, columnwise=columnwise)
    rowwise = _as_tensors(made.required_rowwise)
    if not columnwise:
        return rowwise
    return [
        *rowwise,
        *(part.clone() if part.dtype == torch.float32 else part for part in _as_tensors(made.required_columnwise)),
    ]


@_quantize.register_fake
def _(x: Tensor, key: str, columnwise: bool) -> list[Tensor]:
    return _quantized_like(x.reshape(-1, x.shape[-1]), input_quantizer(key, x.device).granularity.name, columnwise)


def _quantized_like(x_mk: Tensor, granularity: str, columnwise: bool) -> list[Tensor]:
    rowwise = _saved_of(x_mk.t(), granularity)
    return [*rowwise, *_saved_of(x_mk, granularity)] if columnwise else rowwise


def _as_tensors(x: ScaledTensor) -> list[Tensor]:
    """Return data, scale_inv in a memory order that does not depend on the device, and the tensor's scale, if any."""
    scale_inv = x.scale_inv.t() if x.granularity is BLOCK_1X128 else x.scale_inv  # kernels write it transposed
    made = [x.data, scale_inv.contiguous()]
    return made if x.tensor_scale_inv is None else [*made, x.tensor_scale_inv]


@torch.library.custom_op("megafp8::standalone_linear", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, handle: Tensor, x8: list[Tensor], saved_format: str, training: bool, needs_dx: bool,
    needs_dw: bool,
) -> list[Tensor]:  # fmt: skip
    """Return y, followed by the tensors of the FP8 input that are saved for wgrad.

    No tensors follow if the input is saved as values, or if `x8`, the result of `_quantize`, already contains them.
    `x8` is empty if the input has not been quantized.
    """
    layer, x_mk = layer_of(handle), as_matrix(x.detach())
    columnwise = needs_dw and saved_format != VALUES and not x8
    with torch.autocast(x.device.type, enabled=False), layer.running(x.device, training=training) as state:
        if not layer.last.enabled and not layer.last.calibrating:
            raise RuntimeError("megafp8.fp8.autocast must be entered before the compiled function is called, not in it")
        if state is not None and state.plan.calibrating:
            state.record_amax("input", x)
            state.record_amax("weight", weight)
        state = HIGH_PRECISION if state is None or not x.numel() else state
        if x8 and state is not HIGH_PRECISION:
            granularity = cast(RecipeQuantizer, state.own_quantizers.input).granularity
            quantized = QuantizedTensor(_from_tensors(x8, granularity), None)
        else:
            quantized = quantize_input(state, x_mk, for_wgrad=columnwise)
        w8 = fp8_weight(state, weight, needs_dx=needs_dx)
        if state.high_precision.fprop:
            y_mn = fprop(state, x_mk, weight.detach(), x.dtype)
        else:
            y_mn = fprop(state, quantized.required_rowwise, w8.required_rowwise, x.dtype)
    y = y_mn.view(*x.shape[:-1], weight.shape[0])
    if not columnwise:
        return [y]
    x_km = quantized.columnwise
    if x_km is None:
        assert not x.numel(), "a layer began to calibrate within a step"
        return [y, *(torch.ones_like(kept) for kept in _saved_of(x_mk, saved_format))]
    assert x_km.granularity.name == saved_format
    data, scale_inv, *tensor_scale_inv = _as_tensors(x_km)
    return [y, data, scale_inv.clone() if scale_inv.dim() == 0 else scale_inv, *tensor_scale_inv]


def _saved_of(x_mk: Tensor, saved_format: str) -> list[Tensor]:
    """Return uninitialized tensors with the shapes and dtypes of the tensors that are saved of x."""
    granularity, (m, k) = _GRANULARITIES[saved_format], x_mk.shape
    shape = granularity.grid(k, m)
    if granularity is BLOCK_1X128:
        shape = (shape[1], shape[0])
    data = x_mk.new_empty((k, m), dtype=E4M3.dtype)
    if granularity is DEQUANTIZED:  # stored in the memory order of x
        data = torch.empty_like(x_mk, dtype=torch.bfloat16).t()
    kept = [data, x_mk.new_empty(shape, dtype=torch.float32)]
    return [*kept, x_mk.new_empty((), dtype=torch.float32)] if granularity.two_level else kept


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, handle: Tensor, x8: list[Tensor], saved_format: str, training: bool, needs_dx: bool,
    needs_dw: bool,
) -> list[Tensor]:  # fmt: skip
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if not needs_dw or saved_format == VALUES or x8:
        return [y]
    return [y, *_saved_of(x.reshape(-1, x.shape[-1]), saved_format)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, handle, x8, saved_format, _, ctx.needs_dx, ctx.needs_dw = inputs
    kept = x8[len(x8) // 2 :] or output[1:]
    if saved_format == VALUES:
        kept = [x]
    ctx.save_for_backward(weight, handle, *(kept if ctx.needs_dw else ()))
    ctx.saved_format, ctx.x8_len = saved_format, len(x8)


def _autograd(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    weight, handle, *kept = ctx.saved_tensors
    if not ctx.needs_dx and not ctx.needs_dw:
        return (None, None, None, [None] * ctx.x8_len, None, None, None, None)
    made = _backward(grads[0], weight, handle, kept, ctx.saved_format, ctx.needs_dx, ctx.needs_dw)
    dx, dw = made[0] if ctx.needs_dx else None, made[-1] if ctx.needs_dw else None
    return dx, dw, None, [None] * ctx.x8_len, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_save)


@torch.library.custom_op("megafp8::standalone_linear_backward", mutates_args=())
def _backward(
    dy: Tensor, weight: Tensor, handle: Tensor, kept: list[Tensor], saved_format: str, needs_dx: bool, needs_dw: bool
) -> list[Tensor]:
    """Return dx if it is needed, then dw if it is needed."""
    state, dy_mn = layer_of(handle).last_state, as_matrix(dy)
    if state is not None and state.plan.calibrating:
        state.record_amax("grad_output", dy_mn)
    state = HIGH_PRECISION if state is None or not dy.numel() else state
    high, made = state.high_precision, list[Tensor]()
    with torch.autocast(dy.device.type, enabled=False):
        dy8 = quantize_grad_output(state, high, dy_mn, needs_dx=needs_dx, needs_dw=needs_dw)
        if needs_dx and high.dgrad:
            made.append(dgrad(state, dy_mn, weight.detach(), dy.dtype))
        elif needs_dx:
            w_kn = state.fp8_weight(weight, columnwise=True).required_columnwise
            made.append(dgrad(state, dy8.required_rowwise, w_kn, dy.dtype))
        if needs_dx:
            made[0] = made[0].view(*dy.shape[:-1], weight.shape[1])
        if needs_dw and high.wgrad:
            empty = saved_format != VALUES
            dw = torch.zeros_like(weight) if empty else wgrad(state, weight, dy_mn, as_matrix(kept[0]))
        elif needs_dw:
            dw = wgrad(state, weight, dy8.required_columnwise, _columnwise(state, kept, saved_format))
        if needs_dw:
            assert dw is not None, "a weight of a compiled layer has no gradient sink"
            made.append(dw)
    return made


def _columnwise(state: LinearState, kept: list[Tensor], saved_format: str) -> ScaledTensor:
    """Return the quantized input columnwise, `[k, m]`, from the tensors that forward saved."""
    if saved_format == VALUES:
        return state.quantizers.input(Plain(as_matrix(kept[0])), rowwise=False, columnwise=True).required_columnwise
    return _from_tensors(kept, _GRANULARITIES[saved_format])


def _from_tensors(tensors: list[Tensor], granularity: Granularity) -> ScaledTensor:
    """Return the `ScaledTensor` that `_as_tensors` has taken apart."""
    scale_inv = tensors[1].t() if granularity is BLOCK_1X128 else tensors[1]
    return ScaledTensor(tensors[0], scale_inv, granularity, tensors[2] if granularity.two_level else None)


@_backward.register_fake
def _(
    dy: Tensor, weight: Tensor, handle: Tensor, kept: list[Tensor], saved_format: str, needs_dx: bool, needs_dw: bool
) -> list[Tensor]:
    dx = [dy.new_empty((*dy.shape[:-1], weight.shape[1]))] if needs_dx else []
    return [*dx, weight.new_empty(weight.shape)] if needs_dw else dx
