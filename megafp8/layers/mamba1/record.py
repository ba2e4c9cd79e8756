"""Config keys of Mamba-1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.section import Channels, PositiveFloat
from megafp8.spec import ModelSection


class Mamba1Config(ConvolvedConfig):
    """Selective state space model with a decay per channel, state value and token (Mamba-1, arXiv:2312.00752).

    Mamba, Falcon Mamba and Jamba use it. The state has inner_size × state_size numbers for any sequence length.
    """

    module: ClassVar[str] = "megafp8.layers.mamba1.module:Mamba1"
    tensor_prefix: ClassVar[str] = "mamba1"

    hugging_face: ClassVar[Mapping[str, str]] = {
        "proj": "mamba.out_proj", "x_conv": "mamba.conv1d", "selection": "mamba.x_proj", "step": "mamba.dt_proj",
        "log_rate.weight": "mamba.A_log", "skip.weight": "mamba.D", "step_norm": "mamba.dt_layernorm",
        "b_norm": "mamba.b_layernorm", "c_norm": "mamba.c_layernorm",
    }  # fmt: skip

    kind: Literal["mamba1"] = "mamba1"
    """Kind of mixer: Mamba-1."""
    inner_size: Channels
    """Number of channels of the recurrence (expand × hidden_size)."""
    step_rank: Channels
    """Rank of the low-rank product that computes steps (time_step_rank, mamba_dt_rank; usually hidden_size / 16)."""
    state_size: Channels = 16
    """Number of state values per channel (state_size, mamba_d_state)."""
    conv_bias: bool = True
    """Add biases to the convolution (use_conv_bias, mamba_conv_bias)."""
    proj_bias: bool = False
    """Add biases to the projections before the convolution and after the recurrence (use_bias, mamba_proj_bias)."""
    norms: Literal["none", "unweighted", "weighted"] = "none"
    """RMS norms of the low-rank steps, of B and of C: none, without weights (Falcon Mamba), or with weights (Jamba)."""
    norm_eps: PositiveFloat = 1e-6
    """Number added to the mean square in these norms (mixer_rms_eps)."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the number of channels, which tensor parallelism divides."""
        return {"inner_size": self.inner_size}
