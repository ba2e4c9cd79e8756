"""Linear layer that every tensor-parallel rank holds whole."""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.layers.context import BuildContext, replicated_parameters
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init
from megafp8.plan import LinearSite


class WholeLinear(nn.Module):
    """High-precision linear layer that every tensor-parallel rank holds whole and applies to its own tokens."""

    def __init__(self, name: str, inputs: int, outputs: int, context: BuildContext, std: float) -> None:
        super().__init__()
        shapes = {f"{name}.weight": (outputs, inputs)}
        self.weight = replicated_parameters(context, shapes, Init("normal", std), matrix=True)
        reason = "the weight is replicated and stays in training.precision"
        self.state = context.fp8.linear(LinearSite(name, inputs, outputs, high_precision=reason))

    def forward(self, x: Tensor) -> Tensor:
        """Project `[..., inputs]` to `[..., outputs]`."""
        return linear(x, self.weight, self.state)
