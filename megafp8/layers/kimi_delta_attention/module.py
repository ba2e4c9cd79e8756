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

import torch
from torch import Tensor, nn

from megafp8.layers.attention.module import ATTENTION
from megafp8.layers.context import BuildContext, new_parameter, replicated_product
from megafp8.layers.costs import MicroBatch
from megafp8.layers.delta_rule.module import BEFORE, DeltaRuleMixer
from megafp8.layers.kimi_delta_attention.record import KimiDeltaAttentionConfig
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.linear.state import LinearState
from megafp8.parallel.sharding import Init, shard_dim
from megafp8.parallel.tensor.layers import ColumnParallelLinear
from megafp8.plan import LinearSite, Neighbor
from megafp8.spec import ModelSpec

_REASON = "decays and gates are few and stay in training.precision"


class KimiDeltaAttention(DeltaRuleMixer):
    """Linear attention with the delta rule and a decay per key channel.

    The layer always reads the norm's values, even if `input` could quantize them.
    """

    silu = False

    def __init__(
        self,
        name: str,
        record: KimiDeltaAttentionConfig,
        model: ModelSpec,
        context: BuildContext,
        *,
        input: Neighbor,
        memory: BlockMemory = KEEP_ALL,
    ) -> None:
        h, heads, d = model.hidden_size, record.num_heads, record.head_dim
        # Initial decays as in the paper's code.
        super().__init__(
            name, model, context, key_heads=heads, value_heads=heads, d=d, w=d, kernel=record.conv_kernel_size,
            decay_shape=(d,), decay_init=Init("inverse_softplus", low=1e-3, high=0.1), norm_eps=model.norm.eps,
        )  # fmt: skip
        init, (t, rank) = Init("normal", model.hidden_init_std), (context.tensor.size(), context.tensor.rank())
        gates = {"erase": heads * d, "write": heads * d} if record.erase_and_write_gates else {}
        widths, self.channel_gates = self.widths | gates, sum(gates.values()) // t
        self.projection = ColumnParallelLinear(
            f"{name}.qkv",
            h,
            sum(widths.values()),
            parts={f"{name}.{part}": width for part, width in widths.items()},
            init=init,
            site=context.site(before=BEFORE, after=ATTENTION),
            **context.linear_options(),
        )
        parts = {"beta": 0 if gates else heads, "decay_down": d, "gate_down": d}
        self.down, self.down_state = replicated_product(context, name, "down", parts, h, init=init, reason=_REASON)
        self.down_widths = [*parts.values()]

        def up(which: str) -> tuple[nn.Parameter, LinearState]:
            shard = shard_dim(f"{name}.{which}.weight", (heads * d, d), 0, rank, t)
            site = LinearSite(f"{name}.{which}", d, heads * d // t, high_precision=_REASON)
            weight = new_parameter(context, [shard], init, replicated_over_tp=False, matrix=True)
            return weight, context.fp8.linear(site)

        self.decay_up, self.decay_state = up("decay_up")
        self.gate_up, self.gate_state = up("gate_up")

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
            "input of decays and gate": self.saved_beside(batch, self.projection.state, self.down.shape[1]),
            "q, k, v": m * self._channels * e,
            "erase and write gates": m * self.channel_gates * e,
            "decays, gate": 2 * m * values * e,
            "down": m * (kept_for_beta + 2 * self.d) * e,
            **self.saved_by_recurrence(batch),
        }
