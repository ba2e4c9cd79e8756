"""Config keys of multi-head latent attention and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megafp8.host.problems import Problem
from megafp8.layers.attention.record import QueryScaling, RotaryKeys
from megafp8.section import Channels, Heads, PositiveFloat, Section, Tokens
from megafp8.spec import ModelSection, PartRecord

if TYPE_CHECKING:
    from typing_extensions import Self


class LatentAttentionKeys(Section):
    """Config keys of latent attention."""

    q_rank: Channels | None = None
    """Width of the latent from which queries are computed (q_lora_rank). null: queries are computed from the residual
    stream (DeepSeek-V2-Lite)."""
    kv_rank: Channels = 512
    """Width of the latent from which keys and values are computed (kv_lora_rank)."""
    nope_head_dim: Channels = 128
    """Number of channels without positions in a head's query and key (qk_nope_head_dim)."""
    rope_head_dim: Channels = 64
    """Number of channels with rotary positions in a head's query and in the key that all heads share
    (qk_rope_head_dim). If model.position_embedding is none, these channels have no positions."""
    value_head_dim: Channels = 128
    """Number of channels of a head's values (v_head_dim)."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of the norms of the latents. Default: model.norm_eps."""

    @property
    def channels(self) -> int:
        """Width of a head's query and key."""
        return self.nope_head_dim + self.rope_head_dim


class LatentAttentionConfig(LatentAttentionKeys):
    """Multi-head latent attention (DeepSeek-V2 and V3). Replaces head_dim and num_query_groups."""

    q_rank: Channels | None
    """Width of the latent from which queries are computed (q_lora_rank). null: queries are computed from the residual
    stream (DeepSeek-V2-Lite)."""
    kv_rank: Channels
    """Width of the latent from which keys and values are computed (kv_lora_rank)."""


class LatentRecord(PartRecord, LatentAttentionKeys, RotaryKeys):
    """Record of latent attention, dense or sparse.

    Missing keys have the values of the section model.latent_attention, or of the model section.
    """

    tensor_prefix: ClassVar[str] = "attention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        "q_down": "self_attn.q_a_proj", "kv_down": "self_attn.kv_a_proj_with_mqa",
        "q_norm": "self_attn.q_a_layernorm", "kv_norm": "self_attn.kv_a_layernorm",
        "q_up": "self_attn.q_b_proj", "kv_up": "self_attn.kv_b_proj",
    }  # fmt: skip

    num_attention_heads: Heads = 1
    """Number of heads."""
    query_scaling: QueryScaling | None = None
    """Scaling of queries by their positions. Default: none."""

    def resolved(self, model: ModelSection) -> Self:
        """Return the complete record: keys of this layer, then of the section, then of the model."""
        names = ("num_attention_heads", "query_scaling", *RotaryKeys.model_fields)
        values = {name: getattr(model, name) for name in names}
        section = model.latent_attention
        values |= {} if section is None else {name: getattr(section, name) for name in LatentAttentionKeys.model_fields}
        values |= self._section_keys(model) | self.given
        values["norm_eps"] = values.get("norm_eps") or model.norm_eps
        return type(self).model_construct(**values)

    def _section_keys(self, model: ModelSection) -> dict[str, Any]:
        """Return the values that a subclass takes from other sections of the model."""
        return {}

    @property
    def head_width(self) -> int | None:
        """Head width of queries and keys."""
        return self.channels

    @property
    def shares_context(self) -> bool:
        """Whether sequences that begin alike can share the keys and values of their beginning."""
        return self.longrope is None  # LongRoPE's frequencies depend on the length of the whole sequence

    @property
    def eps(self) -> float:
        """Epsilon of the norms of the latents."""
        assert self.norm_eps is not None, "the record is not resolved"
        return self.norm_eps

    @property
    def rotary_channels(self) -> int:
        """Number of channels of a head that are rotated."""
        return self.rope_head_dim

    @property
    def score_factor(self) -> float:
        """Factor of attention scores (YaRN)."""
        return 1.0 if self.yarn is None else self.yarn.score_factor

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the number of heads, which tensor parallelism divides."""
        return {"num_attention_heads": self.num_attention_heads}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys of this kind of layer break."""
        if model.latent_attention is None and "kv_rank" not in self.given:
            rule = "there is no section model.latent_attention, and the width of the latent is not given"
            yield Problem(
                f"{path}.kind",
                type(self).model_fields["kind"].default,
                rule,
                f"give {path}.kv_rank, or model.latent_attention",
            )
            return
        for problem in _latent_rules(self.resolved(model)):
            section, _, key = problem.path.rpartition(".")
            inherited = key in LatentAttentionKeys.model_fields and key not in self.given
            yield replace(problem, path=f"{section}.{key}" if inherited else f"{path}.{key}")


