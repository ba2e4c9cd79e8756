"""Config keys and rules of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.section import Channels, Heads, NonNegative, PositiveFloat
from megafp8.spec import ModelSection


class Mamba2Config(ConvolvedConfig):
    """State space model with one decay per head and token (Mamba-2, arXiv:2405.21060).

    Nemotron-H, Granite 4 and Bamba use it. The state of a head has head_dim × state_size numbers for any sequence
    length.
    """

    module: ClassVar[str] = "megafp8.layers.mamba2.module:Mamba2"
    tensor_prefix: ClassVar[str] = "mamba2"

    hugging_face: ClassVar[Mapping[str, str]] = {
        "proj": "mamba.out_proj", "norm": "mamba.norm", "log_rate.weight": "mamba.A_log", "step.bias": "mamba.dt_bias",
        "skip.weight": "mamba.D",
    }  # fmt: skip

    kind: Literal["mamba2"] = "mamba2"
    """Kind of mixer: Mamba-2."""
    num_heads: Heads
    """Number of heads, each with a state (mamba_num_heads)."""
    head_dim: Channels = 64
    """Channels of a head (mamba_head_dim)."""
    state_size: Channels = 128
    """Number of state values per channel (ssm_state_size, mamba_d_state)."""
    num_groups: Heads = 8
    """Number of groups of neighboring heads (n_groups). The heads of a group share B and C, the vectors that tokens use
    to write to and read from states. Their channels are normalized together before the output projection."""
    conv_bias: bool = True
    """Add biases to the convolution (use_conv_bias)."""
    min_step: NonNegative = 0.0
    """Lower limit of the step dt after softplus (time_step_min, time_step_limit)."""
    max_step: PositiveFloat | None = None
    """Upper limit of the step dt after softplus (time_step_limit). Default: no limit."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the numbers of heads and groups, which tensor parallelism divides."""
        return {"num_heads": self.num_heads, "num_groups": self.num_groups}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys at `path` break in any run."""
        if self.num_heads % self.num_groups:
            rule = f"{path}.num_heads ({self.num_heads}) is not a multiple of it"
            yield Problem(f"{path}.num_groups", self.num_groups, rule, divisors(self.num_heads, self.num_groups))
        if self.max_step is not None and self.max_step <= self.min_step:
            rule = f"it must be larger than {path}.min_step ({self.min_step})"
            yield Problem(f"{path}.max_step", self.max_step, rule, "leave it out")
