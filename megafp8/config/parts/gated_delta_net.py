"""Gated DeltaNet: its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.config.errors import Problem, divisors
from megafp8.config.parts.base import ModelSection, PartConfig, RunConfig
from megafp8.section import PositiveInt


class GatedDeltaNetConfig(PartConfig):
    """Linear attention whose state is corrected by the delta rule and decays (Gated DeltaNet, arXiv:2412.06464), as in
    Qwen3-Next. A head's state has key_head_dim × value_head_dim numbers, however long the sequence is."""

    module: ClassVar[str] = "megafp8.models.gated_delta_net:GatedDeltaNet"
    tensor_prefix: ClassVar[str] = "gated_delta_net"

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    """Gated DeltaNet."""
    num_key_heads: PositiveInt
    """Number of heads of queries and keys (linear_num_key_heads)."""
    num_value_heads: PositiveInt
    """Number of heads of values, each with a state; a multiple of num_key_heads (linear_num_value_heads)."""
    key_head_dim: PositiveInt = 128
    """Channels of a head's query and key (linear_key_head_dim)."""
    value_head_dim: PositiveInt = 128
    """Channels of a head's value (linear_value_head_dim)."""
    conv_kernel_size: PositiveInt = 4
    """Tokens that the convolution before the recurrence sees (linear_conv_kernel_dim)."""

    @property
    def shares_context(self) -> bool:
        return False

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_key_heads": self.num_key_heads, "num_value_heads": self.num_value_heads}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if self.num_value_heads % self.num_key_heads:
            rule = f"{path}.num_value_heads ({self.num_value_heads}) is not a multiple of it"
            works = divisors(self.num_value_heads, self.num_key_heads)
            yield Problem(f"{path}.num_key_heads", self.num_key_heads, rule, works)

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        context = config.parallel.context
        if context > 1:
            rule = f"layers of {path} pass a state from token to token, which is not offered over ranks"
            yield Problem("parallel.context", context, rule, "try 1, and parallel.tensor for long sequences")
        if config.data.prefix_lm is not None:
            rule = f"layers of {path} see earlier tokens only, and a prefix sees later ones"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")
