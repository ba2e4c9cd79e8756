"""Base records of recurrent mixers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from megafp8.host.problems import Problem
from megafp8.section import INTEGER
from megafp8.spec import PartRecord, RunConfig


class RecurrentConfig(PartRecord):
    """Record of a mixer that passes a state from token to token."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the mixer passes a state from token to token: True."""
        return True

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield a problem if the run uses prefixes, in which tokens see later tokens."""
        if config.data.prefix_lm is not None:
            rule = f"layers of {path} see earlier tokens only, but tokens of a prefix also see later ones"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")


class ConvolvedConfig(RecurrentConfig):
    """Record of a mixer that passes a state from token to token, after a causal convolution over a few tokens."""

    conv_kernel_size: Annotated[int, Field(ge=2), INTEGER] = 4
    """Number of tokens that the convolution before the recurrence sees (linear_conv_kernel_dim, conv_kernel,
    mamba_d_conv)."""

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the rules that a run breaks, including a sequence too short for its context-parallel parts."""
        parts = 2 * config.parallel.context
        if parts > 2 and config.training.seq_length < parts * (self.conv_kernel_size - 1):
            rule = f"{path} needs {self.conv_kernel_size - 1} tokens in each of {parts} parts of a sequence"
            works = f"try {parts * self.conv_kernel_size}, or a smaller parallel.context"
            yield Problem("training.seq_length", config.training.seq_length, rule, works)
        yield from super().run_problems(config, path)
