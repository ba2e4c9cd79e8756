"""Causal self-attention with grouped queries, with heads sharded over the tensor-parallel group.

The core is `layers.attention.op`, or `layers.attention.context_parallel` if sequences are sharded over ranks. The layer
receives the core together with its mask (`Tokens.attention`).

One column-parallel product computes q, k and v. The rows of its weight are [this rank's q heads | k heads | v heads],
and each part has its own global name. If keys serve as values, there are no v heads. If a layer reads the keys and
values of an earlier layer, there are only q heads. `SharedTensors` keeps shared keys and values for a micro-batch.

Shapes: s sequence, b micro-batch, h hidden, a query heads, g key-value heads of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.config import AttentionConfig
from megafp8.layers.attention import op as attention
from megafp8.layers.attention.mask import CAUSAL, AttentionMask
from megafp8.layers.attention.op import CoreAttention
from megafp8.layers.attention.record import QueryScaling
from megafp8.layers.attention.scores import AttentionDropout, Scores, alibi_slopes
from megafp8.layers.build import ATTENTION, PartBuild
from megafp8.layers.context import BuildContext
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, pairs_of
from megafp8.layers.mixer import Mixer, SharedTensors, TokenCache, Tokens
from megafp8.layers.norm.module import Norm, ProjectionNorms, rms_norm
from megafp8.layers.recompute import recomputed
from megafp8.layers.rotary.module import RotaryEmbedding
from megafp8.layers.rotary.op import QKNorms, rotate_and_split, rotate_heads
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.numerics.batch_invariance import sigmoid, softplus
from megafp8.numerics.philox import Key, key_of
from megafp8.parallel.sharding import Init
from megafp8.plan import Neighbor

ROTARY = Neighbor("rotary embedding", "per_tensor")


@dataclass(frozen=True)
class ProbabilityDropout:
    """Dropout of one layer's attention probabilities.

    Attributes:
        p: Probability of dropping.
        key: Philox key of the layer.
        first_head: Index of this rank's first head among the heads of all tensor-parallel ranks.
    """

    p: float
    key: Key
    first_head: int

    @classmethod
    def build(cls, name: str, p: float, heads: int, context: BuildContext) -> ProbabilityDropout:
        """Return the dropout of the attention layer `name` with `heads` heads on all tensor-parallel ranks together."""
        key = key_of(context.seed, name, "attention_dropout")
        return cls(p, key, context.tensor.rank() * (heads // context.tensor.size()))

    def added_to(self, scores: Scores, samples_b: Tensor | None) -> Scores:
        """Return `scores` with this dropout for the samples with these indices in the run; None turns off dropout."""
        if samples_b is None or not self.p:
            return scores
        return replace(scores, dropout=AttentionDropout(self.p, self.key, samples_b, self.first_head))


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of an attention layer in addition to the residual stream.

    Attributes:
        rotary: Rotary cosines and sines; None without rotary embedding.
        core: Function that computes softmax attention over the tokens.
        scores: Settings that turn q·k into scores.
        query_scale_sb11: Factors of the queries, `[s, 1 or b, 1, 1]`; None means no scaling.
        shared: Keys and values that the layer reads from an earlier layer or provides to later layers; None if it does
            neither.
    """

    rotary: tuple[Tensor, Tensor] | None
    core: CoreAttention
    scores: Scores
    query_scale_sb11: Tensor | None = None
    shared: SharedTensors | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among these inputs."""
        optional = (self.scores.distance_bias_ar, self.dropped_samples, self.query_scale_sb11)
        return [*(self.rotary or ()), *self.core.tensors, *(x for x in optional if x is not None)]

    @property
    def dropped_samples(self) -> Tensor | None:
        """Indices of the samples with dropout of attention probabilities; None without dropout."""
        return None if self.scores.dropout is None else self.scores.dropout.sample_b


def new_largest_logits(context: BuildContext, heads: int) -> Tensor | None:
    """Return a zero buffer for `Mixer.largest_logits_a` of `heads` heads, or None if logits are not recorded."""
    if not context.records_logits:
        return None
    wide = torch.promote_types(context.dtype, torch.float32)
    return torch.zeros(heads, dtype=wide, device=context.buffer_device)


def recording(scores: Scores, largest_a: Tensor | None) -> Scores:
    """Return `scores` that also record the largest logits in `largest_a`, if gradients are computed."""
    return replace(scores, largest_a=largest_a) if largest_a is not None and torch.is_grad_enabled() else scores


def query_scale(scaling: QueryScaling | None, tokens: Tokens, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of the queries, `[s, 1 or b, 1, 1]`, or None without query scaling."""
    if scaling is None:
        return None

    def table() -> Tensor:
        steps = (tokens.positions + scaling.first_position) // scaling.length
        scale = 1 + scaling.factor * steps.double().log1p()
        scale_sb = scale.unsqueeze(-1) if scale.dim() == 1 else scale.transpose(0, 1)
        return scale_sb[..., None, None].to(dtype)

    return tokens.once(("query scale", repr(scaling)), table)


