"""The block's MLP: SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU, its width cut over the tensor-parallel group.

For SwiGLU, gate and up are one column-parallel product whose weight rows are [gate | up] of this rank. SwiGLU and
GELU's tanh form are computed as they are cast (`megafp8.ops.activation`), GELU with the up projection's bias.

Shapes: s sequence, b micro-batch, h hidden, f MLP width of this rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.config import ModelConfig
from megafp8.distributed.sharding import Init
from megafp8.fp8 import Computed, Input, InputCast
from megafp8.fp8.sources import Plain
from megafp8.models.context import BuildContext
from megafp8.ops.activation import gelu, swiglu
from megafp8.ops.fusion import Again, Remake
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def _exact_gelu(x: Tensor) -> Plain:
    return Plain(F.gelu(x).flatten(0, -2))


class MLP(nn.Module):
    """`[s, b, h]` (or `[s/t, b, h]` sequence-parallel) -> the same shape.

    `remade`: the activation's output is not kept, and made again in backward.
    """

    def __init__(self, name: str, config: ModelConfig, context: BuildContext, *, remade: bool = False) -> None:
        super().__init__()
        self.activation, self.remade = config.activation, remade
        f, gated = config.ffn_size, config.activation == "swiglu"
        common: dict[str, Any] = {
            "group": context.tensor,
            "fp8": context.fp8,
            "dtype": context.dtype,
            "device": context.device,
            "sequence_parallel": context.sequence_parallel,
            "tp_overlap": context.tp_overlap,
            "bias": config.linear_bias,
        }
        self.up = ColumnParallelLinear(
            f"{name}.gate_up" if gated else f"{name}.up",
            config.hidden_size,
            2 * f if gated else f,
            parts={f"{name}.gate": f, f"{name}.up": f} if gated else None,
            init=Init("normal", config.init_std),
            skip_bias_add=config.activation == "gelu_tanh",
            **common,
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            f,
            config.hidden_size,
            init=Init("normal", config.init_std / math.sqrt(2 * config.num_layers)),
            **common,
        )
        if gated:
            context.fp8.smooth_input(f"{name}.down", f)

    @property
    def input_cast(self) -> InputCast | None:
        return self.up.input_cast

    def forward(self, x_sbh: Input) -> Tensor:
        if self.activation == "gelu":
            y_sbf = self.up(x_sbh)
            activated = F.gelu(y_sbf)
            remade = self.remade and torch.is_grad_enabled()
            return self.down(Computed(activated, Again((y_sbf,), Remake(_exact_gelu))) if remade else activated)
        slot, cast = self.up.grad_slot(), self.down.input_cast
        if self.activation == "swiglu":
            return self.down(swiglu(self.up(x_sbh, slot), cast, slot, remade=self.remade))
        y_sbf, bias = self.up(x_sbh, slot)
        return self.down(gelu(y_sbf, bias, cast, slot, remade=self.remade))
