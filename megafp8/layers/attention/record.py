"""Softmax attention with grouped queries: its keys, how positions enter it, and their rules.

The keys of a uniform model stand in the model section itself (`ModelConfig`); a kind of layer gives those that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megafp8.host.problems import Problem, divisors
from megafp8.parallel.pipeline.split import even
from megafp8.section import (
    FLOAT,
    IN_FP32,
    INTEGER,
    Channels,
    Count,
    Heads,
    NonNegative,
    PositiveFloat,
    Quantity,
    Section,
    Tokens,
)
from megafp8.spec import ModelSection, PartRecord, RunConfig


class RopeScaling(Section):
    """Frequency scaling of rotary embeddings as in Llama 3.1, for contexts longer than in earlier training."""

    factor: PositiveFloat = 8.0
    """Factor by which the context is extended."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_position_embeddings / low_freq_factor are scaled by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor are unchanged; those between are
    interpolated."""
    original_max_position_embeddings: Tokens = 8192
    """Context length before the extension, in tokens."""


class YarnConfig(Section):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): frequency scaling of rotary embeddings for contexts longer than in
    earlier training, with larger scores (Qwen, DeepSeek)."""

    factor: Annotated[float, Field(ge=1), FLOAT, IN_FP32]
    """Factor by which the context is extended."""
    original_max_position_embeddings: Tokens = 4096
    """Context length before the extension, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies with more rotations than this in the original context are unchanged."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies with fewer rotations than this in the original context are divided by the factor; those between are
    interpolated."""
    truncate: bool = True
    """Round the bounds of those between to whole pairs of channels, outwards (gpt-oss: false)."""
    mscale: NonNegative = 1.0
    """Rotated channels of queries and keys are multiplied by (0.1 · mscale · ln factor + 1) / (0.1 · mscale_all_dim ·
    ln factor + 1)."""
    mscale_all_dim: NonNegative = 0.0
    """Latent attention only: scores are multiplied by (0.1 · mscale_all_dim · ln factor + 1)², whose channels are not
    all rotated."""

    @property
    def rotated_factor(self) -> float:
        """Factor of rotated channels of queries and keys."""
        return (0.1 * self.mscale * math.log(self.factor) + 1) / math.sqrt(self.score_factor)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1) ** 2


class LongRopeConfig(Section):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): rotary frequencies divided by numbers found by a search, one set
    for short sequences and one for long ones (Phi-3, Phi-4-mini). Which of them a run has follows from the length of
    its sequences, training.seq_length."""

    short_factor: list[PositiveFloat]
    """Divisors of the frequencies of sequences of up to original_max_position_embeddings tokens, one for each rotated
    pair of channels of a head."""
    long_factor: list[PositiveFloat]
    """Those of longer sequences."""
    factor: Annotated[float, Field(ge=1), FLOAT, IN_FP32]
    """Factor by which the context is extended. Rotated channels of queries and keys are multiplied by √(1 + ln factor /
    ln original_max_position_embeddings), in short sequences too."""
    original_max_position_embeddings: Annotated[int, Field(ge=2), INTEGER, Quantity.TOKENS] = 4096
    """Context length before the extension, in tokens."""

    def divisors(self, length: int) -> list[float]:
        """Those of the frequencies in sequences of `length` tokens."""
        return self.long_factor if self.is_long(length) else self.short_factor

    def is_long(self, length: int) -> bool:
        """Whether sequences of `length` tokens have `long_factor`."""
        return length > self.original_max_position_embeddings

    def with_pairs(self, pairs: int) -> LongRopeConfig:
        """For heads of which this many pairs are rotated: as many of the divisors, from the first on."""
        lists = {key: (getattr(self, key) * pairs)[:pairs] for key in ("short_factor", "long_factor")}
        return self.model_copy(update=lists)

    @property
    def extended_length(self) -> int:
        """Context length after the extension, in tokens."""
        return round(self.factor * self.original_max_position_embeddings)

    @property
    def rotated_factor(self) -> float:
        """Factor of rotated channels of queries and keys."""
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


class QueryScaling(Section):
    """Queries are multiplied by 1 + factor · ln(1 + ⌊(position + first_position) / length⌋), so that attention stays
    sharp in long contexts (Nakanishi 2025, arXiv:2501.19399; Llama 4, Mistral 4)."""

    factor: PositiveFloat = 0.1
    """How fast the scale grows (Llama 4's attn_scale; Mistral 4's llama_4_scaling_beta)."""
    length: Tokens = 8192
    """Tokens of each step of the scale; queries of the first ones are not scaled (Llama 4's floor_scale; Mistral 4's
    original_max_position_embeddings)."""
    first_position: Literal[0, 1] = 0
    """Number of a sequence's first token in this formula: 0 in Mistral 4, 1 in Llama 4."""


