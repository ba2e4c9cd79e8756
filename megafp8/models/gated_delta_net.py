"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention with a state that decays and is corrected.

A head's state S `[d, w]` maps keys to values. Each token lets it decay, replaces what it has for the token's key by
the token's value, as far as the token says, and reads it with the token's query:

    S ← exp(g) S;    S ← S + k (β (v − Sᵀk))ᵀ;    y = Sᵀq        (`megafp8.ops.delta_rule`)

q, k and v come from one column-parallel product, pass a causal convolution of a few tokens in each channel and SiLU,
and q and k are normalized to length 1. β and the decay g come from a product with few outputs, which all ranks compute
of their own tokens. A head's output is normalized, multiplied by SiLU of a gate, and projected. So it is in Qwen3-Next.

What passes from token to token is computed again in backward; q, k and v are kept as they are before the convolution.

Shapes: s sequence, b micro-batch, h hidden; k key heads and a value heads of this rank, d and w channels of keys and of
values; n = 2kd + aw channels of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config import ModelConfig
from megafp8.config.parts.gated_delta_net import GatedDeltaNetConfig
from megafp8.distributed.sharding import Init, shard_dim, unsharded
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.models.attention import ATTENTION
from megafp8.models.context import BuildContext, new_parameter, replicated_parameter
from megafp8.models.costs import MicroBatch, Work
from megafp8.models.mixer import RecurrentInputs
from megafp8.models.norms import RMSNorm
from megafp8.models.recompute import KEEP_ALL, BlockMemory
from megafp8.models.recurrent import RecurrentMixer, short_convolution
from megafp8.ops.delta_rule import CHUNK, delta_rule, missing_gated_delta_kernel
from megafp8.ops.gated_norm import gated_norm
from megafp8.ops.recurrence import State
from megafp8.ops.short_convolution import Part, convolve_parts, last_inputs
from megafp8.plan import LinearSite, Neighbor
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.tensor_parallel.mappings import copy_to_tensor_parallel, gather_from_sequence_parallel


