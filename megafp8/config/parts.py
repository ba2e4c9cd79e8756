"""The kinds of parts that layers are made of, and a layer as a list of them.

A new kind is a folder of `megafp8.layers` with its record and its module, and its name in one of the unions below.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from megafp8.layers.absent.record import NoFfnConfig, NoMixerConfig
from megafp8.layers.attention.record import AttentionConfig
from megafp8.layers.compressed_attention.record import CompressedAttentionConfig
from megafp8.layers.experts.record import MoeFfnConfig
from megafp8.layers.gated_delta_net.record import GatedDeltaNetConfig
from megafp8.layers.kimi_delta_attention.record import KimiDeltaAttentionConfig
from megafp8.layers.latent_attention.record import LatentMixerConfig
from megafp8.layers.mamba2.record import Mamba2Config
from megafp8.layers.mlp.record import MlpConfig
from megafp8.layers.rwkv7.record import Rwkv7Config
from megafp8.layers.short_convolution.record import ShortConvolutionConfig
from megafp8.layers.sparse_attention.record import SparseLatentMixerConfig
from megafp8.section import Section
from megafp8.spec import PartRecord

Mixer = (
    AttentionConfig
    | LatentMixerConfig
    | SparseLatentMixerConfig
    | CompressedAttentionConfig
    | GatedDeltaNetConfig
    | Mamba2Config
    | KimiDeltaAttentionConfig
    | ShortConvolutionConfig
    | Rwkv7Config
    | NoMixerConfig
)
"""What mixes tokens."""
Ffn = MlpConfig | MoeFfnConfig | NoFfnConfig
"""The feed-forward network."""
PARTS: tuple[type[PartRecord], ...] = (*get_args(Mixer), *get_args(Ffn))


def _alone(union: Any) -> BeforeValidator:
    """A part of which nothing but the kind is given may be written by its kind: `ffn: none`."""
    kinds = Literal[tuple(part.model_fields["kind"].default for part in get_args(union))]  # type: ignore[valid-type]
    return BeforeValidator(
        lambda value: {"kind": value} if isinstance(value, str) else value, json_schema_input_type=union | kinds
    )


class LayerKind(Section):
    """A kind of layer, in which keys may have other values than in the model section."""

    mixer: Annotated[Mixer, Field(discriminator="kind"), _alone(Mixer)] | None = None
    """What mixes tokens; none: the layer is a feed-forward network. Default: as the model section says."""
    ffn: Annotated[Ffn, Field(discriminator="kind"), _alone(Ffn)] | None = None
    """The feed-forward network; none: the layer is a mixer. Default: as the model section says."""
    norm_position: Literal["pre", "output", "both"] | None = None
    """Where its parts have their norms, as model.norm_position, which is the default."""

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, values: Any) -> Any:
        """Without a kind, a mixer is attention, and a feed-forward network an MLP."""
        if not isinstance(values, dict):
            return values
        defaults = {"mixer": "attention", "ffn": "mlp"}
        return {
            key: {"kind": defaults[key], **value} if key in defaults and isinstance(value, dict) else value
            for key, value in values.items()
        }
