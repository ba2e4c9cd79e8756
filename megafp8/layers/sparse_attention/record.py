"""Sparse attention of latent attention (DeepSeek Sparse Attention): its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megafp8.host.problems import Problem
from megafp8.layers.latent_attention.record import LatentRecord
from megafp8.section import Channels, Chosen, Heads, NonNegative, Section
from megafp8.spec import ModelSection, RunConfig


class SparseAttentionKeys(Section):
    """The keys of an indexer."""

    index_heads: Heads = 64
    """Number of the indexer's heads (index_n_heads)."""
    index_head_dim: Channels = 128
    """Channels of their queries, and of the key that they share (index_head_dim). The first rope_head_dim are
    rotated."""
    top_k: Chosen = 2048
    """Tokens that each token attends to (index_topk). Of equal scores the earlier token is chosen."""
    index_rope: Literal["halves", "neighbors"] = "halves"
    """Which channels of the indexer are rotated as pairs: those of the two halves (DeepSeek-V3.2), or neighbouring ones
    (GLM-5)."""
    kl_loss: NonNegative = 1.0
    """Weight of the indexer's loss, its only gradient: the divergence of its scores' softmax over the chosen tokens
    from the mean of the heads' attention probabilities. A mean over tokens, added up over layers; it is differentiated,
    not reported in the loss."""
    warmup: bool = False
    """Dense warm-up: tokens attend to all earlier tokens, and the indexer learns from that, for a model that was
    trained without one."""


class SparseAttentionConfig(SparseAttentionKeys):
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556), of a model with latent_attention: a small indexer
    scores all earlier tokens, and each token attends to the top_k of them only."""

    index_heads: Heads
    """Number of the indexer's heads (index_n_heads)."""
    top_k: Chosen
    """Tokens that each token attends to (index_topk). Of equal scores the earlier token is chosen."""


class SparseLatentMixerConfig(LatentRecord, SparseAttentionKeys):
    """Multi-head latent attention to the tokens that an indexer chooses. Keys of the indexer that are not given have
    the values of the section model.sparse_attention."""

    module: ClassVar[str] = "megafp8.layers.sparse_attention.module:SparseLatentAttention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        **LatentRecord.hugging_face,
        "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk",
        "index_k_norm": "self_attn.indexer.k_norm", "index_weights": "self_attn.indexer.weights_proj",
    }  # fmt: skip

    kind: Literal["sparse_latent_attention"] = "sparse_latent_attention"
    """Multi-head latent attention to chosen tokens."""

    def _section_keys(self, model: ModelSection) -> dict[str, Any]:
        section = model.sparse_attention
        return {} if section is None else {name: getattr(section, name) for name in SparseAttentionKeys.model_fields}

    @property
    def no_qk_clip(self) -> str:
        return "sparse attention does not record its logits"

    @property
    def index_loss(self) -> float | None:
        return float(self.kl_loss)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return "q_up", "proj"

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        if config.data.prefix_lm is not None:
            rule = "the indexer of model.sparse_attention scores earlier tokens only, and a prefix sees later ones"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if model.sparse_attention is None and not {"index_heads", "top_k"} <= self.given.keys():
            rule = "there is no section model.sparse_attention, and the indexer's heads and top_k are not given"
            yield Problem(f"{path}.kind", self.kind, rule, "give model.sparse_attention")
            return
        yield from super().problems(model, path)
        if model.sparse_attention is None:
            yield from _indexer_rules(self.resolved(model), model, path)


def sparse_attention(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules about the section model.sparse_attention that are broken in any run."""
    if m.sparse_attention is None:
        return
    path = "model.sparse_attention"
    if m.latent_attention is None:
        works = f"give model.latent_attention, or leave {path} out"
        yield Problem(path, "set", "its keys are those of latent attention", works)
        return
    yield from _indexer_rules(SparseLatentMixerConfig().resolved(m), m, path)


def _indexer_rules(record: SparseLatentMixerConfig, m: ModelSection, path: str) -> Iterator[Problem]:
    """Yield the rules that a complete record of sparse attention breaks; its keys are at `path`."""
    off = f"or leave {path} out"
    if record.q_rank is None:
        rule = f"{path} is set, whose indexer reads the query latent"
        yield Problem("model.latent_attention.q_rank", None, rule, f"give a width, {off}")
    if record.index_head_dim < record.rope_head_dim:
        rule = f"below model.latent_attention.rope_head_dim ({record.rope_head_dim}), the channels that are rotated"
        yield Problem(f"{path}.index_head_dim", record.index_head_dim, rule, f"try {record.rope_head_dim} or more")
    if m.sliding_window is not None:
        rule = f"{path} is set, and it chooses among all earlier tokens"
        yield Problem("model.sliding_window", m.sliding_window, rule, f"try null, {off}")
    if record.position_embedding == "none":
        rule = f"{path} is set, whose heads and indexer have rotary positions"
        yield Problem("model.position_embedding", "none", rule, f"try rope, {off}")
    if record.query_scaling is not None:
        rule = f"{path} is set, whose queries are not scaled by position"
        yield Problem("model.query_scaling", "set", rule, f"leave it out, {off}")
    if m.attention_dropout:
        rule = f"{path} is set, and its probabilities have no dropout"
        yield Problem("model.attention_dropout", m.attention_dropout, rule, f"try 0, {off}")
