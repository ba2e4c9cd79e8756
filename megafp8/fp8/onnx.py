"""ONNX export of FP8 linear layers by `torch.onnx.export(dynamo=True)`.

An exported layer consists of ONNX's operators for FP8:

    y = MatMul(DequantizeLinear(QuantizeLinear(x)), Transpose(DequantizeLinear(weight)))

The exporter traces the forward without parameter values, so the weight is the FP8 copy that the layer kept from its
last forward. With delayed and static scaling, the scale of the input is a constant; with current scaling, the graph
computes the scale from x. Input and weight have one scale per tensor. Other recipes are refused, because runtimes have
no GEMM for them.

Results may differ slightly from the layer's results: QuantizeLinear divides by `scale_inv`, whereas the layer
multiplies by the scale, and this may round a value to the other neighboring FP8 value. With power-of-two scales the
rounding is equal, and the results differ only in the order of sums.

Shapes: k inputs, n outputs.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from megafp8.fp8.autocast import current
from megafp8.fp8.standalone import StandaloneLinear
from megafp8.numerics.formats import E4M3
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.tensor import TENSOR, ScaledTensor


class QdqLinear(NamedTuple):
    """Linear layer expressed in ONNX's FP8 operators, with the weight `[n, k]`."""

    input: RecipeQuantizer
    weight: ScaledTensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x wᵀ`, `[..., n]`, in x's dtype; x is `[..., k]`."""
        values, known = x.float(), self.input.known_scale
        scale_inv = self.input.rule.scale(values.abs().flatten().amax(0)).reciprocal() if known is None else known[1]
        x8 = torch.onnx.ops.symbolic(
            "QuantizeLinear", (values, scale_inv, _zero_point()), dtype=E4M3.dtype, shape=x.shape
        )
        y = _dequantized(ScaledTensor(x8, scale_inv)) @ _dequantized(self.weight).t()
        return y.to(x.dtype)


def _dequantized(x: ScaledTensor) -> Tensor:
    # onnxruntime copies the zero point to a QuantizeLinear that it adds; without it, that operator would write uint8.
    inputs = (x.data, x.scale_inv, _zero_point())
    return torch.onnx.ops.symbolic("DequantizeLinear", inputs, dtype=torch.float32, shape=x.data.shape)


def _zero_point() -> Tensor:
    return torch.zeros((), dtype=E4M3.dtype)


def exported(layer: StandaloneLinear, device: torch.device) -> QdqLinear | None:
    """Return the ONNX form of a layer, or None if the layer runs in high precision.

    Raises:
        ValueError: ONNX cannot express the layer, or the layer has not run in FP8 with its current weight.
    """
    name, context = layer.site.name or "the layer", current()
    if not context.enabled:
        return None
    if layer.tp_group is not None or device.type != "cpu":
        what = f"is on {device}" if layer.tp_group is None else "is sharded over ranks"
        raise ValueError(f"{name} {what}; export a whole model on the CPU, copy.deepcopy(model).cpu() for example")
    state = layer.layers.known_state_of(layer.site.name, context)
    if state is not None and state.plan.calibrating:
        raise ValueError(f"{name} calibrates its static scales; export it when that has ended")
    if state is not None and (state.precision is None or state.high_precision.fprop):
        return None
    copies = None if state is None else state.weight_copies
    if state is None or copies is None or copies.made is None:
        raise ValueError(
            f"{name} has no FP8 weight to export; run the model once before, in evaluation and within the same autocast"
        )
    quantizer, weight = cast(RecipeQuantizer, state.own_quantizers.input), copies.required_rowwise
    if quantizer.granularity is not TENSOR or weight.granularity is not TENSOR:
        raise ValueError(
            f"{name} has FP8 scales of {quantizer.recipe.name} scaling; ONNX export needs one scale per tensor: use "
            "DelayedScaling, CurrentScaling or StaticScaling"
        )
    if quantizer.known_scale is None and quantizer.rule.power_of_two:
        raise ValueError(
            f"{name} computes the scale from its input and rounds it down to a power of two, and ONNX has no operator "
            "for this rounding; use DelayedScaling or StaticScaling, or power_of_two=False"
        )
    return QdqLinear(quantizer, weight)
