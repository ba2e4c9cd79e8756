"""Config keys of softmax attention with grouped queries, of rotary embeddings, and the rules between these keys.

In a uniform model these keys stand in the model section itself (`ModelConfig`). A kind of layer (`model.layer_kinds`)
gives only the keys that differ.
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
    """Wavelengths above original_max_position_embeddings / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor are unchanged. Wavelengths between the two
    bounds are interpolated."""
    original_max_position_embeddings: Tokens = 8192
    """Context length before the extension, in tokens."""


class YarnConfig(Section):
    """Frequency scaling of rotary embeddings by YaRN (arXiv:2309.00071), with larger scores (Qwen, DeepSeek).

    It is used for contexts longer than in earlier training (Peng et al. 2023).
    """

    factor: Annotated[float, Field(ge=1), FLOAT, IN_FP32]
    """Factor by which the context is extended."""
    original_max_position_embeddings: Tokens = 4096
    """Context length before the extension, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies with more rotations than this in the original context are unchanged."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies with fewer rotations than this in the original context are divided by the factor. Frequencies between
    the two bounds are interpolated."""
    truncate: bool = True
    """Round both bounds of the interpolated range outwards to whole pairs of channels (gpt-oss: false)."""
    mscale: NonNegative = 1.0
    """Strength of the scaling of queries and keys: their rotated channels are multiplied by (0.1 · mscale · ln factor +
    1) / (0.1 · mscale_all_dim · ln factor + 1)."""
    mscale_all_dim: NonNegative = 0.0
    """Strength of the scaling of scores, for latent attention only, where not all channels are rotated: scores are
    multiplied by (0.1 · mscale_all_dim · ln factor + 1)²."""

    @property
    def rotated_factor(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return (0.1 * self.mscale * math.log(self.factor) + 1) / math.sqrt(self.score_factor)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1) ** 2


class LongRopeConfig(Section):
    """Frequency scaling of rotary embeddings by LongRoPE (arXiv:2402.13753; Phi-3, Phi-4-mini).

    Frequencies are divided by numbers that a search has found (Ding et al. 2024). There is one set of divisors for
    short sequences and one for long sequences. The length of a run's sequences (training.seq_length) decides which set
    it uses.
    """

    short_factor: list[PositiveFloat]
    """Divisors of the frequencies in sequences of up to original_max_position_embeddings tokens: one number for each
    rotated pair of a head's channels."""
    long_factor: list[PositiveFloat]
    """Divisors of the frequencies in longer sequences: one number for each rotated pair of a head's channels."""
    factor: Annotated[float, Field(ge=1), FLOAT, IN_FP32]
    """Factor by which the context is extended. In sequences of any length, rotated channels of queries and keys are
    multiplied by √(1 + ln factor / ln original_max_position_embeddings)."""
    original_max_position_embeddings: Annotated[int, Field(ge=2), INTEGER, Quantity.TOKENS] = 4096
    """Context length before the extension, in tokens."""

    def divisors(self, length: int) -> list[float]:
        """Return the divisors of the frequencies in sequences of `length` tokens."""
        return self.long_factor if self.is_long(length) else self.short_factor

    def is_long(self, length: int) -> bool:
        """Return whether sequences of `length` tokens use `long_factor`."""
        return length > self.original_max_position_embeddings

    def with_pairs(self, pairs: int) -> LongRopeConfig:
        """Return a config with exactly `pairs` divisors in each list, cut off or repeated from the start."""
        lists = {key: (getattr(self, key) * pairs)[:pairs] for key in ("short_factor", "long_factor")}
        return self.model_copy(update=lists)

    @property
    def extended_length(self) -> int:
        """Context length after the extension, in tokens."""
        return round(self.factor * self.original_max_position_embeddings)

    @property
    def rotated_factor(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


class QueryScaling(Section):
    """Scaling of queries by their positions, so that attention stays sharp in long contexts (Llama 4, Mistral 4).

    A query is multiplied by 1 + factor · ln(1 + ⌊(position + first_position) / length⌋) (Nakanishi 2025,
    arXiv:2501.19399).
    """

    factor: PositiveFloat = 0.1
    """Growth rate of the scale (Llama 4's attn_scale; Mistral 4's llama_4_scaling_beta)."""
    length: Tokens = 8192
    """Number of tokens in each step of the scale. Queries of the first step are not scaled (Llama 4's floor_scale;
    Mistral 4's original_max_position_embeddings)."""
    first_position: Literal[0, 1] = 0
    """Number of a sequence's first token in this formula: 0 in Mistral 4, 1 in Llama 4."""


class RotaryKeys(Section):
    """Config keys of position embeddings."""

    position_embedding: Literal["rope", "learned", "alibi", "relative", "none"] = "rope"
    """Kind of position embedding: rope (rotary, Llama), learned (GPT-2), alibi (each head's scores fall with the
    distance at the head's own rate: Press et al. 2021, arXiv:2108.12409; BLOOM), relative (T5: learned biases of scores
    by distance) or none."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1), FLOAT] = 1.0
    """Fraction of a head's channels that rotary embeddings rotate (GPT-NeoX, GLM-4, Phi-4-mini). Channels i and i +
    head_dim / 2 form a pair, and the first pairs are rotated."""
    proportional_rope: bool = False
    """Frequencies of the rotated pairs if partial_rotary_factor is below 1. true: the frequencies that these pairs
    would have if all pairs were rotated (Gemma 4's rope_type proportional). false: all frequencies of a head that
    consists only of the rotated channels."""
    rope_interpolation_factor: Annotated[float, Field(ge=1), FLOAT, IN_FP32] = 1.0
    """Number by which positions are divided (linear scaling, Chen et al. 2023, arXiv:2306.15595), for contexts longer
    than in earlier training."""
    rope_scaling: RopeScaling | None = None
    """Frequency scaling as in Llama 3.1. Default: none."""
    yarn: YarnConfig | None = None
    """Frequency scaling by YaRN. Default: none."""
    longrope: LongRopeConfig | None = None
    """Frequency scaling by LongRoPE. Default: none."""


class AttentionKeys(RotaryKeys):
    """Config keys of softmax attention."""

    num_attention_heads: Heads
    """Number of query heads."""
    num_query_groups: Heads | None = None
    """Number of key-value heads (grouped-query attention). Default: num_attention_heads."""
    head_dim: Channels | None = None
    """Width of one attention head. Default: hidden_size / num_attention_heads."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections, even without linear_bias (Qwen2)."""
    proj_bias: bool = False
    """Add a bias to the output projection of attention, even without linear_bias (GPT-Neo)."""
    qk_norm: bool | Literal["projection", "rotated", "after_rotation"] = False
    """Apply RMSNorm to each query and key head (Qwen3). projection: normalize all query heads together, and all key
    heads together (OLMoE). after_rotation: normalize each head after the rotary embedding (Hunyuan). rotated: do the
    same without weights (Llama 4, nanochat)."""
    value_norm: bool = False
    """Apply RMSNorm without weights to each value head (Gemma 4)."""
    keys_as_values: bool = False
    """Use keys before norms and rotary embedding as values, without a value projection (Gemma 4's attention_k_eq_v)."""
    attention_sinks: bool = False
    """Give each query head a learned score that takes part in its softmax but has no value, so that the head can attend
    to nothing (gpt-oss; Megatron-LM's softmax_type: learnable)."""
    output_gate: bool | Literal["head"] = False
    """Multiply each channel of a head's output by output_gate_function of a gate, which is projected from the layer's
    input (Qwen3-Next; Qiu et al. 2025, arXiv:2505.06708). head: all channels of a head share one gate (LFM3)."""
    output_gate_function: Literal["sigmoid", "softplus"] = "sigmoid"
    """Function of the output gate (softplus: Laguna)."""
    sliding_window: Tokens | None = None
    """Number of latest tokens to which each token attends, including itself. Default: all earlier tokens."""
    attention_chunk: Tokens | None = None
    """Number of tokens in each chunk of a sequence; each token attends only to itself and to earlier tokens of its
    chunk (Llama 4). Default: one chunk."""
    query_scaling: QueryScaling | None = None
    """Scaling of queries by their positions. Default: none."""
    attention_scale: PositiveFloat | None = None
    """Factor of attention scores (Gemma's query_pre_attn_scalar^-0.5, Granite's attention_multiplier). Default: 1 /
    √head_dim, in t5 1."""
    attention_softcap: PositiveFloat | None = None
    """Bound of attention scores: a score becomes softcap · tanh(score / softcap) (Gemma 2's attn_logit_softcapping).
    Default: scores are not bounded."""


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
    """Number of an earlier layer, counted from 0, that shares its keys and values with these layers, which then have no
    key and value projections (Gemma 4's num_kv_shared_layers; cross-layer attention, Brandon et al. 2024,
    arXiv:2405.12981). Both layers must be in one pipeline stage. Default: each layer computes its own keys and
    values."""

    @classmethod
    def from_section(cls, model: ModelSection, window: int | None) -> AttentionConfig:
        """Return the resolved record of a layer of a uniform model with this sliding window."""
        layer_keys: dict[str, Any] = {"sliding_window": window}
        if window is not None and model.rope_local_theta is not None:
            layer_keys |= {"rope_theta": model.rope_local_theta, "rope_interpolation_factor": 1.0}
            layer_keys |= dict.fromkeys(("rope_scaling", "yarn", "longrope"))
        return cls.model_construct(**layer_keys).resolved(model)

    def resolved(self, model: ModelSection) -> AttentionConfig:
        """Return the complete record, with missing keys taken from the model section."""
        values = {name: getattr(model, name) for name in AttentionKeys.model_fields} | self.given
        heads, scale = values["num_attention_heads"], values["attention_scale"]
        values["num_query_groups"] = values["num_query_groups"] or heads
        values["head_dim"] = d = values["head_dim"] or model.hidden_size // heads
        if scale is None and model.mup is not None and model.mup.base_head_dim is not None:
            scale = model.mup.base_head_dim**0.5 / d
        values["attention_scale"] = 1.0 if scale is None and model.architecture == "t5" else scale
        return type(self).model_construct(**values)

    @property
    def channels(self) -> int:
        """Width of one head's query, key and value."""
        assert self.head_dim is not None, "the record is not resolved"
        return self.head_dim

    @property
    def head_width(self) -> int | None:
        """Head width of queries and keys."""
        return self.channels

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        assert self.num_query_groups is not None, "the record is not resolved"
        return self.num_query_groups

    @property
    def rotary_channels(self) -> int:
        """Number of channels of a head that are rotated."""
        return int(self.channels * self.partial_rotary_factor)

    @property
    def shares_context(self) -> bool:
        """Whether sequences that begin alike can share the keys and values of their beginning."""
        # These three depend on a token's position or on the length of the whole sequence.
        return self.longrope is None and self.position_embedding != "alibi" and self.attention_chunk is None

    @property
    def no_qk_clip(self) -> str:
        """Reason why QK-Clip cannot scale the weights of queries and keys; empty if it can."""
        if self.qk_norm:
            return (
                f"with qk_norm: {str(self.qk_norm).lower()} logits do not depend on the size of query and key weights"
            )
        if self.attention_softcap is not None:
            return "attention_softcap bounds the logits"
        if self.position_embedding in ("alibi", "relative"):
            return f"with position_embedding: {self.position_embedding} logits do not depend on queries and keys alone"
        if self.kv_layer is not None:
            return "with kv_layer several layers share keys, but each layer has its own queries"
        if self.keys_as_values:
            return "with keys_as_values keys and values share their weights"
        return ""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the numbers of query heads and key-value heads, which tensor parallelism divides."""
        return {"num_attention_heads": self.num_attention_heads, "num_query_groups": self.groups}

    @property
    def projected(self) -> tuple[str, ...]:
        """Names of the tensors projected from the layer's input: q, k and v (if the layer computes them), the gate."""
        keys = () if self.kv_layer is not None else ("k",) if self.keys_as_values else ("k", "v")
        return "q", *keys, *(("gate",) if self.output_gate else ())

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the projections that LoRA can adapt."""
        return *self.projected, "proj"

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys of this kind of layer break."""
        if self.position_embedding in ("learned", "relative") and "position_embedding" in self.given:
            rule = "it can only be set for the whole model"
            yield Problem(f"{path}.position_embedding", self.position_embedding, rule, "try rope, alibi or none")
        values = {name: getattr(model, name) for name in AttentionKeys.model_fields} | self.given
        for problem in attention_heads(model.model_copy(update={**values, "latent_attention": None})):
            yield replace(problem, path=problem.path.replace("model.", f"{path}.", 1))
        if self.kv_layer is not None:
            yield from self._shared_keys(model, f"{path}.kv_layer")

    def _shared_keys(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the broken rules about `kv_layer`, the layer from which this kind of layer reads keys and values."""
        source, reader = self.kv_layer, self.resolved(model)
        layers = model.spec.layers[: model.num_layers]
        readers = [i for i, layer in enumerate(layers) if getattr(layer.mixer, "kv_layer", None) == source]
        assert source is not None
        if not readers or source >= readers[0]:
            rule = "must come before " + (f"layer {readers[0]}, which reads it" if readers else "a layer that reads it")
            yield Problem(path, source, rule, "name an earlier layer")
            return
        of = layers[source].mixer
        if type(of) is not AttentionConfig or of.kv_layer is not None:
            yield Problem(path, source, "that layer computes no keys and values", "name a layer that computes them")
            return
        alike = {"head_dim", "num_query_groups", *RotaryKeys.model_fields}
        if differing := sorted(key for key in alike if getattr(of, key) != getattr(reader, key)):
            rule = f"that layer has a different {differing[0]} ({getattr(of, differing[0])!r})"
            yield Problem(path, source, rule, "name a layer with the same heads and rotary embedding")
        if reader.qk_norm == "projection":
            rule = "norms of all query heads and all key heads are computed together (qk_norm projection)"
            yield Problem(path, source, rule, "leave it out, or try qk_norm true")
        if model.mtp_num_layers:
            rule = f"model.mtp_num_layers ({model.mtp_num_layers}) repeats the last layer with different tokens"
            yield Problem(path, source, rule, "leave one of them out")

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the broken rule between `attention_chunk` and `data.prefix_lm`."""
        if config.data.prefix_lm is not None and self.attention_chunk is not None:
            rule = "data.prefix_lm is set, so all tokens attend to the whole prefix, not only to their chunk"
            yield Problem(f"{path}.attention_chunk", self.attention_chunk, rule, "leave it out, or data.prefix_lm")


def attention_keys(model: ModelSection) -> AttentionConfig:
    """Return the complete record of softmax attention with the keys of the model section."""
    return AttentionConfig.from_section(model, model.sliding_window)


def shared_keys(config: RunConfig) -> Iterator[Problem]:
    """Yield the broken rule that layers with shared keys and values, or shared indexers, are in one pipeline stage.

    Stages send each other only the residual stream, so a layer must be in the same stage as the layer that provides
    its keys and values, or the tokens to which it attends.
    """
    m, p, spec = config.model, config.parallel, config.spec
    stages, layers = p.pipeline * p.virtual_pipeline, m.num_layers
    sources = {source: reader for reader, source in spec.sources.items()}  # each with the last layer that reads it
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
    what = "keys and values" if isinstance(spec.layers[source].mixer, AttentionConfig) else "the chosen tokens"
    rule = f"layer {sources[source]} reads {what} of layer {source}, but stages send only the residual stream"
    if len(between) < stages - 1:
        works = "try parallel.pipeline=1" + (f", or up to {len(between) + 1} stages" if between else "")
        yield Problem("parallel.pipeline", p.pipeline, rule, works)
        return
    chosen: list[int] = []
    for i in range(1, stages):  # the cut nearest to equal stages that leaves enough cuts for the later stages
        free = [cut for cut in between[: len(between) - (stages - 1 - i)] if cut > max(chosen, default=0)]
        distances = [abs(cut - i * layers / stages) for cut in free]
        chosen.append(free[distances.index(min(distances))])
    counts = [b - a for a, b in pairwise([0, *chosen, layers])]
    yield Problem("parallel.layers_per_stage", p.layers_per_stage, rule, f"try {counts}")


def attention_heads(m: ModelSection) -> Iterator[Problem]:
    """Yield the broken rules about attention heads that hold in any parallel layout."""
    if m.latent_attention is None:
        yield from _equal_heads(m)
    if m.output_gate_function != "sigmoid" and not m.output_gate:
        rule, path = "model.output_gate is false, so there is no gate", "model.output_gate_function"
        yield Problem(path, m.output_gate_function, rule, "try sigmoid, or model.output_gate=true")
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
        yield Problem("model.proportional_rope", True, f"{rule}, for heads that are rotated entirely", works)
    if m.rope_interpolation_factor > 1 and scaled:
        works = f"try 1, or leave {' and '.join(scaled)} out"
        yield Problem("model.rope_interpolation_factor", m.rope_interpolation_factor, rule, works)
    if m.attention_chunk is not None and m.sliding_window is not None:
        rule = f"model.sliding_window ({m.sliding_window}) already limits which tokens a token attends to"
        yield Problem("model.attention_chunk", m.attention_chunk, rule, "leave one of them out")
    if m.rope_local_theta is not None and m.sliding_window is None:
        works = "set model.sliding_window, or leave it out"
        yield Problem("model.rope_local_theta", m.rope_local_theta, "no layer has a window", works)


def _yarn(m: ModelSection, yarn: YarnConfig) -> Iterator[Problem]:
    if yarn.beta_fast <= yarn.beta_slow:
        rule = f"not above beta_slow ({yarn.beta_slow}), so there is no band to interpolate in"
        yield Problem("model.yarn.beta_fast", yarn.beta_fast, rule, f"try {32 * yarn.beta_slow}")
    if yarn.mscale_all_dim and m.latent_attention is None:
        rule = "without model.latent_attention model.yarn.mscale scales all channels of a head"
        yield Problem("model.yarn.mscale_all_dim", yarn.mscale_all_dim, rule, "try 0")
    if m.rope_theta <= 1:
        rule = "model.yarn is set, and it needs decreasing frequencies"
        yield Problem("model.rope_theta", m.rope_theta, rule, "try 10000")


def _longrope(m: ModelSection, longrope: LongRopeConfig) -> Iterator[Problem]:
    latent = m.latent_attention
    pairs = (attention_keys(m).rotary_channels if latent is None else latent.rope_head_dim) // 2
    for key in ("short_factor", "long_factor"):
        if len(factors := getattr(longrope, key)) != pairs:
            rule = f"{len(factors)} numbers, but {pairs} pairs of channels of a head are rotated"
            yield Problem(f"model.longrope.{key}", factors, rule, f"give {pairs} numbers")
    longest = longrope.extended_length
    if m.max_position_embeddings not in (None, longest):
        rule = f"not model.longrope's factor × original_max_position_embeddings ({longest})"
        yield Problem("model.max_position_embeddings", m.max_position_embeddings, rule, f"try {longest}")


def _equal_heads(m: ModelSection) -> Iterator[Problem]:
    """Yield the broken rules about heads with queries, keys and values of the same width."""
    heads, record = m.num_attention_heads, attention_keys(m)
    if m.head_dim is None and m.hidden_size % heads:
        rule = f"not a multiple of model.num_attention_heads ({heads})"
        works = f"try {round(m.hidden_size / heads) * heads or heads}, or give model.head_dim"
        yield Problem("model.hidden_size", m.hidden_size, rule, works)
    elif m.position_embedding == "rope" and record.channels % 2:
        rule = "rotary embeddings rotate pairs, so the width of a head must be even"
        yield Problem("model.head_dim", record.channels, rule, f"try {record.channels + 1}")
    elif m.position_embedding == "rope" and (record.rotary_channels % 2 or not record.rotary_channels):
        rule = f"rotary embeddings rotate pairs, but it selects {record.rotary_channels} of {record.channels} channels"
        works = f"try {max(record.rotary_channels // 2, 1) * 2 / record.channels:g}"
        yield Problem("model.partial_rotary_factor", m.partial_rotary_factor, rule, works)
    if heads % record.groups:
        rule = f"model.num_attention_heads ({heads}) is not a multiple of it"
        yield Problem("model.num_query_groups", record.groups, rule, divisors(heads, record.groups))
