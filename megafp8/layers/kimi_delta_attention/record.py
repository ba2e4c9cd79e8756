"""Config keys of Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.section import Channels, Heads
from megafp8.spec import ModelSection


class KimiDeltaAttentionConfig(ConvolvedConfig):
    """Linear attention with the delta rule and a decay per key channel (Kimi Delta Attention, arXiv:2510.26692).

    The state of a head has head_dim² numbers for any sequence length.
    """

    module: ClassVar[str] = "megafp8.layers.kimi_delta_attention.module:KimiDeltaAttention"
    tensor_prefix: ClassVar[str] = "kimi_delta_attention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        **{x: f"self_attn.{x}_proj" for x in "qkv"}, **{f"{x}_conv": f"self_attn.{x}_conv1d" for x in "qkv"},
        "decay_down": "self_attn.f_a_proj", "decay_up": "self_attn.f_b_proj", "decay.bias": "self_attn.dt_bias",
        "gate_down": "self_attn.g_a_proj", "gate_up": "self_attn.g_b_proj", "beta": "self_attn.b_proj",
        "norm": "self_attn.o_norm", "proj": "self_attn.o_proj",
    }  # fmt: skip

    kind: Literal["kimi_delta_attention"] = "kimi_delta_attention"
    """Kind of mixer: Kimi Delta Attention."""
    num_heads: Heads
    """Number of heads, each with a state (linear_num_heads)."""
    head_dim: Channels = 128
    """Channels of a head's query, key and value, and rank of the low-rank products that compute decays and gates
    (linear_head_dim)."""
    erase_and_write_gates: bool = False
    """Replace a head's β by a gate for each channel of the key that erases and of the value that is written (Gated
    DeltaNet-2, Hatamizadeh et al. 2026, arXiv:2605.22791). The gates' projections are as large as those of k and v."""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the number of heads, which tensor parallelism divides."""
        return {"num_heads": self.num_heads}
