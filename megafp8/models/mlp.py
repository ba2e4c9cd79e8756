"""The block's MLP: SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU, its width cut over the tensor-parallel group.

For SwiGLU, gate and up are one column-parallel product whose weight rows are [gate | up] of this rank. SwiGLU and
GELU's tanh form are computed as they are cast (`megafp8.ops.activation`), GELU with the up projection's bias.

Shapes: s sequence, b micro-batch, h hidden, f MLP width of this rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.config import ModelConfig
from megafp8.distributed.sharding import Init
from megafp8.fp8.sources import Plain
from megafp8.models.context import BuildContext
from megafp8.models.recompute import KEEP_ALL, BlockMemory
from megafp8.ops.activation import gelu, swiglu
from megafp8.ops.fusion import LinearInput, Recompute, RecomputedInput
from megafp8.plan import Neighbor
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def _exact_gelu(x: Tensor) -> Plain:
    return Plain(F.gelu(x).flatten(0, -2))


class MLP(nn.Module):
    """`[s, b, h]` (or `[s/t, b, h]` sequence-parallel) -> the same shape.

    `input`: the norm before it. `memory`: what is recomputed in backward.
    """

    def __init__(
        self, name: str, config: ModelConfig, context: BuildContext, *, input: Neighbor, memory: BlockMemory = KEEP_ALL
    ) -> None:
        super().__init__()
        self.activation = config.activation
        f, gated = config.ffn_size, config.activation == "swiglu"
        common = context.linear_options() | {"bias": config.linear_bias}
        exact = config.activation == "gelu"
        activation = (
            Neighbor(config.activation, "none", "exact GELU has no fused kernel")
            if exact
            else Neighbor(config.activation, "any")
        )
        self.up = ColumnParallelLinear(
            f"{name}.gate_up" if gated else f"{name}.up",
            config.hidden_size,
            2 * f if gated else f,
            parts={f"{name}.gate": f, f"{name}.up": f} if gated else None,
            init=Init("normal", config.init_std),
            skip_bias_add=config.activation == "gelu_tanh",
            site=context.site(before=input, after=activation, recompute_input=memory.norms),
            **common,
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            f,
            config.hidden_size,
            init=Init("normal", config.init_std / math.sqrt(2 * config.num_layers)),
            site=context.site(before=activation, recompute_input=memory.activation, smoothable=f if gated else None),
            **common,
        )

    def forward(self, x_sbh: Tensor | LinearInput) -> Tensor:
        form = self.down.state.input_format
        if self.activation == "gelu":
            y_sbf = self.up(x_sbh)
            activated = F.gelu(y_sbf)
            if form is None or not torch.is_grad_enabled():
                return self.down(activated)
            return self.down(
                LinearInput(activated, None, RecomputedInput((y_sbf,), Recompute(_exact_gelu, None, None)))
            )
        handoff = self.up.state.grad_handoff()
        if self.activation == "swiglu":
            return self.down(swiglu(self.up(x_sbh, handoff), form, handoff))
        y_sbf, bias = self.up(x_sbh, handoff)
        return self.down(gelu(y_sbf, bias, form, handoff))
