"""Additional parts of BERT's head: a transform of hidden states, and a binary head for pairs of sentences.

Both are replicated over tensor-parallel ranks. Under sequence parallelism, a rank transforms its slice of the tokens.
The binary head reads the first token of a sample. Each rank computes it from the first token that the rank holds, and
only the loss of the rank with the sample's first token counts. The losses of the other ranks are multiplied by 0: here
under sequence parallelism, and by the loss mask under context parallelism. Every rank thus has a gradient of every
parameter, and the sum over ranks is correct.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.layers.context import BuildContext, replicated_parameters
from megafp8.layers.norm.module import block_norm, normalized
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init
from megafp8.plan import LinearSite
from megafp8.spec import ModelSpec


def _weight_and_bias(name: str, n: int, model: ModelSpec, context: BuildContext) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the replicated weight and bias of a linear layer with h inputs and n outputs."""
    weight, bias = {f"{name}.weight": (n, model.hidden_size)}, {f"{name}.bias": (n,)}
    return (
        replicated_parameters(context, weight, Init("normal", model.init_std), matrix=True),
        replicated_parameters(context, bias, Init("zeros"), weight_decay=False),
    )


class HeadTransform(nn.Module):
    """Linear layer, GELU and norm between the hidden states and the output layer."""

    def __init__(self, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = _weight_and_bias("transform", model.hidden_size, model, context)
        h, reason = model.hidden_size, "the weight is replicated and stays in training.precision"
        self.state = context.fp8.linear(LinearSite("transform", h, h, high_precision=reason))
        self.approximate = "tanh" if model.head.activation == "gelu_tanh" else "none"
        self.norm = block_norm("transform_norm", model, context)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Return the transformed hidden states, in the shape of the input: `[s, b, h]`, or `[s/t, b, h]`."""
        y_sbh = linear(x_sbh, self.weight, self.state, bias=self.bias)
        return normalized(self.norm, F.gelu(y_sbh, approximate=self.approximate))


class BinaryHead(nn.Module):
    """Classifier of pairs of sentences, from the first token of a sample.

    It consists of a linear layer with tanh (the pooler) and a linear layer with two outputs.
    """

    def __init__(self, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        self.pooler_weight, self.pooler_bias = _weight_and_bias("pooler", model.hidden_size, model, context)
        self.weight, self.bias = _weight_and_bias("binary_head", 2, model, context)
        self.counts = not context.sequence_sharded or context.tensor.rank() == 0

    def logits(self, x_sbh: Tensor) -> Tensor:
        """Return the logits `[b, 2]` of the classes "in order" and "swapped"."""
        pooled_bh = torch.tanh(F.linear(x_sbh[0], self.pooler_weight, self.pooler_bias))
        return F.linear(pooled_bh, self.weight, self.bias)

    def forward(self, x_sbh: Tensor, labels_b: Tensor) -> Tensor:
        """Return the loss of each sample, `[b]` float32 or wider, for hidden states `[s/t, b, h]` and labels `[b]`."""
        logits_b2 = self.logits(x_sbh)
        wide = logits_b2.to(torch.promote_types(logits_b2.dtype, torch.float32))
        return F.cross_entropy(wide, labels_b, reduction="none") * float(self.counts)
