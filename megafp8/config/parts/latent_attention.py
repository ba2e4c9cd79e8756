"""Multi-head latent attention: its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.config.errors import Problem
from megafp8.config.parts.base import ModelSection, PartConfig
from megafp8.section import Channels, PositiveFloat, Section, Tokens


class LatentAttentionConfig(Section):
    """Multi-head latent attention (DeepSeek-V2 and V3). Replaces head_dim and num_query_groups."""

    q_rank: Channels | None
    """Width of the latent that queries are computed from (q_lora_rank). null: they are computed from the residual
    stream (DeepSeek-V2-Lite)."""
    kv_rank: Channels
    """Width of the latent that keys and values are computed from (kv_lora_rank)."""
    nope_head_dim: Channels = 128
    """Channels of a head's query and key without positions (qk_nope_head_dim)."""
    rope_head_dim: Channels = 64
    """Channels of a head's query, and of the key that all heads share, with rotary positions
    (qk_rope_head_dim); without any if model.position_embedding is none."""
    value_head_dim: Channels = 128
    """Channels of a head's values (v_head_dim)."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of the norms of the latents. Default: model.norm_eps."""

    @property
    def channels(self) -> int:
        """Width of a head's query and key."""
        return self.nope_head_dim + self.rope_head_dim


class LatentMixerConfig(PartConfig):
    """Multi-head latent attention, as the section model.latent_attention says."""

    module: ClassVar[str] = "megafp8.models.latent_attention:LatentAttention"
    tensor_prefix: ClassVar[str] = "attention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        "q_down": "self_attn.q_a_proj", "kv_down": "self_attn.kv_a_proj_with_mqa",
        "q_norm": "self_attn.q_a_layernorm", "kv_norm": "self_attn.kv_a_layernorm",
        "q_up": "self_attn.q_b_proj", "kv_up": "self_attn.kv_b_proj",
    }  # fmt: skip

    kind: Literal["latent_attention"] = "latent_attention"
    """Multi-head latent attention."""
    sliding_window: Tokens | None = None
    """Each token attends to this many latest tokens, including itself."""
    position_embedding: Literal["rope", "none"] = "rope"
    """none: no channel of the layer's queries and keys is rotated. Default: that of the model."""

    def resolved(self, model: ModelSection) -> LatentMixerConfig:
        of_model = {key: getattr(model, key) for key in ("sliding_window", "position_embedding")}
        return LatentMixerConfig.model_construct(**of_model | self.given)

    @property
    def no_qk_clip(self) -> str:
        return ""

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_attention_heads": model.num_attention_heads}

    def lora_targets(self, model: ModelSection) -> tuple[str, ...]:
        latent = model.latent_attention
        if latent is None:  # which `problems` says
            return ()
        return "q" if latent.q_rank is None else "q_up", "kv_up", "proj"

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if model.latent_attention is None:
            yield Problem(f"{path}.kind", self.kind, "there is no section model.latent_attention", "give it")


def latent_attention(m: ModelSection) -> Iterator[Problem]:
    """Rules about heads of multi-head latent attention."""
    latent = m.latent_attention
    if latent is None:
        return
    path, off = "model.latent_attention", "or leave model.latent_attention out"
    unused = {
        "head_dim": "its heads have the widths nope_head_dim, rope_head_dim and value_head_dim",
        "num_query_groups": "each of its heads has a key and a value of its own",
        "linear_bias": "its layers have no biases",
        "qkv_bias": "its layers have no biases",
        "qk_norm": "it normalizes the latents instead",
        "value_norm": "it normalizes the latents instead",
        "keys_as_values": "keys and values are computed from one latent",
        "attention_sinks": "its heads have no sinks",
        "output_gate": "its heads have no gates",
        "attention_chunk": "its tokens attend to all earlier ones or those of a window",
        "attention_scale": "its scores are divided by the root of the width of a key",
        "attention_softcap": "its scores have no soft cap",
        "partial_rotary_factor": "rope_head_dim says which channels are rotated",
        "proportional_rope": "rope_head_dim says which channels are rotated",
    }
    for key, why in unused.items():
        value, unset = getattr(m, key), type(m).model_fields[key].default
        if value != unset:
            default = {None: "null", False: "false"}.get(unset, unset)
            yield Problem(f"model.{key}", value, f"{path} is set, and {why}", f"try {default}, {off}")
    if m.position_embedding not in ("rope", "none"):
        rule = f"{path} is set, and its rope_head_dim channels have rotary positions or none"
        yield Problem("model.position_embedding", m.position_embedding, rule, f"try rope, none, {off}")
    if latent.rope_head_dim % 2:
        rule = "rotary embeddings rotate pairs, so it must be even"
        yield Problem(f"{path}.rope_head_dim", latent.rope_head_dim, rule, f"try {latent.rope_head_dim + 1}")
    if latent.value_head_dim > m.channels:
        rule = f"wider than keys (nope_head_dim + rope_head_dim = {m.channels}), to whose width values are padded"
        yield Problem(f"{path}.value_head_dim", latent.value_head_dim, rule, f"try {m.channels} or less")
