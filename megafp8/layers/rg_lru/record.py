"""Config keys of the RG-LRU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.section import Channels, Heads
from megafp8.spec import ModelSection


class RgLruConfig(ConvolvedConfig):
    """Recurrent block of Griffin (arXiv:2402.19427): a linear recurrence with one number per channel, and a gelu gate.

    RecurrentGemma uses it. The state has inner_size numbers for any sequence length.
    """

    module: ClassVar[str] = "megafp8.layers.rg_lru.module:RgLru"
    tensor_prefix: ClassVar[str] = "rg_lru"

    hugging_face: ClassVar[Mapping[str, str]] = {
        "x": "temporal_block.linear_x", "z": "temporal_block.linear_y", "proj": "temporal_block.linear_out",
        "x_conv": "temporal_block.conv_1d", "rate.weight": "temporal_block.rg_lru.recurrent_param",
        "input_gate.weight": "temporal_block.rg_lru.input_gate_weight",
        "input_gate.bias": "temporal_block.rg_lru.input_gate_bias",
        "recurrence_gate.weight": "temporal_block.rg_lru.recurrent_gate_weight",
        "recurrence_gate.bias": "temporal_block.rg_lru.recurrent_gate_bias",
    }  # fmt: skip

    kind: Literal["rg_lru"] = "rg_lru"
    """Kind of mixer: RG-LRU."""
    inner_size: Channels
    """Number of channels of the recurrence (lru_width)."""
    num_heads: Heads
    """Number of heads. The weights of the gates are matrices within heads (num_attention_heads)."""
    conv_bias: bool = True
    """Add biases to the convolution."""
    proj_bias: bool = True
    """Add biases to the projections before the convolution and after the recurrence."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the number of heads, which tensor parallelism divides."""
        return {"num_heads": self.num_heads}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys at `path` break in any run."""
        if self.inner_size % self.num_heads:
            rule = f"{path}.inner_size ({self.inner_size}) is not a multiple of it"
            yield Problem(f"{path}.num_heads", self.num_heads, rule, divisors(self.inner_size, self.num_heads))
