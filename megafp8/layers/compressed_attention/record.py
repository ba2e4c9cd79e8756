"""Config keys of compressed attention (DeepSeek-V4) and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.attention.record import RotaryKeys
from megafp8.section import Channels, Chosen, Heads, NonNegative, Tokens
from megafp8.spec import ModelSection, PartRecord, RunConfig

_OF_MODEL = ("num_attention_heads", "head_dim", "sliding_window", *RotaryKeys.model_fields)


class CompressedAttentionConfig(PartRecord, RotaryKeys):
    """Attention of DeepSeek-V4 to the latest tokens, and to entries that each summarize several earlier tokens.

    All heads share one key, which is also the value.
    """

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
    """Number of latest tokens to which each token attends, including itself. Default: model.sliding_window."""
    q_rank: Channels = 1024
    """Width of the latent from which queries are computed (q_lora_rank)."""
    output_groups: Heads = 8
    """Number of groups of heads; each group is projected to output_rank channels (o_groups)."""
    output_rank: Channels = 1024
    """Number of channels to which a group of heads is projected before the output projection (o_lora_rank)."""
    compress_rate: Tokens | None = None
    """Number of tokens that an entry summarizes, counted from the start of a document (compress_rates). The last of
    these tokens and all later tokens see the entry. Default: there are no entries."""
    top_k: Chosen | None = None
    """Number of entries to which each token attends (index_topk). An indexer chooses them, and an entry is computed
    from the tokens of the previous entry, too (compressed sparse attention). Among entries with equal scores, the
    earlier ones are chosen. Default: each token attends to all entries (heavily compressed attention)."""
    index_heads: Heads = 64
    """Number of the indexer's heads (index_n_heads)."""
    index_head_dim: Channels = 128
    """Number of channels of the indexer's queries, and of the key of an entry that the indexer's heads share
    (index_head_dim)."""
    kl_loss: NonNegative = 1.0
    """Weight of the indexer's loss, as in model.sparse_attention: the divergence of the softmax of the indexer's scores
    over the chosen entries from the mean of the heads' attention probabilities of these entries."""

    def resolved(self, model: ModelSection) -> CompressedAttentionConfig:
        """Return the complete record, with missing keys taken from the model section."""
        values: dict[str, Any] = {name: getattr(model, name) for name in _OF_MODEL} | self.given
        values["head_dim"] = values["head_dim"] or model.hidden_size // values["num_attention_heads"]
        return CompressedAttentionConfig.model_construct(**values)

    @property
    def channels(self) -> int:
        """Width of a head's query and of a key."""
        assert self.head_dim is not None, "the record is not resolved"
        return self.head_dim

    @property
    def rotary_channels(self) -> int:
        """Number of the last channels of a head that are rotated."""
        return int(self.channels * self.partial_rotary_factor)

    @property
    def series(self) -> int:
        """Number of runs of compress_rate tokens from which an entry is computed."""
        return 1 if self.top_k is None else 2

    @property
    def tokens_before(self) -> int:
        """Number of earlier tokens needed to compute an entry that ends with a given token."""
        return 0 if self.compress_rate is None else self.series * self.compress_rate - 1

    @property
    def shares_context(self) -> bool:
        """Whether sequences that begin alike can share the keys of their beginning."""
        return self.compress_rate is None

    @property
    def is_recurrent(self) -> bool:
        """Whether a state is passed from token to token: the latest tokens, from which the next entry is computed."""
        return self.compress_rate is not None

    @property
    def no_qk_clip(self) -> str:
        """Reason why QK-Clip is not supported: the logits are not recorded."""
        return "compressed attention does not record its logits"

    @property
    def index_loss(self) -> float | None:
        """Weight of the indexer's loss; None without an indexer."""
        return self.kl_loss if self.top_k is not None else None

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the numbers of heads and of groups of heads, which tensor parallelism divides."""
        return {"num_attention_heads": self.num_attention_heads, "output_groups": self.output_groups}

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the projections that LoRA can adapt."""
        return "q_up", "proj"

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys of this kind of layer break."""
        record = self.resolved(model)
        heads, groups, d, r = record.num_attention_heads, self.output_groups, record.channels, record.rotary_channels
        if record.sliding_window is None:
            rule = "a window must cover the tokens after the last entry"
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
            rule = f"{r} of head_dim ({d}) channels would be rotated, but rotation needs pairs"
            works = f"try {max(r // 2, 1) * 2 / d:g}"
            yield Problem(f"{path}.partial_rotary_factor", record.partial_rotary_factor, rule, works)
        if record.longrope is not None:
            yield Problem(f"{path}.longrope", "set", "entries must not depend on sequence length", "leave it out")
        if self.top_k is not None and self.compress_rate is None:
            rule = "without compress_rate there are no entries to choose from"
            yield Problem(f"{path}.top_k", self.top_k, rule, "give compress_rate, or leave it out")
        if self.top_k is not None and self.index_head_dim < r:
            rule = f"below the number of rotated channels ({r})"
            yield Problem(f"{path}.index_head_dim", self.index_head_dim, rule, f"try {r} or more")
        if model.attention_dropout:
            rule = f"probabilities of {path} have no dropout"
            yield Problem("model.attention_dropout", model.attention_dropout, rule, "try 0")

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the broken rules between this kind of layer, context parallelism and prefixes."""
        parts = 2 * config.parallel.context
        if parts > 2 and config.training.seq_length < parts * self.tokens_before:
            rule = f"{path} needs {self.tokens_before} tokens in each of {parts} parts of a sequence"
            works = f"try {parts * (self.tokens_before + 1)}, or a smaller parallel.context"
            yield Problem("training.seq_length", config.training.seq_length, rule, works)
        if config.data.prefix_lm is not None:
            rule = f"layers of {path} see only earlier tokens, but a prefix sees later tokens"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")
