"""Config keys of the gated short convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.spec import ModelSection


class ShortConvolutionConfig(ConvolvedConfig):
    """Gated short convolution (LFM2): a causal convolution over a few tokens in each channel.

    There is a gate before and a gate after the convolution. The state of a sequence is its last inputs.
    """

    module: ClassVar[str] = "megafp8.layers.short_convolution.module:ShortConvolution"
    tensor_prefix: ClassVar[str] = "short_convolution"

    kind: Literal["short_convolution"] = "short_convolution"
    """Kind of mixer: gated short convolution."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the hidden size, which tensor parallelism divides."""
        return {"hidden_size": model.hidden_size}
