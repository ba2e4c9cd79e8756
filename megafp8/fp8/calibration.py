"""High precision in place of FP8 for layers whose scales are being calibrated (`megafp8.fp8.recipes.static`)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megafp8.fp8.quantizers import Calibrating, Quantizer
from megafp8.ops.linear import Quantizers, high_precision_linear
from megafp8.ops.quantized_gather import LOCAL_COMM, TPComm


class Calibration:
    """Runs a layer in high precision while one of its tensors calibrates, and records their amaxes."""

    def __init__(self, quantizers: Quantizers) -> None:
        self.quantizers = quantizers

    @property
    def active(self) -> bool:
        return any(isinstance(q, Calibrating) and q.calibrating for q in self.quantizers)

    def __call__(
        self, x: Tensor, weight: nn.Parameter, bias: Tensor | None = None, *, comm: TPComm = LOCAL_COMM
    ) -> Tensor:
        _record(self.quantizers.input, x)
        _record(self.quantizers.weight, weight)
        y = high_precision_linear(x, weight, bias, comm=comm)
        if y.requires_grad:
            y.register_hook(partial(_record, self.quantizers.grad_output))
        return y


def _record(quantizer: Quantizer, x: Tensor) -> None:
    if isinstance(quantizer, Calibrating):
        quantizer.record(x)
