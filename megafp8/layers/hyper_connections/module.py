"""Modules of hyper-connections: one per mixer or feed-forward network, and one after the last layer.

`megafp8.layers.hyper_connections.op` documents the computation. The parameters are replicated over the tensor-parallel
group. If the sequence is sharded, each rank has a partial gradient of them, and the group sums the gradients once per
step, as it does for norms.

Shapes: s sequence length, b micro-batch size, n streams of h channels, stored as one tensor `[s, b, n·h]`.
"""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.layers.context import BuildContext, replicated_parameters
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.hyper_connections.op import collapse, connect, mix
from megafp8.layers.hyper_connections.reference import HyperConnectionRule
from megafp8.parallel.sharding import Init
from megafp8.spec import ModelSpec


class _Mapping(nn.Module):
    """Parameters of the linear map from normalized streams to logits of weights.

    Args:
        name: Prefix of the names of the parameters.
        model: Sizes and hyper-connection keys of the model.
        context: Process groups, dtype and device of the model.
        outputs: Number of logits, each with a base.
        scales: Number of scales.
    """

    def __init__(self, name: str, model: ModelSpec, context: BuildContext, outputs: int, scales: int) -> None:
        super().__init__()
        keys = model.hyper_connections
        assert keys is not None
        self.rule = HyperConnectionRule(keys.streams, keys.sinkhorn_iterations, keys.eps, model.norm.eps)

        def parameter(part: str, shape: tuple[int, ...], init: Init) -> nn.Parameter:
            decays = len(shape) > 1
            return replicated_parameters(context, {f"{name}.{part}": shape}, init, weight_decay=decays)

        self.fn = parameter("fn", (outputs, model.stream_width), Init("normal", model.init_std))
        self.base = parameter("base", (outputs,), Init("zeros"))
        self.scale = parameter("scale", (scales,), Init("ones"))

    def saved(self, batch: MicroBatch) -> int:
        """Return the bytes saved for backward, without the streams, the part's input and its output."""
        n, outputs = self.rule.streams, len(self.base)
        weights = n + n * n if outputs > n else 0
        return batch.own_tokens * batch.statistic * (outputs + 1 + weights)

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs of the linear map in forward."""
        return 2.0 * batch.own_tokens * self.fn.numel()


class HyperConnection(_Mapping):
    """Connection of one part to the residual streams: `read` gives its input, `write` adds its output."""

    def __init__(self, name: str, model: ModelSpec, context: BuildContext) -> None:
        assert model.hyper_connections is not None
        n = model.hyper_connections.streams
        super().__init__(name, model, context, outputs=n * (n + 2), scales=3)

    def read(self, x_sbk: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the part's input `[s, b, h]`, and the streams and weights for `write`."""
        x_sbk, y_sbh, post, comb = connect(x_sbk, self.fn, self.base, self.scale, self.rule)
        return y_sbh, (x_sbk, post, comb)

    @staticmethod
    def write(y_sbh: Tensor, kept: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the streams `[s, b, n·h]` after a part with output `y_sbh`; `kept` comes from `read`."""
        x_sbk, post, comb = kept
        return mix(x_sbk, y_sbh, post, comb)

    def work(self, hidden: int) -> KernelWork:
        """Return the work of the kernels, given the bytes `hidden` of a tensor `[s, b, h]` on this rank.

        Forward reads the streams three times and the part's output once, and writes the part's input and the streams.
        Backward reads the streams three times and their gradient twice, writes the gradient twice, and reads or writes
        the part's tensors once or twice.
        """
        n = self.rule.streams
        return KernelWork((4.0 * n + 2) * hidden, (7.0 * n + 4) * hidden, kernels=3, more_in_backward=2)


class StreamCollapse(_Mapping):
    """Weighted sum of the streams after the last layer."""

    def __init__(self, name: str, model: ModelSpec, context: BuildContext) -> None:
        assert model.hyper_connections is not None
        super().__init__(name, model, context, outputs=model.hyper_connections.streams, scales=1)

    def forward(self, x_sbk: Tensor) -> Tensor:
        """Return the hidden states `[s, b, h]` from the streams `[s, b, n·h]`."""
        return collapse(x_sbk, self.fn, self.base, self.scale, self.rule)
