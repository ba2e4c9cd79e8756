"""Mamba-2: its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.section import Channels, Heads, NonNegative, PositiveFloat
from megafp8.spec import ModelSection


class Mamba2Config(ConvolvedConfig):
    """A state space with one decay per head and token (Mamba-2, arXiv:2405.21060), as in Nemotron-H, Granite 4 and
    Bamba. A head's state has head_dim × state_size numbers, however long the sequence is."""

    module: ClassVar[str] = "megafp8.layers.mamba2.module:Mamba2"
    tensor_prefix: ClassVar[str] = "mamba2"

    hugging_face: ClassVar[Mapping[str, str]] = {
        "proj": "mamba.out_proj", "norm": "mamba.norm", "log_rate.weight": "mamba.A_log", "step.bias": "mamba.dt_bias",
        "skip.weight": "mamba.D",
    }  # fmt: skip

    kind: Literal["mamba2"] = "mamba2"
    """Mamba-2."""
    num_heads: Heads
    """Number of heads, each with a state (mamba_num_heads)."""
    head_dim: Channels = 64
    """Channels of a head (mamba_head_dim)."""
    state_size: Channels = 128
    """Numbers of the state for each channel (ssm_state_size, mamba_d_state)."""
    num_groups: Heads = 8
    """Number of groups of neighbouring heads, which share what is written to and read from their states, B and C, and
    whose channels are normalized together before the output projection (n_groups)."""
    conv_bias: bool = True
    """Add biases to the convolution (use_conv_bias)."""
    min_step: NonNegative = 0.0
    """Steps of the state (dt, after softplus) are at least this (time_step_min, time_step_limit)."""
    max_step: PositiveFloat | None = None
    """Steps of the state are at most this (time_step_limit). Default: no limit."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_heads": self.num_heads, "num_groups": self.num_groups}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if self.num_heads % self.num_groups:
            rule = f"{path}.num_heads ({self.num_heads}) is not a multiple of it"
            yield Problem(f"{path}.num_groups", self.num_groups, rule, divisors(self.num_heads, self.num_groups))
        if self.max_step is not None and self.max_step <= self.min_step:
            rule = f"not above {path}.min_step ({self.min_step})"
            yield Problem(f"{path}.max_step", self.max_step, rule, "leave it out")
