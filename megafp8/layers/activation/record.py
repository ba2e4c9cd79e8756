"""Activations of the MLP: one record for each value of `model.activation`.

The config reads these records, so this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ActivationName = Literal[
    "swiglu", "clamped_swiglu", "limited_swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "squared_relu",
    "xielu",
]  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """Activation f of an MLP, and its names in other frameworks.

    The MLP computes `down(f(up(x)))`, or `down(f(gate(x)) * up(x))` if the activation is gated. Clamped SwiGLU
    multiplies by `up(x) + 1`.

    Args:
        gated: Whether the activation is multiplied by a second projection of the input.
        fused: Whether a `MatrixSource` of this name in `megafp8.numerics.sources` computes output and gradient while
            they are cast. Otherwise f is PyTorch's op (`megafp8.layers.mlp.op`). Exact GELU is not fused: its erf has
            different bits on different devices, so no kernel could match a reference.
        hugging_face: Values of `hidden_act` that mean f in all families that have it. Exports write the first.
        megatron: Arguments that select the activation in Megatron-LM. Empty if Megatron-LM does not have it.
        learned: Numbers that each MLP learns for f, by name, with the initial value of each number's softplus.
        passes: Passes over the input and output of f that PyTorch's ops make if f is not fused.
        temporary_bytes: Bytes per input value of the tensors that backward allocates in addition to gradients.
    """

    gated: bool
    fused: bool
    hugging_face: tuple[str, ...]
    megatron: Mapping[str, bool]
    learned: Mapping[str, float] = field(default_factory=dict)
    passes: int = 2
    temporary_bytes: int = 0

    @property
    def up_layer(self) -> str:
        """Name of the MLP's first linear layer."""
        return "gate_up" if self.gated else "up"

    @property
    def fuses_bias(self) -> bool:
        """Whether the activation's kernel adds the bias of the first linear layer."""
        return self.fused and not self.gated

    def up_width(self, ffn: int) -> int:
        """Return the number of outputs of the MLP's first linear layer, given the MLP's inner width `ffn`."""
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
    # Megatron-LM's fused bias kernel computes the tanh form. Without it, PyTorch's exact GELU runs.
    "gelu_tanh": Activation(
        gated=False, fused=True, hugging_face=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        megatron={"swiglu": False, "bias_gelu_fusion": True},
    ),
    "gelu": Activation(
        gated=False, fused=False, hugging_face=("gelu",), megatron={"swiglu": False, "bias_gelu_fusion": False}
    ),
    "relu": Activation(gated=False, fused=True, hugging_face=("relu",), megatron={}),
    "squared_relu": Activation(gated=False, fused=True, hugging_face=("relu2",), megatron={}),
    "xielu": Activation(
        gated=False, fused=False, hugging_face=(), megatron={}, learned={"alpha_p": 0.8, "alpha_n": 0.3},
        passes=10, temporary_bytes=20,
    ),
}  # fmt: skip
