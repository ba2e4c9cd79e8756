"""Causal self-attention with grouped queries, its heads cut over the tensor-parallel group.

The core is `ops.attention`, or of sequences that are sharded over ranks `context_parallel.attention`; which it is and
what it masks, a layer is told.

q, k and v are one column-parallel product; the rows of its weight are [this rank's q heads | k heads | v heads], each
under its own global name.

Shapes: s sequence, b micro-batch, h hidden, a query heads, g key-value heads of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.config import AttentionConfig, ModelConfig
from megafp8.config.parts.attention import QueryScaling
from megafp8.distributed.sharding import Init, shard_dim
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.models.context import BuildContext, new_parameter
from megafp8.models.costs import AttentionWork, MicroBatch, Work, pairs_of
from megafp8.models.mixer import Mixer, TokenCache, Tokens
from megafp8.models.norms import Norm, ProjectionNorms, RMSNorm
from megafp8.models.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.models.rotary import RotaryEmbedding
from megafp8.numerics.attention_mask import AttentionMask
from megafp8.numerics.attention_scores import AttentionDropout, Scores, alibi_slopes
from megafp8.ops import attention
from megafp8.ops.attention import CoreAttention
from megafp8.ops.rotary import rotate_and_split, rotate_heads
from megafp8.philox import Key, key_of
from megafp8.plan import Neighbor
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

ATTENTION = Neighbor("attention", "none", "attention kernels read and write bf16")
ROTARY = Neighbor("rotary embedding", "per_tensor")


@dataclass(frozen=True)
class ProbabilityDropout:
    """A layer's dropout of attention probabilities. `first_head`: the first of this rank's heads."""

    p: float
    key: Key
    first_head: int

    @classmethod
    def build(cls, name: str, p: float, heads: int, context: BuildContext) -> ProbabilityDropout:
        """That of the attention layer `name`, which has `heads` heads on all tensor-parallel ranks."""
        key = key_of(context.seed, name, "attention_dropout")
        return cls(p, key, context.tensor.rank() * (heads // context.tensor.size()))

    def added_to(self, scores: Scores, samples_b: Tensor | None) -> Scores:
        """`scores` with it, for samples with these indices in the run; None: no dropout."""
        if samples_b is None or not self.p:
            return scores
        return replace(scores, dropout=AttentionDropout(self.p, self.key, samples_b, self.first_head))


@dataclass(frozen=True)
class AttentionInputs:
    """What attention reads: rotary tables (None without), how tokens reach each other, how scores are computed.

    `query_scale_sb11`: what queries are multiplied by, `[s, 1 or b, 1, 1]`; None: nothing.
    """

    rotary: tuple[Tensor, Tensor] | None
    core: CoreAttention
    scores: Scores
    query_scale_sb11: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        given = (self.scores.distance_bias_ar, self.dropped_samples, self.query_scale_sb11)
        return [*(self.rotary or ()), *self.core.tensors, *(x for x in given if x is not None)]

    @property
    def dropped_samples(self) -> Tensor | None:
        """Indices of the samples whose probabilities have dropout."""
        return None if self.scores.dropout is None else self.scores.dropout.sample_b


def new_largest_logits(context: BuildContext, heads: int) -> Tensor | None:
    """`Mixer.largest_logits_a` of so many heads."""
    if not context.records_logits:
        return None
    wide = torch.promote_types(context.dtype, torch.float32)
    return torch.zeros(heads, dtype=wide, device=context.buffer_device)


def recording(scores: Scores, largest_a: Tensor | None) -> Scores:
    """`scores` that record the largest ones where gradients are computed."""
    return replace(scores, largest_a=largest_a) if largest_a is not None and torch.is_grad_enabled() else scores


def query_scale(scaling: QueryScaling | None, tokens: Tokens, dtype: torch.dtype) -> Tensor | None:
    """What queries are multiplied by, `[s, 1 or b, 1, 1]`; None: nothing."""
    if scaling is None:
        return None

    def table() -> Tensor:
        steps = (tokens.positions + scaling.first_position) // scaling.length
        scale = 1 + scaling.factor * steps.double().log1p()
        scale_sb = scale.unsqueeze(-1) if scale.dim() == 1 else scale.transpose(0, 1)
        return scale_sb[..., None, None].to(dtype)

    return tokens.once(("query scale", repr(scaling)), table)


class Attention(Mixer):
    """Softmax attention with grouped queries."""

    def __init__(
        self,
        name: str,
        record: AttentionConfig,
        config: ModelConfig,
        context: BuildContext,
        *,
        input: Neighbor,
        memory: BlockMemory = KEEP_ALL,
    ) -> None:
        super().__init__()
        self.name, self.record, self.context, self.recompute = name, record, context, memory.attention
        t, d = context.tensor.size(), record.channels
        q_size, kv_size = record.num_attention_heads * d, record.groups * d
        parts = {"q": q_size, "k": kv_size, "v": kv_size} | ({"gate": q_size} if record.output_gate else {})
        self.split = [width // t for width in parts.values()]
        self.heads, self.groups, self.d = q_size // t // d, kv_size // t // d, d
        self.largest_logits_a = new_largest_logits(context, self.heads)
        common = context.linear_options()
        has_rotary = record.position_embedding == "rope"
        rotates = has_rotary and not record.qk_norm and not record.output_gate
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            config.hidden_size,
            sum(parts.values()),
            parts={f"{name}.{part}": width for part, width in parts.items()},
            bias=config.linear_bias or record.qkv_bias,
            init=Init("normal", config.hidden_init_std),
            site=context.site(before=input, after=ROTARY if rotates else ATTENTION, recompute_input=memory.norms),
            **common,
        )
        self.rotates, self.causal = rotates, config.causal
        self.rope = RotaryEmbedding(record, record.rotary_channels, d, context) if has_rotary else None
        self.proj = RowParallelLinear(
            f"{name}.proj",
            q_size,
            config.hidden_size,
            bias=config.linear_bias,
            init=Init("normal", config.output_init_std),
            site=context.site(before=ATTENTION),
            **common,
        )
        self.dropout = ProbabilityDropout.build(name, config.attention_dropout, record.num_attention_heads, context)
        self.sink: nn.Parameter | None = None
        if record.attention_sinks:
            shard = shard_dim(f"{name}.sink.weight", (record.num_attention_heads,), 0, context.tensor.rank(), t)
            self.sink = new_parameter(context, [shard], Init("zeros"), replicated_over_tp=False, weight_decay=False)
        self.norms_rotated, self.norm_eps = record.qk_norm == "rotated", config.norm_eps
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self.qk_norms: ProjectionNorms | None = None
        if record.qk_norm == "projection":
            self.qk_norms = ProjectionNorms(
                name, q_size, kv_size, context, config.norm_eps, zero_centered=config.zero_centered_gamma
            )
        elif record.qk_norm is True:
            norm: dict[str, Any] = {
                "eps": config.norm_eps,
                "sees_a_slice": t > 1,
                "zero_centered": config.zero_centered_gamma,
            }
            self.q_norm = RMSNorm(f"{name}.q_norm", d, context, **norm)
            self.k_norm = RMSNorm(f"{name}.k_norm", d, context, **norm)

    @property
    def input_format(self) -> InputFormat | None:
        return self.qkv.state.input_format

    def scores(self, tokens: int, learned_bias_ar: Tensor | None = None) -> Scores:
        """How scores of whole sequences of so many tokens are computed, without dropout."""
        record = self.record
        bias_ar = self._alibi_bias(tokens) if record.position_embedding == "alibi" else learned_bias_ar
        return Scores(record.attention_scale, record.attention_softcap, bias_ar)

    def _alibi_bias(self, s: int) -> Tensor:
        """`Scores.distance_bias_ar` of this rank's heads, `[a, 2s - 1]`, fp32 or wider."""
        context, heads = self.context, self.record.num_attention_heads
        key = ("alibi", heads, s)
        if key not in context.constants:
            options: dict[str, Any] = {
                "dtype": torch.promote_types(context.dtype, torch.float32), "device": context.buffer_device,
            }  # fmt: skip
            slopes_a = torch.tensor(alibi_slopes(heads)[context.tensor.rank() * self.heads :][: self.heads], **options)
            context.constants[key] = slopes_a.unsqueeze(1) * torch.arange(1 - s, s, **options)
        return context.constants[key]

    def inputs(self, layer: int, tokens: Tokens) -> AttentionInputs:
        scores = self.dropout.added_to(self.scores(tokens.length, tokens.distance_bias_ar), tokens.samples_b)
        scores = recording(scores, self.largest_logits_a)
        core = tokens.attention(
            layer, self.record.sliding_window, causal=self.causal, positions=scores.depend_on_positions,
            chunk=self.record.attention_chunk,
        )  # fmt: skip
        scale = query_scale(self.record.query_scaling, tokens, self.context.dtype)
        return AttentionInputs(None if self.rope is None else tokens.rotary(self.rope), core, scores, scale)

    def row_factors(self, factor_a: Tensor) -> dict[str, Tensor]:
        # Heads that share a key share a factor, the least.
        root_g = factor_a.unflatten(0, (self.record.groups, -1)).amin(1).sqrt()
        rows = {
            "q": root_g.repeat_interleave(len(factor_a) // len(root_g) * self.d), "k": root_g.repeat_interleave(self.d)
        }  # fmt: skip
        return {f"{self.name}.{part}.{kind}": x for part, x in rows.items() for kind in ("weight", "bias")}

    @property
    def cache(self) -> tuple[TokenCache]:
        return (TokenCache(self.groups, self.d, self.d),)

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        scores = self.scores(length)
        if self.dropout.p:
            scores = replace(scores, dropout=AttentionDropout(self.dropout.p, (0, 0), torch.zeros(1)))
        if prefix:
            return attention.describe(device, AttentionMask(prefix_b=torch.zeros(1)), scores)
        chunks = self.record.attention_chunk is not None
        if documents or chunks or self.record.sliding_window is not None or not scores.only_scales:
            return attention.describe(device, scores=scores)
        return None

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        m, e, a, g = batch.tokens, batch.element, self.heads, self.groups
        saved = {"qkv input": batch.saved_input(self.qkv.state), "q, k, v, gate": m * sum(self.split) * e}
        # it is the projection's input, too
        shares_output = self.proj.state.plan.saved == "high" and not self.record.output_gate
        if not self.recompute or shares_output:
            saved["attention output"] = m * a * self.d * e
        if not self.recompute:
            saved["attention log-sums"] = m * a * batch.statistic
            if self.qk_norms is not None:
                saved["q and k after their norms"] = m * ((a + g) * self.d * e + 2 * batch.statistic)
            elif self.q_norm is not None or self.norms_rotated:
                saved["q and k before and after their norms"] = m * (a + g) * (2 * self.d * e + batch.statistic)
        in_place = self.q_norm is None and self.qk_norms is None and not self.norms_rotated
        if self.record.query_scaling is not None and in_place and (self.rotates or not self.recompute):
            saved["scaled q"] = m * a * self.d * e
        if not shares_output:
            saved["proj input"] = batch.saved_input(self.proj.state)
        return saved

    def work(self, batch: MicroBatch) -> Work:
        """Norms and rotation of queries and keys."""
        channels = batch.tokens * (self.heads + self.groups) * self.d
        if self.qk_norms is not None:  # by separate kernels in fp32
            rotation = 2 * channels * batch.element
            return Work(rotation + 56 * channels, rotation + 96 * channels)
        normed = self.q_norm is not None or self.norms_rotated
        passes = int(self.rope is not None or normed) * (2 if normed else 1)
        moved = 2 * passes * channels * batch.element
        if self.record.query_scaling is not None:
            moved += 2 * batch.tokens * self.heads * self.d * batch.element
        gated = int(self.record.output_gate) * batch.tokens * self.heads * self.d * batch.element
        return Work(moved + 4 * gated, moved + 10 * gated)  # in two kernels, and four after these again

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        record = self.record
        pairs = pairs_of(batch.length, record.sliding_window, causal=self.causal, chunk=record.attention_chunk)
        modified = record.attention_softcap is not None or record.attention_sinks
        modified = modified or record.position_embedding == "alibi"
        return [AttentionWork(self.heads, self.d, self.d, batch.length, pairs, modified)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        return 2 * batch.tokens * self.groups * self.d * batch.element

    def forward(self, x_sbh: Tensor | LinearInput, inputs: AttentionInputs) -> Tensor:
        rotary, core, scores, scale = inputs.rotary, inputs.core, inputs.scores, inputs.query_scale_sb11
        if self.rotates:
            assert rotary is not None
            handoff = self.qkv.state.grad_handoff()
            q, k, v = rotate_and_split(self.qkv(x_sbh, handoff), self.heads, self.groups, *rotary, handoff)
            q = q if scale is None else q * scale
            return self.proj(self._run(core, q, k, v, self.sink, scores).flatten(-2))
        return self.proj(self._run(self._attend, self.qkv(x_sbh), rotary, core, scores, scale))

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return recomputed(function, *inputs) if self.recompute else function(*inputs)

    def _attend(
        self, qkv_sbc: Tensor, rotary: tuple[Tensor, Tensor] | None, core: CoreAttention, scores: Scores,
        scale_sb11: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention of packed heads [q | k | v], or [q | k | v | gate], normed, rotated and scaled where the model has
        that."""
        q, k, v, *gate = (part.unflatten(-1, (-1, self.d)) for part in qkv_sbc.split(self.split, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_norms is not None:
            q, k = self.qk_norms(q, k)
        if rotary is not None:
            q, k = rotate_heads(q, *rotary), rotate_heads(k, *rotary)
        if self.norms_rotated:
            q, k = (F.rms_norm(x, (self.d,), eps=self.norm_eps) for x in (q, k))
        q = q if scale_sb11 is None else q * scale_sb11
        y = core(q, k, v, self.sink, scores)
        return (recomputed(_gated, y, *gate) if gate else y).flatten(-2)


def _gated(y: Tensor, gate: Tensor) -> Tensor:
    return y * gate.sigmoid()
