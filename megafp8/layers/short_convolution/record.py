"""A gated short convolution as mixer: its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.spec import ModelSection


class ShortConvolutionConfig(ConvolvedConfig):
    """A causal convolution of a few tokens in each channel, with a gate before it and one after it (LFM2). Its state is
    the last inputs."""

    module: ClassVar[str] = "megafp8.layers.short_convolution.module:ShortConvolution"
    tensor_prefix: ClassVar[str] = "short_convolution"

    kind: Literal["short_convolution"] = "short_convolution"
    """A gated short convolution."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"hidden_size": model.hidden_size}
