"""Records for a layer that has only a mixer or only a feed-forward network (Nemotron-H): `none` in YAML."""

from __future__ import annotations

from typing import ClassVar, Literal

from megafp8.spec import PartRecord


class NoMixerConfig(PartRecord):
    """Record of a layer without a mixer: the layer has only a feed-forward network."""

    module: ClassVar[str] = "megafp8.layers.absent.module:NoMixer"
    tensor_prefix: ClassVar[str] = "no_mixer"
    present: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """Kind of mixer: no mixer, only a feed-forward network."""


class NoFfnConfig(PartRecord):
    """Record of a layer without a feed-forward network: the layer has only a mixer."""

    module: ClassVar[str] = "megafp8.layers.absent.module:NoFeedForward"
    tensor_prefix: ClassVar[str] = "no_ffn"
    present: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """Kind of feed-forward network: no feed-forward network, only a mixer."""
