"""Compressed attention (DeepSeek-V4): its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.attention.record import RotaryKeys
from megafp8.section import Channels, Chosen, Heads, NonNegative, Tokens
from megafp8.spec import ModelSection, PartRecord, RunConfig

_OF_MODEL = ("num_attention_heads", "head_dim", "sliding_window", *RotaryKeys.model_fields)


class CompressedAttentionConfig(PartRecord, RotaryKeys):
    """Attention of DeepSeek-V4 to the latest tokens and to entries that each stand for several earlier ones. All heads
    share one key, which is the value, too."""

    module: ClassVar[str] = "megafp8.layers.compressed_attention.module:CompressedAttention"
    tensor_prefix: ClassVar[str] = "compressed_attention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        "q_down": "attn.wq_a", "q_norm": "attn.q_norm", "q_up": "attn.wq_b", "kv": "attn.wkv",
        "kv_norm": "attn.norm", "sink.weight": "attn.attn_sink", "output_down": "attn.wo_a", "proj": "attn.wo_b",
        "entry_kv": "attn.compressor.wkv", "entry_gate": "attn.compressor.wgate",
        "entry_position.weight": "attn.compressor.ape", "entry_norm": "attn.compressor.norm",
        "index_q": "attn.indexer.wq_b", "index_weights": "attn.indexer.weights_proj",
        "index_kv": "attn.indexer.compressor.wkv", "index_gate": "attn.indexer.compressor.wgate",
        "index_position.weight": "attn.indexer.compressor.ape", "index_norm": "attn.indexer.compressor.norm",
    }  # fmt: skip

    kind: Literal["compressed_attention"] = "compressed_attention"
    """Compressed attention."""
    num_attention_heads: Heads = 1
    """Number of query heads."""
    head_dim: Channels | None = None
    """Width of a head's query and of the key that all heads share. Default: hidden_size / num_attention_heads."""
    sliding_window: Tokens | None = None
    """Each token attends to this many latest tokens, including itself. Default: that of the model."""
    q_rank: Channels = 1024
    """Width of the latent that queries are computed from (q_lora_rank)."""
    output_groups: Heads = 8
    """Groups of heads that are each projected to output_rank channels (o_groups)."""
    output_rank: Channels = 1024
    """Channels of a group of heads before the output projection (o_lora_rank)."""
    compress_rate: Tokens | None = None
    """Each entry stands for this many tokens, counted from the start of a document, and is seen by tokens after them
    and the last of them (compress_rates). Default: there are no entries."""
    top_k: Chosen | None = None
    """Each token attends to this many entries, which an indexer chooses (index_topk), and an entry is computed from the
    tokens of the entry before, too (compressed sparse attention). Of equal scores the earlier one is chosen. Default:
    to all of them (heavily compressed attention)."""
    index_heads: Heads = 64
    """Number of the indexer's heads (index_n_heads)."""
    index_head_dim: Channels = 128
    """Channels of their queries, and of an entry's key that they share (index_head_dim)."""
    kl_loss: NonNegative = 1.0
    """Weight of the indexer's loss, as that of model.sparse_attention: the divergence of its scores' softmax over the
    chosen entries from the mean of the heads' attention probabilities of these."""

    def resolved(self, model: ModelSection) -> CompressedAttentionConfig:
        values: dict[str, Any] = {name: getattr(model, name) for name in _OF_MODEL} | self.given
        values["head_dim"] = values["head_dim"] or model.hidden_size // values["num_attention_heads"]
        return CompressedAttentionConfig.model_construct(**values)

    @property
    def channels(self) -> int:
        """Width of a head's query, and of a key."""
        assert self.head_dim is not None, "the record is not resolved"
        return self.head_dim

    @property
    def rotary_channels(self) -> int:
        """The last channels of a head, which are rotated."""
        return int(self.channels * self.partial_rotary_factor)

    @property
    def series(self) -> int:
        """Runs of compress_rate tokens that an entry is computed from."""
        return 1 if self.top_k is None else 2

    @property
    def tokens_before(self) -> int:
        """Tokens that have to be known before one, to compute an entry that ends with it."""
        return 0 if self.compress_rate is None else self.series * self.compress_rate - 1

    @property
    def shares_context(self) -> bool:
        return self.compress_rate is None

    @property
    def is_recurrent(self) -> bool:
        # What an entry is computed of is passed from token to token.
        return self.compress_rate is not None

    @property
    def no_qk_clip(self) -> str:
        return "compressed attention does not record its logits"

    @property
    def index_loss(self) -> float | None:
        return self.kl_loss if self.top_k is not None else None

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_attention_heads": self.num_attention_heads, "output_groups": self.output_groups}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return "q_up", "proj"

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        record = self.resolved(model)
        heads, groups, d, r = record.num_attention_heads, self.output_groups, record.channels, record.rotary_channels
        if record.sliding_window is None:
            rule = "tokens after the last entry are attended to in a window"
            yield Problem(f"{path}.sliding_window", None, rule, "try 128")
        if record.position_embedding != "rope":
            rule = "the layer's queries and keys are rotated"
            yield Problem(f"{path}.position_embedding", record.position_embedding, rule, "try rope")
        if heads % groups:
            rule = f"num_attention_heads ({heads}) is not a multiple of it"
            yield Problem(f"{path}.output_groups", groups, rule, divisors(heads, groups))
        if d % 2:
            yield Problem(f"{path}.head_dim", d, "it must be even", f"try {d + 1}")
        if r % 2 or r == 0:
            rule = f"{r} of head_dim ({d}) channels would be rotated, in pairs"
            works = f"try {max(r // 2, 1) * 2 / d:g}"
            yield Problem(f"{path}.partial_rotary_factor", record.partial_rotary_factor, rule, works)
        if record.longrope is not None:
            yield Problem(f"{path}.longrope", "set", "entries of one length are those of any other", "leave it out")
        if self.top_k is not None and self.compress_rate is None:
            rule = "without compress_rate there are no entries to choose from"
            yield Problem(f"{path}.top_k", self.top_k, rule, "give compress_rate, or leave it out")
        if self.top_k is not None and self.index_head_dim < r:
            rule = f"below the channels that are rotated ({r})"
            yield Problem(f"{path}.index_head_dim", self.index_head_dim, rule, f"try {r} or more")
        if model.attention_dropout:
            rule = f"probabilities of {path} have no dropout"
            yield Problem("model.attention_dropout", model.attention_dropout, rule, "try 0")

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        parts = 2 * config.parallel.context
        if parts > 2 and config.training.seq_length < parts * self.tokens_before:
            rule = f"{path} needs {self.tokens_before} tokens in each of {parts} parts of a sequence"
            works = f"try {parts * (self.tokens_before + 1)}, or a smaller parallel.context"
            yield Problem("training.seq_length", config.training.seq_length, rule, works)
        if config.data.prefix_lm is not None:
            rule = f"layers of {path} see earlier tokens only, and a prefix sees later ones"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")
