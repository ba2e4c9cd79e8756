"""The kinds of layer parts, and a layer kind as a choice of parts.

To add a kind, add a folder to `megafp8.layers` with its record and its module, and its name to one of the unions below.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from megafp8.layers.absent.record import NoFfnConfig, NoMixerConfig
from megafp8.layers.attention.record import AttentionConfig
from megafp8.layers.block_sparse_attention.record import BlockSparseAttentionConfig
from megafp8.layers.compressed_attention.record import CompressedAttentionConfig
from megafp8.layers.experts.record import MoeFfnConfig
from megafp8.layers.gated_delta_net.record import GatedDeltaNetConfig
from megafp8.layers.kimi_delta_attention.record import KimiDeltaAttentionConfig
from megafp8.layers.latent_attention.record import LatentMixerConfig
from megafp8.layers.mamba1.record import Mamba1Config
from megafp8.layers.mamba2.record import Mamba2Config
from megafp8.layers.mlp.record import MlpConfig
from megafp8.layers.rg_lru.record import RgLruConfig
from megafp8.layers.rwkv7.record import Rwkv7Config
from megafp8.layers.shared_attention.record import SharedAttentionConfig
from megafp8.layers.short_convolution.record import ShortConvolutionConfig
from megafp8.layers.sparse_attention.record import SparseLatentMixerConfig
from megafp8.section import Section
from megafp8.spec import PartRecord

Mixer = (
    AttentionConfig
    | BlockSparseAttentionConfig
    | LatentMixerConfig
    | SparseLatentMixerConfig
    | CompressedAttentionConfig
    | GatedDeltaNetConfig
    | Mamba1Config
    | Mamba2Config
    | SharedAttentionConfig
    | KimiDeltaAttentionConfig
    | RgLruConfig
    | ShortConvolutionConfig
    | Rwkv7Config
    | NoMixerConfig
)
"""Part of a layer that mixes tokens."""
Ffn = MlpConfig | MoeFfnConfig | NoFfnConfig
"""Feed-forward network of a layer."""
PARTS: tuple[type[PartRecord], ...] = (*get_args(Mixer), *get_args(Ffn))


def _alone(union: Any) -> BeforeValidator:
    """Return a validator that accepts a bare kind, such as `ffn: none`, as a part with default options."""
    kinds = Literal[tuple(part.model_fields["kind"].default for part in get_args(union))]  # type: ignore[valid-type]
    return BeforeValidator(
        lambda value: {"kind": value} if isinstance(value, str) else value, json_schema_input_type=union | kinds
    )


class LayerKind(Section):
    """Kind of layer with keys that override the model section."""

    mixer: Annotated[Mixer, Field(discriminator="kind"), _alone(Mixer)] | None = None
    """Part that mixes tokens. none: the layer has only a feed-forward network. Default: the mixer that the model
    section describes."""
    ffn: Annotated[Ffn, Field(discriminator="kind"), _alone(Ffn)] | None = None
    """Feed-forward network. none: the layer has only a mixer. Default: the feed-forward network that the model section
    describes."""
    norm_position: Literal["pre", "output", "both", "mlp_both"] | None = None
    """Position of the norms in this kind of layer. Default: model.norm_position."""

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, values: Any) -> Any:
        """Set the kind of a mixer without one to attention, and of a feed-forward network without one to mlp."""
        if not isinstance(values, dict):
            return values
        defaults = {"mixer": "attention", "ffn": "mlp"}
        return {
            key: {"kind": defaults[key], **value} if key in defaults and isinstance(value, dict) else value
            for key, value in values.items()
        }
