"""Config keys of the MLP of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.activation.record import ACTIVATIONS, ActivationName
from megafp8.section import Channels, Section
from megafp8.spec import ModelSection, PartRecord

MEGATRON_LINEARS = {"gate": "linear_fc1", "up": "linear_fc1", "down": "linear_fc2"}
"""Megatron core's names of the linear layers of an MLP or an expert."""


class MlpKeys(Section):
    """Config keys of an MLP."""

    ffn_hidden_size: Channels | None = None
    """Inner width of the MLP. Default: 4 × hidden_size."""
    activation: ActivationName = "swiglu"
    """Activation of the MLP. swiglu (Llama): silu(gate) * up. gelu (exact) or gelu_tanh (GPT-2). geglu (exact) or
    geglu_tanh (T5 1.1): gelu(gate) * up. relu (OPT, T5 1.0). squared_relu (Primer, Nemotron). clamped_swiglu (gpt-oss):
    gate * sigmoid(1.702 * gate) * (up + 1), with gate clamped to at most 7 and up to [-7, 7]. limited_swiglu
    (DeepSeek-V4): swiglu, with gate clamped to at most 10 and up to [-10, 10]. xielu (Apertus): a parabola for positive
    values and an exponential for the others, with a learned factor of each (Huang & Schlag 2024, arXiv:2411.13010)."""


class MlpConfig(PartRecord, MlpKeys):
    """MLP: two linear layers with an activation between them, or three linear layers if the activation is gated."""

    module: ClassVar[str] = "megafp8.layers.mlp.module:MLP"
    tensor_prefix: ClassVar[str] = "mlp"
    hugging_face: ClassVar[Mapping[str, str]] = {x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    megatron: ClassVar[Mapping[str, str]] = {x: f"mlp.{y}" for x, y in MEGATRON_LINEARS.items()}

    kind: Literal["mlp"] = "mlp"
    """Kind of feed-forward network: MLP."""

    def resolved(self, model: ModelSection) -> MlpConfig:
        """Return the complete record, with missing keys filled in from the model."""
        values = {name: getattr(model, name) for name in MlpKeys.model_fields} | self.given
        values["ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * model.hidden_size
        return MlpConfig.model_construct(**values)

    @property
    def width(self) -> int:
        """Inner width of the MLP."""
        assert self.ffn_hidden_size is not None, "the record is not resolved"
        return self.ffn_hidden_size

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the inner width, which tensor parallelism divides."""
        return {"ffn_hidden_size": self.width}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the linear layers that LoRA can adapt."""
        return ("gate", "up", "down") if ACTIVATIONS[self.activation].gated else ("up", "down")
