"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values come from small latents.

    down    h -> query latent, key-value latent, rotary key     one product, whole on every tensor-parallel rank
    q_up    norm of the query latent -> the heads' queries      column-parallel
    kv_up   norm of the key-value latent -> keys and values     column-parallel

Without a query latent, q is a column-parallel product of the residual stream's norm, as in other attention.

A head's query and key have two parts: one without positions, and a rotary part with a key that all heads share. As in
DeepSeek's models, the rotated pairs are neighboring channels. Without rotary embedding (Kimi Linear) nothing is
rotated, and the shared part of the keys remains. `megafp8.layers.latent_attention.op` computes q, k and v from the
projections. Values may be narrower than keys.

The latents are sharded along the sequence like the residual stream; the rotary key is gathered. `down` stays in high
precision, because it has few outputs.

Shapes: s sequence, b micro-batch, h hidden, a heads of this rank; n channels of a head without positions, r rotary
channels, v channels of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from megafp8.layers.attention.module import (
    AttentionInputs,
    ProbabilityDropout,
    new_largest_logits,
    query_scale,
    recording,
)
from megafp8.layers.attention.op import CoreAttention
from megafp8.layers.attention.scores import Scores
from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_product
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, pairs_of
from megafp8.layers.latent_attention.op import latent_heads
from megafp8.layers.latent_attention.record import LatentMixerConfig, LatentRecord
from megafp8.layers.mixer import Mixer, TokenCache, Tokens
from megafp8.layers.norm.module import RMSNormPart, rms_norm
from megafp8.layers.recompute import recomputed
from megafp8.layers.rotary.module import RotaryEmbedding
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.layers import ColumnParallelLinear
from megafp8.plan import Neighbor


