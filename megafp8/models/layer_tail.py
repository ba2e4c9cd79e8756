"""What a layer does to the residual stream after its mixer and feed-forward network: multiply it by its scalar.

Shapes: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megafp8.config import ModelConfig
from megafp8.models.context import BuildContext
from megafp8.models.costs import MicroBatch, Work


class LayerTail(nn.Module):
    """The residual stream `[s, b, h]` (`[s/t, b, h]` sequence-parallel), with all branches added -> the next layer's.

    `scalar`: fp32 `[1]`, a constant of the layer that belongs to the weights and is not trained.
    """

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.scalar = torch.ones(1, dtype=torch.float32, device=context.buffer_device)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes that it keeps for its backward pass, by tensor."""
        return {"layer scalar": batch.element}

    def work(self, batch: MicroBatch) -> Work:
        """It reads and writes the stream, and reads a branch."""
        stream = batch.own_tokens * self.hidden_size * batch.element
        return Work(5.0 * stream, 2.0 * stream, 2)

    def forward(self, x_sbh: Tensor) -> Tensor:
        return x_sbh * self.scalar.to(x_sbh.dtype)