class RotaryKeys(Section):
    """How positions enter attention."""

    position_embedding: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    """rope (rotary, Llama), learned (GPT-2), alibi (scores fall with the distance, at a rate of each head's own: Press
    et al. 2021, arXiv:2108.12409; BLOOM), relative (T5: learned biases of scores by distance) or none."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1), FLOAT] = 1.0
    """Share of the channels of a head that rotary embeddings rotate (GPT-NeoX, GLM-4, Phi-4-mini). Of its pairs,
    channels i and i + head_dim / 2, these are the first ones."""
    proportional_rope: bool = False
    """Rotate a share of a head's pairs with the frequencies that they have where all are rotated (Gemma 4's rope_type
    proportional), instead of with all frequencies of a head that is only as wide as what is rotated."""
    rope_interpolation_factor: Annotated[float, Field(ge=1), FLOAT, IN_FP32] = 1.0
    """Positions are divided by this (linear scaling, Chen et al. 2023, arXiv:2306.15595), for contexts longer than in
    earlier training."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling as in Llama 3.1. Default: none."""
    yarn: YarnConfig | None = None
    """Frequency scaling by YaRN. Default: none."""
    longrope: LongRopeConfig | None = None
    """Frequency scaling by LongRoPE. Default: none."""


class AttentionKeys(RotaryKeys):
    """The keys of attention."""

    num_attention_heads: Heads
    """Number of query heads."""
    num_query_groups: Heads | None = None
    """Number of key-value heads (grouped-query attention). Default: num_attention_heads."""
    head_dim: Channels | None = None
    """Width of one attention head. Default: hidden_size / num_attention_heads."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections only (Qwen2)."""
    qk_norm: bool | Literal["projection", "rotated"] = False
    """Apply RMSNorm to each query and key head (Qwen3); projection: to all query heads at once, and all key heads
    (OLMoE); rotated: to each head after the rotary embedding, without weights (Llama 4, nanochat)."""
    value_norm: bool = False
    """Apply RMSNorm without weights to each value head (Gemma 4)."""
    keys_as_values: bool = False
    """Values are keys before norms and rotary embedding, without a projection of their own (Gemma 4's
    attention_k_eq_v)."""
    attention_sinks: bool = False
    """Give each query head a learned score that takes part in its softmax and has no value, so that it can attend to
    nothing (gpt-oss; Megatron-LM's softmax_type: learnable)."""
    output_gate: bool = False
    """Multiply the output of each head by the sigmoid of a gate for each channel, a projection of the layer's input
    (Qwen3-Next; Qiu et al. 2025, arXiv:2505.06708)."""
    sliding_window: Tokens | None = None
    """Each token attends to this many latest tokens, including itself. Default: all earlier tokens."""
    attention_chunk: Tokens | None = None
    """Sequences are cut into chunks of this many tokens, each token attends to the earlier ones of its own (Llama 4).
    Default: one chunk."""
    query_scaling: QueryScaling | None = None
    """Scaling of queries by their positions. Default: none."""
    attention_scale: PositiveFloat | None = None
    """Scores of attention are multiplied by this (Gemma's query_pre_attn_scalar^-0.5, Granite's attention_multiplier).
    Default: 1 / √head_dim, in t5 1."""
    attention_softcap: PositiveFloat | None = None
    """Scores become softcap · tanh(score / softcap) (Gemma 2's attn_logit_softcapping). Default: they do not."""


