"""Weights of a model's linear layers, each with the state of its computation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from megafp8.layers.experts.module import Experts
from megafp8.linear.group_state import GroupState
from megafp8.linear.state import LinearState
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


def linear_weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, LinearState | GroupState]]:
    """Yield each weight of a tensor-parallel linear layer or of experts with its state, in module order."""
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            yield module.weight, module.state
        elif isinstance(module, Experts):
            yield module.up, module.up_state
            yield module.down, module.down_state
