"""Activations of the MLP: one record for each value of `model.activation`.

The config reads them, so this file imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ActivationName = Literal[
    "swiglu", "clamped_swiglu", "limited_swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "squared_relu"
]  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """`down(f(up(x)))`, or `down(f(gate(x)) * up(x))` where it is `gated` (clamped SwiGLU: times up + 1).

    `fused`: output and gradient are computed while they are cast, by the `MatrixSource` of this name in
    `megafp8.numerics.sources`; else f is PyTorch's own op (`megafp8.layers.mlp.op`). Exact GELU is not fused: its erf
    has other bits on other devices, so no kernel could equal a reference. `hugging_face`: values of `hidden_act` that
    mean f; the first is written. `megatron`: the arguments by which Megatron-LM chooses it; without any it has no such
    activation.
    """

    gated: bool
    fused: bool
    hugging_face: tuple[str, ...]
    megatron: Mapping[str, bool]

    @property
    def up_layer(self) -> str:
        """Name of the MLP's first linear layer."""
        return "gate_up" if self.gated else "up"

    @property
    def fuses_bias(self) -> bool:
        """Adds the first linear layer's bias itself."""
        return self.fused and not self.gated

    def up_width(self, ffn: int) -> int:
        """Outputs of the MLP's first linear layer for an MLP `ffn` wide."""
        return 2 * ffn if self.gated else ffn


ACTIVATIONS: Mapping[ActivationName, Activation] = {
    "swiglu": Activation(
        gated=True, fused=True, hugging_face=("silu", "swish"), megatron={"swiglu": True, "bias_gelu_fusion": False}
    ),
    "clamped_swiglu": Activation(gated=True, fused=True, hugging_face=(), megatron={}),
    "limited_swiglu": Activation(gated=True, fused=True, hugging_face=(), megatron={}),
    "geglu_tanh": Activation(
        gated=True, fused=True, hugging_face=("gelu_pytorch_tanh", "gelu_new"), megatron={}
    ),
    "geglu": Activation(gated=True, fused=False, hugging_face=("gelu",), megatron={}),
    # Megatron-LM's kernel that adds the bias computes the tanh form; without it torch's exact one runs.
    "gelu_tanh": Activation(
        gated=False, fused=True, hugging_face=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        megatron={"swiglu": False, "bias_gelu_fusion": True},
    ),
    "gelu": Activation(
        gated=False, fused=False, hugging_face=("gelu",), megatron={"swiglu": False, "bias_gelu_fusion": False}
    ),
    "relu": Activation(gated=False, fused=True, hugging_face=("relu",), megatron={}),
    "squared_relu": Activation(gated=False, fused=True, hugging_face=("relu2",), megatron={}),
}  # fmt: skip