class GatedDeltaNet(RecurrentMixer):
    """Linear attention by the gated delta rule. It reads the norm's values, whatever `input` could give."""

    def __init__(
        self,
        name: str,
        record: GatedDeltaNetConfig,
        config: ModelConfig,
        context: BuildContext,
        *,
        input: Neighbor,
        memory: BlockMemory = KEEP_ALL,
    ) -> None:
        super().__init__()
        t, rank = context.tensor.size(), context.tensor.rank()
        self.context, h, heads = context, config.hidden_size, record.num_value_heads
        self.d, self.w = record.key_head_dim, record.value_head_dim
        self.key_heads, self.value_heads, self.first_head = record.num_key_heads // t, heads // t, rank * (heads // t)
        keys, values = record.num_key_heads * self.d, heads * self.w
        widths = {"q": keys, "k": keys, "v": values}
        common, init = context.linear_options(), Init("normal", config.hidden_init_std)
        before = Neighbor("attention_norm", "none", "the decays are computed from the norm's output too")
        self.projection = ColumnParallelLinear(
            f"{name}.qkvz",
            h,
            2 * keys + 2 * values,
            parts={f"{name}.{part}": width for part, width in (widths | {"z": values}).items()},
            init=init,
            site=context.site(before=before, after=ATTENTION),
            **common,
        )
        shards = [x for part in ("beta", "decay") for x in unsharded(f"{name}.{part}.weight", (heads, h))]
        self.gates = replicated_parameter(context, shards, init)
        reason = "decays are few and stay in training.precision"
        self.gates_state = context.fp8.linear(LinearSite(f"{name}.gates", h, 2 * heads, high_precision=reason))
        of_rank = {"replicated_over_tp": False}
        of_heads = of_rank | {"weight_decay": False}
        self.convolution = short_convolution(name, context, widths, record.conv_kernel_size)
        log_rate = shard_dim(f"{name}.log_rate.weight", (heads,), 0, rank, t)
        self.log_rate = new_parameter(context, [log_rate], Init("log_uniform", low=1.0, high=16.0), **of_heads)
        bias = shard_dim(f"{name}.decay.bias", (heads,), 0, rank, t)
        self.decay_bias = new_parameter(context, [bias], Init("ones"), **of_heads)
        self.norm = RMSNorm(f"{name}.norm", self.w, context, eps=config.norm_eps, sees_a_slice=t > 1)
        self.proj = RowParallelLinear(
            f"{name}.proj",
            values,
            h,
            init=Init("normal", config.output_init_std),
            site=context.site(before=ATTENTION),
            **common,
        )

    @property
    def _channels(self) -> int:
        """Channels of the convolution on this rank."""
        return 2 * self.key_heads * self.d + self.value_heads * self.w

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        gates = linear(x_sbh, self.gates, self.gates_state)
        # Each rank's heads use it, so its gradient is their sum.
        share = gather_from_sequence_parallel if self.context.sequence_sharded else copy_to_tensor_parallel
        gates_sb2a = share(gates, self.context.tensor).unflatten(-1, (2, -1))
        gates_sb2a = gates_sb2a.narrow(-1, self.first_head, self.value_heads)
        qkv_sbn, z_sbc = self.projection(x_sbh).split([self._channels, self.value_heads * self.w], dim=-1)
        y_sbaw = self.run(inputs, qkv_sbn, gates_sb2a)
        return self.proj(gated_norm(y_sbaw, z_sbc, self.norm.weight, self.norm.eps))

    @property
    def _parts(self) -> tuple[Part, ...]:
        """What the convolution gives: queries, keys and values."""
        key = Part(self.key_heads, self.d, norm=True)
        return key, key, Part(self.value_heads, self.w)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.value_heads, self.d, self.w

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """From `[s, b, n]` and gates `[s, b, 2, a]` to `[s, b, a, w]`."""
        last_btn, state_badw = state
        (q, k, v, decay, beta), last_btn = self._operands(xs, last_btn, starts_sb)
        y_sbaw, state_badw = delta_rule(q, k, v, decay, beta, state_badw, starts_sb)
        return y_sbaw, (last_btn, state_badw)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, Tensor]:
        last_btn, zeros_badw = state
        (q, k, v, decay, beta), _ = self._operands(xs, last_btn, starts_sb)
        # The map is affine: from zero it gives U, and without values, from the identity, T.
        _, added = delta_rule(q, k, v, decay, beta, zeros_badw, starts_sb)
        identity = torch.eye(self.d, dtype=zeros_badw.dtype, device=q.device).expand(*zeros_badw.shape[:2], -1, -1)
        without = v.new_zeros(*v.shape[:3], self.d)
        _, transition = delta_rule(q, k, without, decay, beta, identity.contiguous(), starts_sb)
        return transition, added

    def _operands(
        self, xs: tuple[Tensor, ...], last_btn: Tensor, starts_sb: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """What the delta rule reads: q, k, v, decays and β; and the convolution's last inputs."""
        qkv_sbn, gates_sb2a = xs
        q, k, v = convolve_parts(qkv_sbn, self.convolution[:, 0], last_btn, starts_sb, self._parts)
        last_btn = last_inputs(qkv_sbn, last_btn.shape[1], last_btn, starts_sb)
        wide = torch.promote_types(qkv_sbn.dtype, torch.float32)
        beta_sba, decay_sba = gates_sb2a.to(wide).unbind(2)
        decay_sba = -self.log_rate.to(wide).exp() * F.softplus(decay_sba + self.decay_bias.to(wide))
        return (q, k, v, decay_sba, beta_sba.sigmoid()), last_btn

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        missing = missing_gated_delta_kernel(device, self.convolution.dtype, self.d, self.w)
        return "FlashQLA" if missing is None else f"PyTorch's operations, slow, as no kernel fits: {missing}"

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        m, e, values, heads = batch.tokens, batch.element, self.value_heads * self.w, self.gates.shape[0]
        high = self.projection.state.plan.saved == "high" and batch.tokens == batch.own_tokens
        return {
            "qkvz input": batch.saved_input(self.projection.state),
            "gates' input": 0 if high else batch.own_tokens * self.gates.shape[1] * e,
            "q, k, v, z": m * (self._channels + values) * e,
            "gates": m * heads * e,
            "states at the start": batch.sequences * (self.value_heads * self.d * self.w * 4 + self._channels * 3 * e),
            "recurrence output": m * values * e,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> Work:
        """Passes over queries, keys, values and chunks' matrices in fp32, and of convolution, norm and gate.

        Backward computes all of it once more, and moves as much again. Kernels are counted in a profile of `_compute`.
        """
        heads, chunks = self.value_heads, -(-batch.length // CHUNK)
        # Reads and writes of a channel: normalization, repetition, padding, copies of the operands of products, decays,
        # and the system of equations of a chunk; `CHUNK` numbers of each token are its row of a chunk's matrices.
        per_token = heads * (34 * self.d + 14 * self.w + 20 * CHUNK) + 14 * self.key_heads * self.d + self._channels
        wide = batch.tokens * per_token * max(4, batch.element)
        convolution = (7 + 5 * (self.convolution.shape[-1] - 1)) * self._channels
        moved = wide + batch.tokens * (convolution + 4 * heads * self.w) * batch.element
        return Work(moved, 2 * moved, kernels=60 + 19 * chunks, more_in_backward=100 + 36 * chunks)

    def flops(self, batch: MicroBatch) -> float:
        """Read for the key, write, read for the query, and the convolution."""
        return batch.tokens * (6.0 * self.value_heads * self.d * self.w + 2.0 * self.convolution.numel())

    def backward_bytes(self, batch: MicroBatch) -> int:
        """What is recomputed and its gradients: queries, keys, values and their like in fp32, and states of chunks."""
        element, heads = max(4, batch.element), self.value_heads
        chunks = batch.sequences * -(-batch.length // CHUNK)
        return element * (batch.tokens * heads * (10 * self.d + 8 * self.w) + 2 * chunks * heads * self.d * self.w)
