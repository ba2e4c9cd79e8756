"""The MLP of a block, its width sharded over the tensor-parallel group.

A gated activation has one column-parallel linear layer for gate and up, whose weight rows are [gate | up] of this rank.

Shapes: s sequence, b micro-batch, h hidden, f MLP width of this rank.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.config import ModelConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.distributed.sharding import Init
from megafp8.fp8 import Computed, Input, InputCast
from megafp8.fp8.sources import Plain
from megafp8.models.context import BuildContext
from megafp8.ops.activation import activation
from megafp8.ops.fusion import Again, Remake
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def _exact_gelu(x: Tensor, gated: bool) -> Tensor:
    """GELU of x, or of the gate of [gate | up] times up, by PyTorch's ops in x's dtype."""
    if not gated:
        return F.gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _exact_gelu_source(x: Tensor, gated: bool) -> Plain:
    return Plain(_exact_gelu(x, gated).flatten(0, -2))


class MLP(nn.Module):
    """`[s, b, h]` (or `[s/t, b, h]` sequence-parallel) -> the same shape.

    `remade`: the activation's output is not saved but recomputed in backward.
    """

    def __init__(self, name: str, config: ModelConfig, context: BuildContext, *, remade: bool = False) -> None:
        super().__init__()
        self.kind, self.remade = config.activation, remade
        f, self.activation = config.ffn_size, ACTIVATIONS[config.activation]
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
            f"{name}.{self.activation.up_layer}",
            config.hidden_size,
            self.activation.up_width(f),
            parts={f"{name}.gate": f, f"{name}.up": f} if self.activation.gated else None,
            init=Init("normal", config.init_std),
            skip_bias_add=self.activation.fuses_bias,
            **common,
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            f,
            config.hidden_size,
            init=Init("normal", config.init_std / math.sqrt(2 * config.num_layers)),
            **common,
        )
        if self.activation.smoothable:
            context.fp8.smooth_input(f"{name}.down", f)

    @property
    def input_cast(self) -> InputCast | None:
        return self.up.input_cast

    def forward(self, x_sbh: Input) -> Tensor:
        if not self.activation.fused:
            y_sbf, gated = self.up(x_sbh), self.activation.gated
            activated = _exact_gelu(y_sbf, gated)
            if not (self.remade and torch.is_grad_enabled()):
                return self.down(activated)
            again = Again((y_sbf,), Remake(partial(_exact_gelu_source, gated=gated)))
            return self.down(Computed(activated, again))
        slot, cast = self.up.grad_slot(), self.down.input_cast
        y_sbf, bias = self.up(x_sbh, slot) if self.activation.fuses_bias else (self.up(x_sbh, slot), None)
        return self.down(activation(self.kind, y_sbf, bias, cast, slot, remade=self.remade))
