"""Hyper-connections of a mixer or a feed-forward network, and the end of the residual streams.

Their parameters are replicated over the tensor-parallel group; where the sequence is sharded, each rank has a partial
gradient of them, which is summed once a step, as that of norms is. What they compute,
`megafp8.layers.hyper_connections.op` says.

Shapes: s sequence, b micro-batch, n streams of h channels, which flow as one tensor `[s, b, n·h]`.
"""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.layers.context import BuildContext, replicated_parameter
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.hyper_connections.op import collapse, connect, mix
from megafp8.layers.hyper_connections.reference import HyperConnectionRule
from megafp8.parallel.sharding import Init, unsharded
from megafp8.spec import ModelSpec


class _Mapping(nn.Module):
    """`outputs` products of the normalized streams, with a base each and scales."""

    def __init__(self, name: str, model: ModelSpec, context: BuildContext, outputs: int, scales: int) -> None:
        super().__init__()
        keys = model.hyper_connections
        assert keys is not None
        self.rule = HyperConnectionRule(keys.streams, keys.sinkhorn_iterations, keys.eps, model.norm.eps)

        def parameter(part: str, shape: tuple[int, ...], init: Init) -> nn.Parameter:
            decays = len(shape) > 1
            return replicated_parameter(context, unsharded(f"{name}.{part}", shape), init, weight_decay=decays)

        self.fn = parameter("fn", (outputs, model.stream_width), Init("normal", model.init_std))
        self.base = parameter("base", (outputs,), Init("zeros"))
        self.scale = parameter("scale", (scales,), Init("ones"))

    def saved(self, batch: MicroBatch) -> int:
        """Bytes that it keeps for its backward pass beside the streams, what is read and what is written."""
        n, outputs = self.rule.streams, len(self.base)
        weights = n + n * n if outputs > n else 0
        return batch.own_tokens * batch.statistic * (outputs + 1 + weights)

    def flops(self, batch: MicroBatch) -> float:
        """Model FLOPs of its products, forward."""
        return 2.0 * batch.own_tokens * self.fn.numel()


class HyperConnection(_Mapping):
    """How a part reads the streams, and writes its output to them."""

    def __init__(self, name: str, model: ModelSpec, context: BuildContext) -> None:
        assert model.hyper_connections is not None
        n = model.hyper_connections.streams
        super().__init__(name, model, context, outputs=n * (n + 2), scales=3)

    def read(self, x_sbk: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The part's input `[s, b, h]`, and what `write` needs."""
        x_sbk, y_sbh, post, comb = connect(x_sbk, self.fn, self.base, self.scale, self.rule)
        return y_sbh, (x_sbk, post, comb)

    @staticmethod
    def write(y_sbh: Tensor, kept: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The streams after a part whose output is `y`."""
        x_sbk, post, comb = kept
        return mix(x_sbk, y_sbh, post, comb)

    def work(self, hidden: int) -> KernelWork:
        """`hidden`: bytes of a tensor `[s, b, h]` on this rank.

        Forward reads the streams three times and the part's output, and writes its input and the streams. Backward
        reads them three times and their gradient twice, and writes that twice; the others once or twice.
        """
        n = self.rule.streams
        return KernelWork((4.0 * n + 2) * hidden, (7.0 * n + 4) * hidden, kernels=3, more_in_backward=2)


class StreamCollapse(_Mapping):
    """The streams after the last layer -> hidden states `[s, b, h]`."""

    def __init__(self, name: str, model: ModelSpec, context: BuildContext) -> None:
        assert model.hyper_connections is not None
        super().__init__(name, model, context, outputs=model.hyper_connections.streams, scales=1)

    def forward(self, x_sbk: Tensor) -> Tensor:
        return collapse(x_sbk, self.fn, self.base, self.scale, self.rule)