class LatentAttention(Mixer):
    """Multi-head latent attention.

    It reads the norm's unquantized output, even if `input` could quantize it.
    """

    #: Reason why a subclass reads the latents' values, not only their FP8 data in products; it then has no `kv_up`.
    reads_latents: ClassVar[str] = ""

    def __init__(self, build: PartBuild[LatentRecord]) -> None:
        super().__init__()
        name, record, model, context = build.name, build.record, build.model, build.context
        heads = record.num_attention_heads
        self.name, self.context, self.recompute = name, context, build.memory.attention
        self.window = record.sliding_window if isinstance(record, LatentMixerConfig) else None
        rotates = record.position_embedding != "none"
        self.rope = RotaryEmbedding(record, record.rope_head_dim, None, context) if rotates else None
        self.heads = heads // context.tensor.size()
        self.largest_logits_a = new_largest_logits(context, self.heads)
        self.n, self.r, self.v = record.nope_head_dim, record.rope_head_dim, record.value_head_dim
        self.ranks = [record.q_rank or 0, record.kv_rank, self.r]
        self.dropout = ProbabilityDropout.build(name, model.attention_dropout, heads, context)
        self.causal, self.query_scaling = model.causal, record.query_scaling
        self.score_factor = record.score_factor
        down = {"kv_down": record.kv_rank + self.r}
        if record.q_rank is not None:
            down = {"q_down": record.q_rank} | down
        self.down, self.down_state = replicated_product(
            context, name, "down", down, model.hidden_size, init=Init("normal", model.hidden_init_std),
            reason="latents are few and stay in training.precision",
        )  # fmt: skip
        self.q_norm: RMSNormPart | None = None
        if record.q_rank is not None:
            self.q_norm = rms_norm(f"{name}.q_norm", record.q_rank, model, context, eps=record.eps)
        self.kv_norm = rms_norm(f"{name}.kv_norm", record.kv_rank, model, context, eps=record.eps)

        def up(layer: str, norm: Neighbor, rank: int, *widths: int) -> ColumnParallelLinear:
            rows, head_rows = {layer: heads * sum(widths)}, {f"{name}.{layer}": widths}
            return build.column(layer, rows, before=norm, inputs=rank, heads=head_rows)

        q_norm = Neighbor("q_norm", "none", self.reads_latents) if self.reads_latents else Neighbor("q_norm", "any")

        if record.q_rank is None:
            before = Neighbor("attention_norm", "none", "the latents are computed from the norm's output too")
            self.q_up = up("q", before, model.hidden_size, self.n + self.r)
        else:
            self.q_up = up("q_up", q_norm, record.q_rank, self.n + self.r)
        if not self.reads_latents:
            self.kv_up = up("kv_up", Neighbor("kv_norm", "any"), record.kv_rank, self.n, self.v)
        self.proj = build.row(heads * self.v)

    @property
    def _latents(self) -> list[int]:
        """Widths of the latents."""
        return [rank for rank in self.ranks[:2] if rank]

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the layer saves for backward, by tensor."""
        m, e, a, d = batch.tokens, batch.element, self.heads, self.n + self.r
        q_up, kv_up, proj = self.q_up.state, self.kv_up.state, self.proj.state
        # Without a query latent, q is computed from the latents' input.
        shares_input = self.q_norm is None and q_up.plan.saved == "high" and m == batch.own_tokens
        saved = {
            "latents' input": batch.own_tokens * self.down_state.site.inputs * e,
            "latents": batch.own_tokens * sum(self._latents) * e,
            "statistics of their norms": len(self._latents) * batch.own_tokens * batch.statistic,
            "up inputs": batch.saved_input(kv_up) + (0 if shares_input else batch.saved_input(q_up)),
        }
        head_width = 2 * d + self.v
        if self.recompute:  # only the projections and the rotary key of all heads
            head_width = d + self.n + self.v
            saved["rotary key"] = m * self.r * e
        saved["q, k, v"] = m * a * head_width * e
        shares_output = proj.plan.saved == "high"
        if not self.recompute or shares_output:
            saved["attention output"] = m * a * self.v * e
        if not self.recompute:
            saved["attention log-sums"] = m * a * batch.statistic
        if not shares_output:
            saved["proj input"] = batch.saved_input(proj)
        return saved

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the bytes of the projections' outputs, read once, and of q, k and v, written once.

        Backward moves the same number of bytes.
        """
        projected = self.heads * (2 * self.n + self.r + self.v) + self.r
        moved = batch.tokens * (projected + self.heads * (2 * (self.n + self.r) + self.v)) * batch.element
        return KernelWork(moved, moved)

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the size of the layer's softmax attention."""
        pairs = pairs_of(batch.length, self.window, causal=self.causal)
        return [AttentionWork(self.heads, self.n + self.r, self.v, batch.length, pairs, modified=False)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of this rank's keys and values."""
        return batch.tokens * self.heads * (self.n + self.r + self.v) * batch.element

    def inputs(self, layer: int, tokens: Tokens) -> AttentionInputs:
        """Return the layer's rotary tables, attention core and score settings for these tokens."""
        scores = self.dropout.added_to(Scores(batch_invariant=self.context.batch_invariant), tokens.samples_b)
        scores = recording(scores, self.largest_logits_a)
        core = tokens.attention(layer, self.window, causal=self.causal, positions=scores.depend_on_positions)
        scale = query_scale(self.query_scaling, tokens, self.context.dtype)
        return AttentionInputs(None if self.rope is None else tokens.rotary(self.rope), core, scores, scale)

    def row_factors(self, factor_a: Tensor) -> dict[str, Tensor]:
        """Return the factors of the weight rows of queries and keys for QK-Clip."""
        # All heads share the rotary key, so it stays, and the rotary part of queries takes the whole factor.
        parts = {
            "q" if self.q_norm is None else "q_up": ((factor_a.sqrt(), self.n), (factor_a, self.r)),
            "kv_up": ((factor_a.sqrt(), self.n), (torch.ones_like(factor_a), self.v)),
        }
        return {
            f"{self.name}.{part}.weight": torch.cat([x[:, None].expand(-1, n) for x, n in head_part], dim=1).flatten()
            for part, head_part in parts.items()
        }

    @property
    def cache(self) -> tuple[TokenCache]:
        """Layout of the cached keys and values."""
        return (TokenCache(self.heads, self.n + self.r, self.v),)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: AttentionInputs) -> Tensor:
        """Return the attention output after the projection, `[s, b, h]`, for the normalized residual stream `x_sbh`."""
        q, kv, k_rotary = linear(x_sbh, self.down, self.down_state).split(self.ranks, dim=-1)
        q_sbc = self.q_up(x_sbh) if self.q_norm is None else self._up(q, self.q_norm, self.q_up)
        kv_sbc = self._up(kv, self.kv_norm, self.kv_up)
        # The heads of every rank use the rotary key, so its gradient is a sum over ranks.
        k_rotary_sbr = self.shared(k_rotary.contiguous())
        parts = q_sbc, kv_sbc, k_rotary_sbr, inputs.rotary, inputs.core, inputs.scores, inputs.query_scale_sb11
        return self.proj(self._run(self._attend, *parts).flatten(-2))

    @staticmethod
    def _up(latent: Tensor, norm: RMSNormPart, up: ColumnParallelLinear) -> Tensor:
        _, normed = norm.residual(latent.contiguous(), None, up.state.input_format)
        return up(normed)

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return recomputed(function, *inputs) if self.recompute else function(*inputs)

    def _attend(
        self, q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: tuple[Tensor, Tensor] | None,
        core: CoreAttention, scores: Scores, scale_sb11: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the attention output `[s, b, a, v]`."""
        q, k, v = latent_heads(q_sbc, kv_sbc, k_rotary_sbr, rotary, self.heads, self.score_factor)
        q = q if scale_sb11 is None else q * scale_sb11
        return core(q, k, v, None, scores)
