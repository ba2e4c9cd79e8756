"""Linear layers in a forward that `torch.onnx.export(dynamo=True)` traces: in FP8, as ONNX's operators for it.

    y = MatMul(DequantizeLinear(QuantizeLinear(x)), Transpose(DequantizeLinear(weight)))

The exporter's forward sees no values of parameters, so the weight is the FP8 copy that the layer has kept of its last
forward. The scale of the input is a constant where the layer remembers one (delayed, static), else the graph computes
it from x (current). Both have one scale per tensor; other recipes are refused, as runtimes have no GEMM for them.

How the result differs from the layer's: QuantizeLinear divides by `scale_inv`, where the layer multiplies by the scale,
which may round a value to the other one of its two neighbours in FP8. With scales that are powers of two it does not,
and then the results are equal but for the order of sums.

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
    """A linear layer as ONNX computes it in FP8, with its weight `[n, k]`."""

    input: RecipeQuantizer
    weight: ScaledTensor

    def __call__(self, x: Tensor) -> Tensor:
        """`x wᵀ`: `[..., k]` -> `[..., n]` in x's dtype."""
        values, known = x.float(), self.input.known_scale
        scale_inv = self.input.rule.scale(values.abs().flatten().amax(0)).reciprocal() if known is None else known[1]
        x8 = torch.onnx.ops.symbolic(
            "QuantizeLinear", (values, scale_inv, _zero_point()), dtype=E4M3.dtype, shape=x.shape
        )
        y = _dequantized(ScaledTensor(x8, scale_inv)) @ _dequantized(self.weight).t()
        return y.to(x.dtype)


def _dequantized(x: ScaledTensor) -> Tensor:
    # With a zero point, which onnxruntime copies to a QuantizeLinear that it adds: without one that would be to uint8.
    inputs = (x.data, x.scale_inv, _zero_point())
    return torch.onnx.ops.symbolic("DequantizeLinear", inputs, dtype=torch.float32, shape=x.data.shape)


def _zero_point() -> Tensor:
    return torch.zeros((), dtype=E4M3.dtype)


def exported(layer: StandaloneLinear, device: torch.device) -> QdqLinear | None:
    """The layer in the forward that is exported; None where it runs in high precision.

    ValueError where ONNX cannot express it, or its last forward was not one in FP8 with the weight that it has.
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
            f"{name} has FP8 scales of {quantizer.recipe.name} scaling; ONNX export has one scale per tensor, that of "
            "DelayedScaling, CurrentScaling or StaticScaling"
        )
    if quantizer.known_scale is None and quantizer.rule.power_of_two:
        raise ValueError(
            f"{name} rounds a scale that follows from its input down to a power of two, for which ONNX has no "
            "operator; use DelayedScaling or StaticScaling, or power_of_two=False"
        )
    return QdqLinear(quantizer, weight)
