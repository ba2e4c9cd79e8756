"""RWKV-7: its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.recurrent.record import RecurrentConfig
from megafp8.section import Channels, Heads, PositiveFloat
from megafp8.spec import ModelSection


class Rwkv7Config(RecurrentConfig):
    """Time mix of RWKV-7 (arXiv:2503.14456): a state that decays by channel of keys, and in which each token replaces
    part of the value of its key. A head's state has head_dim² numbers, however long the sequence is."""

    module: ClassVar[str] = "megafp8.layers.rwkv7.module:Rwkv7"
    tensor_prefix: ClassVar[str] = "rwkv7"

    kind: Literal["rwkv7"] = "rwkv7"
    """Time mix of RWKV-7."""
    num_heads: Heads
    """Number of heads, each with a state."""
    head_dim: Channels = 64
    """Channels of a head's receptance, key and value (head_size)."""
    decay_rank: Channels = 64
    """Width of the product by which decays are computed (decay_low_rank_dim)."""
    rate_rank: Channels = 64
    """Width of the product by which in-context learning rates are computed (a_low_rank_dim)."""
    gate_rank: Channels = 128
    """Width of the product by which gates of outputs are computed (gate_low_rank_dim)."""
    norm_eps: PositiveFloat = 64e-5
    """Added to the variance in the norm of a head's output."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_heads": self.num_heads}
