"""Records for a layer that has only a mixer or only a feed-forward network (Nemotron-H): `none` in YAML."""

from __future__ import annotations

from typing import ClassVar, Literal

from megafp8.spec import PartRecord


class NoMixerConfig(PartRecord):
    """Missing mixer of a layer that is a feed-forward network alone."""

    module: ClassVar[str] = "megafp8.layers.absent.module:NoMixer"
    tensor_prefix: ClassVar[str] = "no_mixer"
    present: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """Kind of mixer: the layer has none and is a feed-forward network alone."""


class NoFfnConfig(PartRecord):
    """Missing feed-forward network of a layer that is a mixer alone."""

    module: ClassVar[str] = "megafp8.layers.absent.module:NoFeedForward"
    tensor_prefix: ClassVar[str] = "no_ffn"
    present: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """Kind of feed-forward network: the layer has none and is a mixer alone."""