class AttentionConfig(PartRecord, AttentionKeys):
    """Softmax attention with grouped queries."""

    module: ClassVar[str] = "megafp8.layers.attention.module:Attention"
    tensor_prefix: ClassVar[str] = "attention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        **{x: f"self_attn.{x}_proj" for x in "qkv"}, **{f"{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
        "sink.weight": "self_attn.sinks", "proj": "self_attn.o_proj",
    }  # fmt: skip
    megatron: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys("qkv", "self_attention.linear_qkv"), "proj": "self_attention.linear_proj",
        **{f"{x}_norm": f"self_attention.{x}_layernorm" for x in "qk"},
        "sink.weight": "self_attention.core_attention.softmax_offset",
    }  # fmt: skip

    kind: Literal["attention"] = "attention"
    """Softmax attention."""
    num_attention_heads: Heads = 1
    """Number of query heads."""
    kv_layer: Annotated[Count, Quantity.LAYER] | None = None
    """Number of an earlier layer, counted from 0, whose keys and values these layers read; they project none of their
    own (Gemma 4's num_kv_shared_layers; cross-layer attention, Brandon et al. 2024, arXiv:2405.12981). Both are in one
    pipeline stage. Default: own keys and values."""

    @classmethod
    def of(cls, model: ModelSection, window: int | None) -> AttentionConfig:
        """The resolved record of a layer of a uniform model, with this sliding window."""
        given: dict[str, Any] = {"sliding_window": window}
        if window is not None and model.rope_local_theta is not None:
            given |= {"rope_theta": model.rope_local_theta, "rope_interpolation_factor": 1.0}
            given |= dict.fromkeys(("rope_scaling", "yarn", "longrope"))
        return cls.model_construct(**given).resolved(model)

    def resolved(self, model: ModelSection) -> AttentionConfig:
        values = {name: getattr(model, name) for name in AttentionKeys.model_fields} | self.given
        heads, scale = values["num_attention_heads"], values["attention_scale"]
        values["num_query_groups"] = values["num_query_groups"] or heads
        values["head_dim"] = d = values["head_dim"] or model.hidden_size // heads
        if scale is None and model.mup is not None and model.mup.base_head_dim is not None:
            scale = model.mup.base_head_dim**0.5 / d
        values["attention_scale"] = 1.0 if scale is None and model.architecture == "t5" else scale
        return AttentionConfig.model_construct(**values)

    @property
    def channels(self) -> int:
        """Width of a head's query, key and value."""
        assert self.head_dim is not None, "the record is not resolved"
        return self.head_dim

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        assert self.num_query_groups is not None, "the record is not resolved"
        return self.num_query_groups

    @property
    def rotary_channels(self) -> int:
        """Width of the part of a head that is rotated."""
        return int(self.channels * self.partial_rotary_factor)

    @property
    def shares_context(self) -> bool:
        # They depend on the place among all tokens.
        return self.longrope is None and self.position_embedding != "alibi" and self.attention_chunk is None

    @property
    def no_qk_clip(self) -> str:
        if self.qk_norm:
            return (
                f"with qk_norm: {str(self.qk_norm).lower()} logits do not depend on the size of query and key weights"
            )
        if self.attention_softcap is not None:
            return "attention_softcap bounds the logits"
        if self.position_embedding in ("alibi", "relative"):
            return f"with position_embedding: {self.position_embedding} logits are not of queries and keys alone"
        if self.kv_layer is not None:
            return "with kv_layer layers share keys, and each has queries of its own"
        if self.keys_as_values:
            return "with keys_as_values the weights of keys are those of values"
        return ""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_attention_heads": self.num_attention_heads, "num_query_groups": self.groups}

    @property
    def projected(self) -> tuple[str, ...]:
        """What is computed from the layer's input: q, k and v, and the gate where there is one."""
        keys = () if self.kv_layer is not None else ("k",) if self.keys_as_values else ("k", "v")
        return "q", *keys, *(("gate",) if self.output_gate else ())

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return *self.projected, "proj"

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if self.position_embedding in ("learned", "relative") and "position_embedding" in self.given:
            rule = "it belongs to the whole model"
            yield Problem(f"{path}.position_embedding", self.position_embedding, rule, "try rope, alibi or none")
        values = {name: getattr(model, name) for name in AttentionKeys.model_fields} | self.given
        for problem in attention_heads(model.model_copy(update={**values, "latent_attention": None})):
            yield replace(problem, path=problem.path.replace("model.", f"{path}.", 1))
        if self.kv_layer is not None:
            yield from self._shared_keys(model, f"{path}.kv_layer")

    def _shared_keys(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Rules about the layer whose keys and values layers of this kind read."""
        source, reader = self.kv_layer, self.resolved(model)
        layers = model.spec.layers[: model.num_layers]
        readers = [i for i, layer in enumerate(layers) if getattr(layer.mixer, "kv_layer", None) == source]
        assert source is not None
        if not readers or source >= readers[0]:
            rule = "not an earlier layer than " + (f"layer {readers[0]}, which reads it" if readers else "any")
            yield Problem(path, source, rule, "name an earlier layer")
            return
        of = layers[source].mixer
        if not isinstance(of, AttentionConfig) or of.kv_layer is not None:
            yield Problem(path, source, "that layer has no keys and values of its own", "name one that has")
            return
        alike = {"head_dim", "num_query_groups", *RotaryKeys.model_fields}
        if differing := sorted(key for key in alike if getattr(of, key) != getattr(reader, key)):
            rule = f"that layer has another {differing[0]} ({getattr(of, differing[0])!r})"
            yield Problem(path, source, rule, "name a layer with the same heads and rotary embedding")
        if reader.qk_norm == "projection":
            rule = "norms of all query heads and all key heads are computed together (qk_norm projection)"
            yield Problem(path, source, rule, "leave it out, or try qk_norm true")
        if model.mtp_num_layers:
            rule = f"model.mtp_num_layers ({model.mtp_num_layers}) repeats the last layer, which sees other tokens then"
            yield Problem(path, source, rule, "leave one of them out")

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        if config.data.prefix_lm is not None and self.attention_chunk is not None:
            rule = "data.prefix_lm is set, and all tokens attend to the whole prefix, not to their chunk alone"
            yield Problem(f"{path}.attention_chunk", self.attention_chunk, rule, "leave it out, or data.prefix_lm")


def attention_keys(model: ModelSection) -> AttentionConfig:
    """Return the complete record of softmax attention with the keys of the model section."""
    return AttentionConfig.of(model, model.sliding_window)


def shared_keys(config: RunConfig) -> Iterator[Problem]:
    """The rule between layers that read another layer's keys and values, and pipeline stages.

    What travels between stages is the residual stream alone, so both are in one stage.
    """
    m, p = config.model, config.parallel
    stages, layers, sources = p.pipeline * p.virtual_pipeline, m.num_layers, config.spec.kv_sources
    if stages == 1 or not sources or stages > layers:
        return
    inside = {cut for source, last in sources.items() for cut in range(source + 1, last + 1)}
    between = [cut for cut in range(1, layers) if cut not in inside]
    if isinstance(p.layers_per_stage, list):
        cuts = [*accumulate(p.layers_per_stage)][:-1]
    else:
        cuts = [*accumulate(even(layers, stages))][:-1]
    wrong = next((cut for cut in cuts if cut in inside), None)
    if wrong is None and p.layers_per_stage != "balanced":
        return
    source = next(iter(sources) if wrong is None else (x for x, last in sources.items() if x < wrong <= last))
    rule = f"layer {sources[source]} reads keys and values of layer {source}, and stages send the residual stream only"
    if len(between) < stages - 1:
        works = "try parallel.pipeline=1" + (f", or up to {len(between) + 1} stages" if between else "")
        yield Problem("parallel.pipeline", p.pipeline, rule, works)
        return
    chosen: list[int] = []
    for i in range(1, stages):  # the nearest place to an equal part that leaves enough for the later stages
        free = [cut for cut in between[: len(between) - (stages - 1 - i)] if cut > max(chosen, default=0)]
        distances = [abs(cut - i * layers / stages) for cut in free]
        chosen.append(free[distances.index(min(distances))])
    counts = [b - a for a, b in pairwise([0, *chosen, layers])]
    yield Problem("parallel.layers_per_stage", p.layers_per_stage, rule, f"try {counts}")


def attention_heads(m: ModelSection) -> Iterator[Problem]:
    """Rules about attention heads that hold in any layout."""
    if m.latent_attention is None:
        yield from _equal_heads(m)
    scaling = m.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        path, low = "model.rope_scaling.high_freq_factor", scaling.low_freq_factor
        rule = f"not above low_freq_factor ({low}), so there is no band to interpolate in"
        yield Problem(path, scaling.high_freq_factor, rule, f"try {4 * low}")
    if m.yarn is not None:
        yield from _yarn(m, m.yarn)
    if m.longrope is not None:
        yield from _longrope(m, m.longrope)
    sections = {"model.rope_scaling": scaling, "model.yarn": m.yarn, "model.longrope": m.longrope}
    scaled = {path: section.factor for path, section in sections.items() if section is not None}
    rule = f"{next(iter(scaled), '')} scales the frequencies already"
    for path, factor in [*scaled.items()][1:]:
        yield Problem(f"{path}.factor", factor, rule, f"leave {' or '.join(scaled)} out")
    if m.proportional_rope and scaled:
        works = f"try false, or leave {' and '.join(scaled)} out"
        yield Problem("model.proportional_rope", True, f"{rule}, of heads that are rotated whole", works)
    if m.rope_interpolation_factor > 1 and scaled:
        works = f"try 1, or leave {' and '.join(scaled)} out"
        yield Problem("model.rope_interpolation_factor", m.rope_interpolation_factor, rule, works)
    if m.attention_chunk is not None and m.sliding_window is not None:
        rule = f"model.sliding_window ({m.sliding_window}) says which tokens each one attends to"
        yield Problem("model.attention_chunk", m.attention_chunk, rule, "leave one of them out")
    if m.rope_local_theta is not None and m.sliding_window is None:
        works = "set model.sliding_window, or leave it out"
        yield Problem("model.rope_local_theta", m.rope_local_theta, "no layer has a window", works)


def _yarn(m: ModelSection, yarn: YarnConfig) -> Iterator[Problem]:
    if yarn.beta_fast <= yarn.beta_slow:
        rule = f"not above beta_slow ({yarn.beta_slow}), so there is no band to interpolate in"
        yield Problem("model.yarn.beta_fast", yarn.beta_fast, rule, f"try {32 * yarn.beta_slow}")
    if yarn.mscale_all_dim and m.latent_attention is None:
        rule = "without model.latent_attention all channels of a head are rotated, and model.yarn.mscale is theirs"
        yield Problem("model.yarn.mscale_all_dim", yarn.mscale_all_dim, rule, "try 0")
    if m.rope_theta <= 1:
        rule = "model.yarn is set, and it needs frequencies that fall"
        yield Problem("model.rope_theta", m.rope_theta, rule, "try 10000")


def _longrope(m: ModelSection, longrope: LongRopeConfig) -> Iterator[Problem]:
    latent = m.latent_attention
    pairs = (attention_keys(m).rotary_channels if latent is None else latent.rope_head_dim) // 2
    for key in ("short_factor", "long_factor"):
        if len(factors := getattr(longrope, key)) != pairs:
            rule = f"{len(factors)} numbers, where {pairs} pairs of channels of a head are rotated"
            yield Problem(f"model.longrope.{key}", factors, rule, f"give {pairs} numbers")
    longest = longrope.extended_length
    if m.max_position_embeddings not in (None, longest):
        rule = f"not model.longrope's factor × original_max_position_embeddings ({longest})"
        yield Problem("model.max_position_embeddings", m.max_position_embeddings, rule, f"try {longest}")


def _equal_heads(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules about heads whose queries, keys and values have the same width."""
    heads, record = m.num_attention_heads, attention_keys(m)
    if m.head_dim is None and m.hidden_size % heads:
        rule = f"not a multiple of model.num_attention_heads ({heads})"
        works = f"try {round(m.hidden_size / heads) * heads or heads}, or give model.head_dim"
        yield Problem("model.hidden_size", m.hidden_size, rule, works)
    elif m.position_embedding == "rope" and record.channels % 2:
        rule = "rotary embeddings rotate pairs, so the width of a head must be even"
        yield Problem("model.head_dim", record.channels, rule, f"try {record.channels + 1}")
    elif m.position_embedding == "rope" and (record.rotary_channels % 2 or not record.rotary_channels):
        rule = f"rotary embeddings rotate pairs, and it makes {record.rotary_channels} of {record.channels} channels"
        works = f"try {max(record.rotary_channels // 2, 1) * 2 / record.channels:g}"
        yield Problem("model.partial_rotary_factor", m.partial_rotary_factor, rule, works)
    if heads % record.groups:
        rule = f"model.num_attention_heads ({heads}) is not a multiple of it"
        yield Problem("model.num_query_groups", record.groups, rule, divisors(heads, record.groups))
