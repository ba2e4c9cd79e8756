"""Config keys of RWKV-7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.recurrent.record import RecurrentConfig
from megafp8.section import Channels, Heads, PositiveFloat
from megafp8.spec import ModelSection


class Rwkv7Config(RecurrentConfig):
    """Time mix of RWKV-7 (arXiv:2503.14456): a recurrence with a decay per key channel.

    Each token replaces part of the value stored for its key. The state of a head has head_dim² numbers for any sequence
    length.
    """

    module: ClassVar[str] = "megafp8.layers.rwkv7.module:Rwkv7"
    tensor_prefix: ClassVar[str] = "rwkv7"

    kind: Literal["rwkv7"] = "rwkv7"
    """Kind of mixer: time mix of RWKV-7."""
    num_heads: Heads
    """Number of heads, each with a state."""
    head_dim: Channels = 64
    """Channels of a head's receptance, key and value (head_size)."""
    decay_rank: Channels = 64
    """Rank of the low-rank product that computes decays (decay_low_rank_dim)."""
    rate_rank: Channels = 64
    """Rank of the low-rank product that computes in-context learning rates (a_low_rank_dim)."""
    gate_rank: Channels = 128
    """Rank of the low-rank product that computes output gates (gate_low_rank_dim)."""
    norm_eps: PositiveFloat = 64e-5
    """Number added to the variance in the norm of a head's output."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the number of heads, which tensor parallelism divides."""
        return {"num_heads": self.num_heads}