class LatentMixerConfig(LatentRecord):
    """Multi-head latent attention."""

    module: ClassVar[str] = "megafp8.layers.latent_attention.module:LatentAttention"

    kind: Literal["latent_attention"] = "latent_attention"
    """Multi-head latent attention."""
    sliding_window: Tokens | None = None
    """Number of latest tokens to which each token attends, including itself. Default: model.sliding_window."""

    def _section_keys(self, model: ModelSection) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window}

    @property
    def no_qk_clip(self) -> str:
        """Empty: QK-Clip can scale the weights of queries and keys."""
        return ""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the projections that LoRA can adapt."""
        return "q" if self.q_rank is None else "q_up", "kv_up", "proj"


def latent_attention(m: ModelSection) -> Iterator[Problem]:
    """Yield the broken rules about heads of multi-head latent attention."""
    latent = m.latent_attention
    if latent is None:
        return
    path, off = "model.latent_attention", "or leave model.latent_attention out"
    unused = {
        "head_dim": "its heads have the widths nope_head_dim, rope_head_dim and value_head_dim",
        "num_query_groups": "each of its heads has its own key and value",
        "linear_bias": "its layers have no biases",
        "qkv_bias": "its layers have no biases",
        "proj_bias": "its layers have no biases",
        "qk_norm": "it normalizes the latents instead",
        "value_norm": "it normalizes the latents instead",
        "keys_as_values": "keys and values are computed from one latent",
        "attention_sinks": "its heads have no sinks",
        "output_gate": "its heads have no gates",
        "attention_chunk": "its tokens attend to all earlier tokens or to a window of tokens",
        "attention_scale": "its scores are divided by the square root of the width of a key",
        "attention_softcap": "its scores have no soft cap",
        "partial_rotary_factor": "rope_head_dim says which channels are rotated",
        "proportional_rope": "rope_head_dim says which channels are rotated",
    }
    for key, why in unused.items():
        value, unset = getattr(m, key), type(m).model_fields[key].default
        if value != unset:
            default = {None: "null", False: "false"}.get(unset, unset)
            yield Problem(f"model.{key}", value, f"{path} is set, and {why}", f"try {default}, {off}")
    yield from _latent_rules(LatentMixerConfig().resolved(m))


def _latent_rules(record: LatentRecord) -> Iterator[Problem]:
    """Yield the rules that a complete record breaks, with paths of the sections of the model."""
    path = "model.latent_attention"
    if record.position_embedding not in ("rope", "none"):
        rule = f"{path} is set, and its rope_head_dim channels have rotary positions or none"
        works = "try rope, none, or leave model.latent_attention out"
        yield Problem("model.position_embedding", record.position_embedding, rule, works)
    if record.rope_head_dim % 2:
        rule = "rotary embeddings rotate pairs, so it must be even"
        yield Problem(f"{path}.rope_head_dim", record.rope_head_dim, rule, f"try {record.rope_head_dim + 1}")
    if record.value_head_dim > record.channels:
        rule = (
            f"wider than keys (nope_head_dim + rope_head_dim = {record.channels}), but values are padded to this width"
        )
        yield Problem(f"{path}.value_head_dim", record.value_head_dim, rule, f"try {record.channels} or less")
