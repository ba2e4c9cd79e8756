"""Config keys and rules of Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megafp8.host.problems import Problem, divisors
from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.section import INTEGER, Channels, Heads, PositiveFloat
from megafp8.spec import ModelSection


class GatedDeltaNetConfig(ConvolvedConfig):
    """Linear attention with the gated delta rule (Gated DeltaNet, arXiv:2412.06464), as in Qwen3-Next.

    The state of a head has key_head_dim × value_head_dim numbers for any sequence length.
    """

    module: ClassVar[str] = "megafp8.layers.gated_delta_net.module:GatedDeltaNet"
    tensor_prefix: ClassVar[str] = "gated_delta_net"
    hugging_face: ClassVar[Mapping[str, str]] = {
        "log_rate.weight": "linear_attn.A_log", "decay.bias": "linear_attn.dt_bias", "norm": "linear_attn.norm",
        "proj": "linear_attn.out_proj",
    }  # fmt: skip

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    """Kind of mixer: Gated DeltaNet."""
    num_key_heads: Heads
    """Number of heads of queries and keys (linear_num_key_heads)."""
    num_value_heads: Heads
    """Number of heads of values, each with a state; a multiple of num_key_heads (linear_num_value_heads)."""
    key_head_dim: Channels = 128
    """Channels of a head's query and key (linear_key_head_dim)."""
    value_head_dim: Channels = 128
    """Channels of a head's value (linear_value_head_dim)."""
    allow_neg_eigval: bool = False
    """Let β be up to 2 instead of 1, so that a token can correct the value stored for its key by up to twice the
    difference. The transition of the state may then have negative eigenvalues (Grazzi et al. 2024, arXiv:2411.12537;
    OLMo Hybrid's linear_allow_neg_eigval)."""
    householder_steps: Annotated[int, Field(ge=1, examples=[2]), INTEGER] = 1
    """Number of steps in which a token corrects the state, each with its own key, value and β. Above 1, the mixer is
    Gated DeltaProduct (Siems et al. 2025, arXiv:2502.10297; num_householder), and its recurrence takes as many times
    the time."""
    norm_eps: PositiveFloat | None = None
    """Number added to the variance in the norm of heads' outputs (OLMo Hybrid: 1e-5). Default: model.norm_eps."""

    def resolved(self, model: ModelSection) -> GatedDeltaNetConfig:
        """Return the complete record, with norm_eps from the model if it is not set."""
        return self.model_copy(update={"norm_eps": self.norm_eps or model.norm_eps})

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the numbers of heads, which tensor parallelism divides."""
        return {"num_key_heads": self.num_key_heads, "num_value_heads": self.num_value_heads}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield a problem if key heads do not divide value heads."""
        if self.num_value_heads % self.num_key_heads:
            rule = f"{path}.num_value_heads ({self.num_value_heads}) is not a multiple of it"
            works = divisors(self.num_value_heads, self.num_key_heads)
            yield Problem(f"{path}.num_key_heads", self.num_key_heads, rule, works)
