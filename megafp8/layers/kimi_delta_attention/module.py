"""Kimi Delta Attention (arXiv:2510.26692): linear attention with a decay per key channel.

This mixer uses the delta rule (`megafp8.layers.delta_rule.module`). One column-parallel linear layer computes q, k and
v. Decays and output gates come from low-rank products:

    down    h -> β of all heads, and d channels each for decays and gate     whole on every rank, for its own tokens
    up      d -> decays, d -> gate, for this rank's heads                    column-parallel

All of these stay in training.precision, because they are few FLOPs. The gate is a sigmoid.

Gated DeltaNet-2 (arXiv:2605.22791) has no β. Sigmoids of two more outputs of the first layer gate each channel: a token
erases what the state has at the key `erase ⊙ k`, and writes the value `write ⊙ v`.

Shapes: s sequence length, b micro-batch size, h hidden size; a heads of d channels on this rank; n channels of the
convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_product, sharded_product
from megafp8.layers.costs import MicroBatch
from megafp8.layers.delta_rule.module import DeltaRuleMixer
from megafp8.layers.kimi_delta_attention.record import KimiDeltaAttentionConfig
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.recurrent.module import BEFORE_DECAYS
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init

_REASON = "decays and gates are few and stay in training.precision"


class KimiDeltaAttention(DeltaRuleMixer):
    """Linear attention with the delta rule and a decay per key channel.

    The layer always reads the norm's values, even if `input` could quantize them.
    """

    silu = False

    def __init__(self, build: PartBuild[KimiDeltaAttentionConfig]) -> None:
        name, record, model, context = build.name, build.record, build.model, build.context
        heads, d = record.num_heads, record.head_dim
        # Initial decays as in the paper's code.
        super().__init__(
            build, key_heads=heads, value_heads=heads, d=d, w=d, decay_shape=(d,),
            decay_init=Init("inverse_softplus", low=1e-3, high=0.1), norm_eps=model.norm.eps,
        )  # fmt: skip
        gates = {"erase": heads * d, "write": heads * d} if record.erase_and_write_gates else {}
        self.channel_gates = sum(gates.values()) // context.tensor.size()
        self.projection = build.column("qkv", self.widths | gates, before=BEFORE_DECAYS)
        parts = {"beta": 0 if gates else heads, "decay_down": d, "gate_down": d}
        options: Any = {"init": Init("normal", model.hidden_init_std), "reason": _REASON}
        self.down, self.down_state = replicated_product(context, name, "down", parts, model.hidden_size, **options)
        self.down_widths = [*parts.values()]
        self.decay_up, self.decay_state = sharded_product(context, f"{name}.decay_up", d, heads * d, **options)
        self.gate_up, self.gate_state = sharded_product(context, f"{name}.gate_up", d, heads * d, **options)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        down = self.shared(linear(x_sbh, self.down, self.down_state))
        beta_sba, decay_sbd, gate_sbd = down.split(self.down_widths, dim=-1)
        decay_sbc = linear(decay_sbd.contiguous(), self.decay_up, self.decay_state)
        z_sbc = linear(gate_sbd.contiguous(), self.gate_up, self.gate_state)
        qkv_sbn = self.projection(x_sbh)
        if self.channel_gates:
            qkv_sbn, gates = qkv_sbn.split([self._channels, self.channel_gates], dim=-1)
        else:
            gates = beta_sba.narrow(-1, self.first_head, self.value_heads).unsqueeze(2)
        y_sbaw = self.run(inputs, qkv_sbn, decay_sbc, gates)
        return self.proj(self.gated(y_sbaw, z_sbc))

    def corrections(self, k_sbad: Tensor, v_sbad: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, β and the keys that look up values; with gates of channels, β is 1."""
        if not self.channel_gates:
            return super().corrections(k_sbad, v_sbad, gates)
        erase_sbad, write_sbad = gates.sigmoid().unflatten(-1, (2, *k_sbad.shape[2:])).unbind(2)
        ones = gates.new_ones(v_sbad.shape[:3], dtype=torch.promote_types(gates.dtype, torch.float32))
        return write_sbad * v_sbad, ones, erase_sbad * k_sbad

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        m, e, values = batch.tokens, batch.element, self.value_heads * self.w
        kept_for_beta = 0 if self.channel_gates else sum(self.down_widths)
        return {
            "qkv input": batch.saved_input(self.projection.state),
            "input of decays and gate": batch.saved_input_beside(self.projection.state, self.down.shape[1]),
            "q, k, v": m * self._channels * e,
            "erase and write gates": m * self.channel_gates * e,
            "decays, gate": 2 * m * values * e,
            "down": m * (kept_for_beta + 2 * self.d) * e,
            **self.saved_by_recurrence(batch),
        }
