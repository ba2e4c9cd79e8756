"""Sparse attention of latent attention (DeepSeek Sparse Attention): its keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.config.errors import Problem
from megafp8.config.parts.base import ModelSection, PartConfig, RunConfig
from megafp8.config.parts.latent_attention import LatentMixerConfig
from megafp8.section import Channels, Chosen, Heads, NonNegative, Section


class SparseAttentionConfig(Section):
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556), of a model with latent_attention: a small indexer
    scores all earlier tokens, and each token attends to the top_k of them only."""

    index_heads: Heads
    """Number of the indexer's heads (index_n_heads)."""
    index_head_dim: Channels = 128
    """Channels of their queries, and of the key that they share (index_head_dim). The first rope_head_dim are
    rotated."""
    top_k: Chosen
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


class SparseLatentMixerConfig(PartConfig):
    """Multi-head latent attention to the tokens that an indexer chooses, as the sections model.latent_attention and
    model.sparse_attention say."""

    module: ClassVar[str] = "megafp8.models.sparse_latent_attention:SparseLatentAttention"
    tensor_prefix: ClassVar[str] = LatentMixerConfig.tensor_prefix
    hugging_face: ClassVar[Mapping[str, str]] = {
        **LatentMixerConfig.hugging_face,
        "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk",
        "index_k_norm": "self_attn.indexer.k_norm", "index_weights": "self_attn.indexer.weights_proj",
    }  # fmt: skip

    kind: Literal["sparse_latent_attention"] = "sparse_latent_attention"
    """Multi-head latent attention to chosen tokens."""

    @property
    def no_qk_clip(self) -> str:
        return "sparse attention does not record its logits"

    def index_loss(self, model: ModelSection) -> float | None:
        return None if model.sparse_attention is None else float(model.sparse_attention.kl_loss)

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        return {"num_attention_heads": model.num_attention_heads}

    def lora_targets(self, model: ModelSection) -> tuple[str, ...]:
        return "q_up", "proj"

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        if config.data.prefix_lm is not None:
            rule = "the indexer of model.sparse_attention scores earlier tokens only, and a prefix sees later ones"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if model.sparse_attention is None:
            yield Problem(f"{path}.kind", self.kind, "there is no section model.sparse_attention", "give it")


def sparse_attention(m: ModelSection) -> Iterator[Problem]:
    """Rules about sparse attention that hold in any run."""
    sparse, latent, path = m.sparse_attention, m.latent_attention, "model.sparse_attention"
    if sparse is None:
        return
    off = f"or leave {path} out"
    if latent is None:
        yield Problem(path, "set", "its keys are those of latent attention", f"give model.latent_attention, {off}")
        return
    if latent.q_rank is None:
        rule = f"{path} is set, whose indexer reads the query latent"
        yield Problem("model.latent_attention.q_rank", None, rule, f"give a width, {off}")
    if sparse.index_head_dim < latent.rope_head_dim:
        rule = f"below model.latent_attention.rope_head_dim ({latent.rope_head_dim}), the channels that are rotated"
        yield Problem(f"{path}.index_head_dim", sparse.index_head_dim, rule, f"try {latent.rope_head_dim} or more")
    if m.sliding_window is not None:
        rule = f"{path} is set, and it chooses among all earlier tokens"
        yield Problem("model.sliding_window", m.sliding_window, rule, f"try null, {off}")
    if m.position_embedding == "none":
        rule = f"{path} is set, whose heads and indexer have rotary positions"
        yield Problem("model.position_embedding", "none", rule, f"try rope, {off}")
    if m.query_scaling is not None:
        rule = f"{path} is set, whose queries are not scaled by position"
        yield Problem("model.query_scaling", "set", rule, f"leave it out, {off}")
    if m.attention_dropout:
        rule = f"{path} is set, and its probabilities have no dropout"
        yield Problem("model.attention_dropout", m.attention_dropout, rule, f"try 0, {off}")
