"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention with one decay per head.

This mixer uses the delta rule (`megafp8.layers.delta_rule.module`). One column-parallel linear layer computes q, k, v
and the gate. A linear layer with few outputs computes β and the decays; every rank holds it whole and applies it to its
own tokens. The gate is SiLU. Qwen3-Next uses this mixer; OLMo Hybrid uses it with β up to 2. In Gated DeltaProduct
(Siems et al. 2025, arXiv:2502.10297), a token takes several steps, each with its own k, v and β.

Shapes: s sequence length, b micro-batch size, h hidden size; i steps per token, g = i + 1 numbers per token and head; a
value heads of w channels on this rank; n channels of the convolution.
"""

from __future__ import annotations

from torch import Tensor

from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_product
from megafp8.layers.costs import MicroBatch
from megafp8.layers.delta_rule.module import DeltaRuleMixer, step_names
from megafp8.layers.gated_delta_net.record import GatedDeltaNetConfig
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.recurrent.module import BEFORE_DECAYS
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init


class GatedDeltaNet(DeltaRuleMixer):
    """Linear attention with the gated delta rule.

    The layer always reads the norm's values, even if `input` could quantize them.
    """

    silu = True

    def __init__(self, build: PartBuild[GatedDeltaNetConfig]) -> None:
        record, model, heads = build.record, build.model, build.record.num_value_heads
        assert record.norm_eps is not None, "the record is not resolved"
        super().__init__(
            build, key_heads=record.num_key_heads, value_heads=heads, d=record.key_head_dim, w=record.value_head_dim,
            decay_shape=(), decay_init=Init("ones"), norm_eps=record.norm_eps,
            most=2.0 if record.allow_neg_eigval else 1.0, steps=record.householder_steps,
        )  # fmt: skip
        self.projection = build.column("qkvz", self.widths | {"z": self.widths["v"]}, before=BEFORE_DECAYS)
        parts = dict.fromkeys([*(f"beta{step}" for step in step_names(self.steps)), "decay"], heads)
        self.gates, self.gates_state = replicated_product(
            build.context, build.name, "gates", parts, model.hidden_size, init=Init("normal", model.hidden_init_std),
            reason="decays are few and stay in training.precision",
        )  # fmt: skip

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        gates_sbc = self.shared(linear(x_sbh, self.gates, self.gates_state))
        gates_sbga = gates_sbc.unflatten(-1, (self.steps + 1, -1)).narrow(-1, self.first_head, self.value_heads)
        beta_sbia, decay_sba = gates_sbga[:, :, :-1], gates_sbga[:, :, -1]
        qkv_sbn, z_sbc = self.projection(x_sbh).split([self._channels, self.value_heads * self.w], dim=-1)
        y_sbaw = self.run(inputs, qkv_sbn, decay_sba, beta_sbia)
        return self.proj(self.gated(y_sbaw, z_sbc))

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        m, e, values, heads = batch.tokens, batch.element, self.value_heads * self.w, self.gates.shape[0]
        return {
            "qkvz input": batch.saved_input(self.projection.state),
            "gates' input": batch.saved_input_beside(self.projection.state, self.gates.shape[1]),
            "q, k, v, z": m * (self._channels + values) * e,
            "gates": m * heads * e,
            **self.saved_by_recurrence(batch),
        }
