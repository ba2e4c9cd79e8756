"""MLP of a block, with its inner width sharded over the tensor-parallel group.

With a gated activation, one column-parallel linear layer computes gate and up. The rows of its weight are this rank's
[gate | up].

Shapes: s sequence length, b micro-batch size, h hidden size, f inner width on this rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from megafp8.config import MlpConfig
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.layers.build import PartBuild
from megafp8.layers.context import new_parameter
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mixer import FeedForward
from megafp8.layers.mlp.op import mlp
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.parallel.sharding import Init, unsharded
from megafp8.parallel.tensor.lora import READS_VALUES
from megafp8.plan import Neighbor


class MLP(FeedForward):
    """MLP: two linear layers with an activation between them.

    With a gated activation, the first layer computes gate and up. If `adapted`, `inputs` of `forward` adds to both.
    """

    def __init__(self, build: PartBuild[MlpConfig], *, adapted: bool = False) -> None:
        super().__init__()
        context, f, bias = build.context, build.record.width, build.model.mlp_bias
        self.kind, self.activation = build.record.activation, ACTIVATIONS[build.record.activation]
        neighbor = Neighbor(self.kind, "any" if self.activation.fused else "none", f"{self.kind} has no fused kernel")
        after = READS_VALUES if adapted else neighbor
        parts = {"gate": f, "up": f} if self.activation.gated else {"up": f}
        self.up = build.column(
            self.activation.up_layer, parts, after=after, bias=bias, skip_bias_add=self.activation.fuses_bias
        )
        self.input_linear = self.up.state
        self.down = build.row(f, "down", before=neighbor, recompute_input=build.memory.activation, bias=bias)
        # Each tensor-parallel rank applies the learned numbers to its own channels.
        spec = {"replicated_over_tp": True, "reduce_over_tp": context.tensor.size() > 1, "weight_decay": False}
        self.learned = nn.ParameterList()
        for x, start in self.activation.learned.items():
            shards, init = unsharded(f"{build.name}.{x}.weight", (1,)), Init("inverse_softplus", low=start, high=start)
            self.learned.append(new_parameter(context, shards, init, **spec))

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        up, down = self.up.state, self.down.state
        saved = {"up input": batch.saved_input(up), "up output": batch.tokens * up.site.outputs * batch.element}
        if self.activation.gated and not self.activation.fused:
            saved["activated gate"] = batch.tokens * down.site.inputs * batch.element
        saved["down input"] = batch.saved_input(down)
        return saved

    def activation_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes that the activation reads and writes in one pass."""
        return batch.tokens * (self.up.state.site.outputs + self.down.state.site.inputs) * batch.element

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of the activation."""
        passes, input_bytes = (
            1 if self.activation.fused else self.activation.passes,
            batch.tokens * self.up.state.site.outputs * batch.element,
        )
        forward = self.activation_bytes(batch)
        return KernelWork(passes * forward, passes * (forward + input_bytes))

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of the gradients of the activation's output and input and of the MLP's input.

        They include the activation's own temporaries.
        The gradient of the activation's input is FP8 in both orientations if the activation is fused with the cast.
        """
        up, down = self.up.state, self.down.state
        input_element = 2 if up.plan.grad_output == "fused" else batch.element + self.activation.temporary_bytes
        widths = (down.site.inputs + up.site.inputs) * batch.element + up.site.outputs * input_element
        return batch.tokens * widths

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any = None) -> Tensor:
        """Return the MLP's output in the shape of its input; `inputs` is not used unless the MLP is adapted."""
        up = partial(self._up, x_sbh, inputs)
        return mlp(self.kind, up, self.down, self.up.state, self.down.state, [*self.learned])

    def _up(
        self, x_sbh: Tensor | LinearInput, inputs: Any, handoff: QuantizedGradHandoff | None
    ) -> tuple[Tensor, Tensor | None]:
        y = self.up(x_sbh, handoff)
        y, bias = y if self.activation.fuses_bias else (y, None)
        return (y + inputs(x_sbh) if callable(inputs) else y), bias