class Attention(Mixer):
    """Softmax attention with grouped queries; if `adapted`, of two inputs side by side, with a term of the layer."""

    def __init__(self, build: PartBuild[AttentionConfig], *, adapted: bool = False) -> None:
        super().__init__()
        name, record, model, context = build.name, build.record, build.model, build.context
        self.name, self.record, self.context, self.recompute = name, record, context, build.memory.attention
        t, d = context.tensor.size(), record.channels
        q_size, kv_size = record.num_attention_heads * d, record.groups * d
        gates = record.num_attention_heads if record.output_gate == "head" else q_size
        widths = {"q": q_size, "k": kv_size, "v": kv_size, "gate": gates}
        parts = {part: widths[part] for part in record.projected}
        self.split = {part: width // t for part, width in parts.items()}
        self.reads_keys = record.kv_layer is not None
        self.is_read = model.layers[int(name.split(".")[1])].is_read
        self.heads, self.groups, self.d = q_size // t // d, kv_size // t // d, d
        self.largest_logits_a = new_largest_logits(context, self.heads)
        has_rotary = record.position_embedding == "rope"
        plain = [*parts] == ["q", "k", "v"] and not (self.is_read or adapted)
        self.norms_rotated, self.norms_last = record.qk_norm == "rotated", record.qk_norm == "after_rotation"
        rotates = has_rotary and plain and not (record.value_norm or self.norms_last)
        if rotates and self.norms_rotated:  # a rotation keeps a head's norm unless the tables contain a factor
            scaled = record.yarn or record.longrope
            rotates = scaled is None or scaled.rotated_factor == 1
        self.qkv = build.column(
            "qkv", parts, after=ROTARY if rotates else ATTENTION, inputs=(1 + adapted) * model.hidden_size,
            heads={f"{name}.{part}": (d,) for part in "qkv"}, bias=model.attention_bias or record.qkv_bias,
        )  # fmt: skip
        self.input_linear = self.qkv.state
        self.rotates, self.causal = rotates, model.causal
        self.rope = RotaryEmbedding(record, record.rotary_channels, d, context) if has_rotary else None
        self.proj = build.row(q_size, bias=model.attention_bias or record.proj_bias)
        self.dropout = ProbabilityDropout.build(name, model.attention_dropout, record.num_attention_heads, context)
        self.sink: nn.Parameter | None = None
        if record.attention_sinks:
            self.sink = build.parameter("sink.weight", Init("zeros"), record.num_attention_heads)
        self.norm_eps = model.norm.eps
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self.qk_norms: ProjectionNorms | None = None
        if record.qk_norm == "projection":
            self.qk_norms = ProjectionNorms(
                name, q_size, kv_size, context, model.norm.eps, zero_centered=model.norm.zero_centered
            )
        elif record.qk_norm is True or self.norms_last:
            norm = partial(rms_norm, size=d, model=model, context=context, sees_a_slice=t > 1)
            self.q_norm = norm(f"{name}.q_norm")
            self.k_norm = None if self.reads_keys else norm(f"{name}.k_norm")

    def scores(self, tokens: int, learned_bias_ar: Tensor | None = None) -> Scores:
        """Return how scores of whole sequences of `tokens` tokens are computed, without dropout."""
        record = self.record
        bias_ar = self._alibi_bias(tokens) if record.position_embedding == "alibi" else learned_bias_ar
        invariant = self.context.batch_invariant
        return Scores(record.attention_scale, record.attention_softcap, bias_ar, batch_invariant=invariant)

    def _alibi_bias(self, s: int) -> Tensor:
        """Return `Scores.distance_bias_ar` of this rank's heads, `[a, 2s - 1]`, fp32 or wider."""
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
        """Return the rotary tables, attention core, score settings and shared keys and values for these tokens."""
        scores = self.dropout.added_to(self.scores(tokens.length, tokens.distance_bias_ar), tokens.samples_b)
        scores = recording(scores, self.largest_logits_a)
        source = layer if self.record.kv_layer is None else self.record.kv_layer
        core = tokens.attention(
            source, self.record.sliding_window, causal=self.causal, positions=scores.depend_on_positions,
            chunk=self.record.attention_chunk, stores=not self.reads_keys,
        )  # fmt: skip
        scale = query_scale(self.record.query_scaling, tokens, self.context.dtype)
        rotary = None if self.rope is None else tokens.rotary(self.rope)
        shares = self.reads_keys or self.is_read
        shared = tokens.once(("keys and values", source), SharedTensors) if shares else None
        return AttentionInputs(rotary, core, scores, scale, shared)

    def row_factors(self, factor_a: Tensor) -> dict[str, Tensor]:
        """Return the factors of the rows of q and k for QK-Clip: the square root of each head's factor."""
        # Query heads that share a key head share a factor: the smallest one.
        root_g = factor_a.unflatten(0, (self.record.groups, -1)).amin(1).sqrt()
        rows = {
            "q": root_g.repeat_interleave(len(factor_a) // len(root_g) * self.d), "k": root_g.repeat_interleave(self.d)
        }  # fmt: skip
        return {f"{self.name}.{part}.{kind}": x for part, x in rows.items() for kind in ("weight", "bias")}

    @property
    def cache(self) -> tuple[TokenCache, ...]:
        """Layout of the cached keys and values; empty if the layer reads the keys of another layer."""
        return () if self.reads_keys else (TokenCache(self.groups, self.d, self.d),)

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Describe the attention kernel; return None for plain causal attention on a CPU."""
        scores = self.scores(length)
        if self.dropout.p:
            scores = replace(scores, dropout=AttentionDropout(self.dropout.p, (0, 0), torch.zeros(1)))
        parts = documents or self.record.attention_chunk is not None or self.record.sliding_window is not None
        mask = attention.DOCUMENTS if parts else CAUSAL
        if prefix:
            mask = AttentionMask(prefix_b=torch.zeros(1))
        if mask is CAUSAL and scores.only_scales and device.type != "cuda":
            return None
        return attention.describe(device, mask, scores, self.d)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the layer saves for backward, by tensor."""
        m, e, a = batch.tokens, batch.element, self.heads
        saved = {"qkv input": batch.saved_input(self.qkv.state)}
        kept = self.rotates and not (self.record.qk_norm and self.recompute)
        if self.rotates or self.recompute:
            saved["q, k, v, gate"] = m * sum(self.split.values()) * e
        if kept and self.record.qk_norm:
            saved["q and k after norms"] = m * (a + self.groups) * (self.d * e + batch.statistic)
        if kept and self.record.query_scaling is not None:
            saved["scaled q"] = m * a * self.d * e
        # The attention output is also the input of the output projection.
        shares_output = self.proj.state.plan.saved == "high" and not self.record.output_gate
        if not self.recompute or shares_output:
            saved["attention output"] = m * a * self.d * e
        if not self.recompute:
            saved["attention log-sums"] = m * a * batch.statistic
            saved |= {} if self.rotates else self._saved_heads(batch)
        elif self.is_read:
            saved |= self.kept(batch)
        if not shares_output:
            saved["proj input"] = batch.saved_input(self.proj.state)
        return saved

    def kept(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes of the keys and values that later layers read."""
        return {"k and v for other layers": 2 * batch.tokens * self.groups * self.d * batch.element * self.is_read}

    def _saved_heads(self, batch: MicroBatch) -> dict[str, int]:
        """Return the saved bytes of heads that are not rotated in place.

        These are inputs and results of norms and copies, and the packed heads if an operation reads them in backward.
        """
        m, e, record, read = batch.tokens, batch.element, self.record, self.is_read
        q, k, v = self.heads, 0 if self.reads_keys else self.groups, self.groups if "v" in self.split else 0
        normed, projection = self.q_norm is not None or self.norms_rotated, self.qk_norms is not None
        changed = normed or projection or self.rope is not None
        # torch's norm keeps its input, which is a view of the packed heads unless rotation precedes the norm, and heads
        # before they are multiplied by weights.
        by_torch = self.q_norm is not None and not self.q_norm.zero_centered
        rotated_first = self.norms_last and self.rope is not None
        before = (q + k) * (normed + (by_torch and rotated_first))
        before += k * (record.keys_as_values and (by_torch or self.q_norm is None or rotated_first))
        after = q * (changed or record.query_scaling is not None)
        after += k * (changed or (read and not record.keys_as_values)) + k * record.value_norm
        after += v * (read and not record.value_norm)
        statistics = (q + k) * normed + k * record.value_norm + 2 * projection
        packed = (by_torch and not rotated_first) or projection or not changed or record.output_gate
        packed = bool(packed or (v > 0 and (record.value_norm or not read)))
        return {
            "q, k, v, gate": m * sum(self.split.values()) * e * packed,
            "heads before and after norms": m * ((before + after) * self.d * e + statistics * batch.statistic),
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the traffic of norms and rotation of queries and keys, norms of values, sinks, and the output gate."""
        m, e, d = batch.tokens, batch.element, self.d
        outputs = m * self.heads * d * self.record.attention_sinks
        return KernelWork(2 * outputs * e, 2 * outputs * e) + self._work_on_heads(batch)

    def _work_on_heads(self, batch: MicroBatch) -> KernelWork:
        m, e, d = batch.tokens, batch.element, self.d
        channels = m * (self.heads + (0 if self.reads_keys else self.groups)) * d
        scaled = 2 * m * self.heads * d * e * (self.record.query_scaling is not None)
        if self.rotates and self.record.qk_norm:  # backward also reads the norms' inputs, for the sums and for the cast
            sums = channels * e * (self.qk_norms is not None)
            return KernelWork(2 * channels * e + sums + scaled, 5 * channels * e + scaled)
        if self.qk_norms is not None:  # by separate kernels in fp32
            rotation = 2 * channels * e
            return KernelWork(rotation + 56 * channels, rotation + 96 * channels)
        normed = self.q_norm is not None or self.norms_rotated
        passes = int(self.rope is not None or normed) * (2 if normed else 1)
        moved = 2 * passes * channels * e
        if self.record.value_norm and not self.reads_keys:
            moved += 2 * m * self.groups * d * e
        moved += scaled
        gated = bool(self.record.output_gate) * m * self.heads * d * e
        return KernelWork(moved + 4 * gated, moved + 10 * gated)  # two kernels; backward repeats them and adds four

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the sizes of the layer's softmax attention."""
        record = self.record
        pairs = pairs_of(batch.length, record.sliding_window, causal=self.causal, chunk=record.attention_chunk)
        modified = record.attention_softcap is not None or record.position_embedding == "alibi"
        return [AttentionWork(self.heads, self.d, self.d, batch.length, pairs, modified)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of this rank's keys and values."""
        return 2 * batch.tokens * self.groups * self.d * batch.element

    def forward(self, x_sbh: Tensor | LinearInput, inputs: AttentionInputs) -> Tensor:
        """Return the attention output after the projection, `[s, b, h]`, for the normalized residual stream `x_sbh`."""
        if not self.rotates:
            return self.adapted(x_sbh, inputs, None)
        handoff = self.qkv.state.grad_handoff()
        qkv_sbc = self.qkv(x_sbh, handoff)
        if self.record.qk_norm:  # recompute the norms' outputs, too
            return self.proj(self._run(self._attend_rotated, qkv_sbc, inputs, handoff))
        heads = self._rotated(qkv_sbc, inputs, handoff)
        return self.proj(self._run(inputs.core, *heads, self.sink, inputs.scores).flatten(-2))

    def adapted(
        self, x_sbh: Tensor | LinearInput, inputs: AttentionInputs, adapter: Callable[..., Tensor] | None
    ) -> Tensor:
        """Return the attention output after the projection if `adapter(x_sbh)` is added to the packed heads."""
        qkv_sbc = self.qkv(x_sbh) if adapter is None else self.qkv(x_sbh) + adapter(x_sbh)
        return self.proj(self._run(self._attend, qkv_sbc, inputs))

    def _attend_rotated(self, qkv_sbc: Tensor, inputs: AttentionInputs, handoff: QuantizedGradHandoff | None) -> Tensor:
        return inputs.core(*self._rotated(qkv_sbc, inputs, handoff), self.sink, inputs.scores).flatten(-2)

    def _rotated(
        self, qkv_sbc: Tensor, inputs: AttentionInputs, handoff: QuantizedGradHandoff | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v from the packed heads [q | k | v]: one pass norms and rotates q and k; q is then scaled."""
        assert inputs.rotary is not None
        q, k, v = rotate_and_split(qkv_sbc, self.heads, self.groups, *inputs.rotary, handoff, self._norms())
        return q if inputs.query_scale_sb11 is None else q * inputs.query_scale_sb11, k, v

    def _norms(self) -> QKNorms | None:
        """Return the norms of q and k that precede their rotation, or None without norms."""
        if self.qk_norms is not None:
            return self.qk_norms.both
        if self.q_norm is not None and self.k_norm is not None:
            return QKNorms(self.q_norm.weight, self.k_norm.weight, self.norm_eps, self.q_norm.zero_centered)
        return QKNorms(None, None, self.norm_eps) if self.norms_rotated else None

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return recomputed(function, *inputs) if self.recompute else function(*inputs)

    def _attend(self, qkv_sbc: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention output `[s, b, a·d]` of the packed heads listed in `AttentionConfig.projected`.

        Norms, rotation, query scaling and the output gate are applied if the model has them.
        """
        parts = qkv_sbc.split([*self.split.values()], dim=-1)
        widths = {"gate": 1} if self.record.output_gate == "head" else {}
        heads = {x: y.unflatten(-1, (-1, widths.get(x, self.d))) for x, y in zip(self.split, parts, strict=True)}
        q, gate = heads["q"], heads.get("gate")
        if self.reads_keys:
            assert inputs.shared is not None
            k, v = inputs.shared.read()
            q = self._placed(q, self.q_norm, inputs.rotary)
        else:
            k = heads["k"].contiguous() if self.record.keys_as_values else heads["k"]
            v = heads.get("v", k)
            if self.qk_norms is not None:
                q, k = self.qk_norms(q, k)
            q, k = self._placed(q, self.q_norm, inputs.rotary), self._placed(k, self.k_norm, inputs.rotary)
            v = F.rms_norm(v, (self.d,), eps=self.norm_eps) if self.record.value_norm else v
        if self.is_read:
            assert inputs.shared is not None
            k, v = k.contiguous(), v.contiguous()
            inputs.shared.fill(k, v)
        scale_sb11 = inputs.query_scale_sb11
        q = q if scale_sb11 is None else q * scale_sb11
        y = inputs.core(q, k, v, self.sink, inputs.scores)
        if gate is not None:
            y = recomputed(_gated, y, gate, self.record.output_gate_function, self.context.batch_invariant)
        return y.flatten(-2)

    def _placed(self, x_sbad: Tensor, norm: Norm | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return queries or keys after the model's norm and rotation, if any."""
        x_sbad = x_sbad if norm is None or self.norms_last else norm(x_sbad)
        x_sbad = x_sbad if rotary is None else rotate_heads(x_sbad, *rotary)
        x_sbad = x_sbad if norm is None or not self.norms_last else norm(x_sbad)
        return F.rms_norm(x_sbad, (self.d,), eps=self.norm_eps) if self.norms_rotated else x_sbad


def _gated(y: Tensor, gate: Tensor, function: str, batch_invariant: bool) -> Tensor:
    return y * (sigmoid if function == "sigmoid" else softplus)(gate, batch_invariant=batch_invariant)
