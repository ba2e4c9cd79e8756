"""Config keys of sparse latent attention (DeepSeek Sparse Attention) and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from megafp8.host.problems import Problem
from megafp8.layers.latent_attention.record import LatentRecord
from megafp8.section import Channels, Chosen, Heads, NonNegative, Section
from megafp8.spec import ModelSection, RunConfig


class SparseAttentionKeys(Section):
    """Config keys of an indexer."""

    index_heads: Heads = 64
    """Number of the indexer's heads (index_n_heads)."""
    index_head_dim: Channels = 128
    """Number of channels of the indexer's queries and of the key that its heads share (index_head_dim). The first
    rope_head_dim channels are rotated."""
    top_k: Chosen = 2048
    """Number of tokens to which each token attends (index_topk). Among tokens with equal scores, the earlier ones are
    chosen."""
    index_rope: Literal["halves", "neighbors"] = "halves"
    """Layout of the indexer's rotated pairs of channels: halves pairs the two halves (DeepSeek-V3.2), neighbors pairs
    neighboring channels (GLM-5)."""
    kl_loss: NonNegative = 1.0
    """Weight of the indexer's loss, from which the indexer gets its only gradient. The loss is the divergence of the
    softmax of the indexer's scores over the chosen tokens from the mean of the heads' attention probabilities. It is
    averaged over tokens and summed over layers. It adds gradients but is not part of the reported loss."""
    warmup: bool = False
    """Dense warm-up for a model that was trained without an indexer: tokens attend to all earlier tokens, and the
    indexer learns from these probabilities."""


class SparseAttentionConfig(SparseAttentionKeys):
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556) in a model with latent_attention.

    A small indexer scores all earlier tokens, and each token attends only to the top_k tokens with the highest scores.
    """

    index_heads: Heads
    """Number of the indexer's heads (index_n_heads)."""
    top_k: Chosen
    """Number of tokens to which each token attends (index_topk). Among tokens with equal scores, the earlier ones are
    chosen."""


class SparseLatentMixerConfig(LatentRecord, SparseAttentionKeys):
    """Multi-head latent attention to the tokens that an indexer chooses.

    Missing keys of the indexer have the values of the section model.sparse_attention.
    """

    module: ClassVar[str] = "megafp8.layers.sparse_attention.module:SparseLatentAttention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        **LatentRecord.hugging_face,
        "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk",
        "index_k_norm": "self_attn.indexer.k_norm", "index_weights": "self_attn.indexer.weights_proj",
    }  # fmt: skip

    kind: Literal["sparse_latent_attention"] = "sparse_latent_attention"
    """Multi-head latent attention to chosen tokens."""
    shared_indexer: bool = False
    """Attend to the tokens that the nearest earlier layer with an indexer chose, so that these layers have no indexer
    (indexer_types shared in GLM-5.2, arXiv:2603.12201). The indexer learns only from the attention of its own layer.
    Both layers must be in one pipeline stage. Layers of multi-token prediction always have an indexer."""

    def _section_keys(self, model: ModelSection) -> dict[str, Any]:
        section = model.sparse_attention
        return {} if section is None else {name: getattr(section, name) for name in SparseAttentionKeys.model_fields}

    @property
    def no_qk_clip(self) -> str:
        """Reason why QK-Clip is not supported: the logits are not recorded."""
        return "sparse attention does not record its logits"

    @property
    def index_loss(self) -> float | None:
        """Weight of the indexer's loss; None without an indexer."""
        return None if self.shared_indexer else float(self.kl_loss)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the projections that LoRA can adapt."""
        return "q_up", "proj"

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the broken rule that attention to earlier tokens excludes prefixes."""
        if config.data.prefix_lm is not None:
            rule = "the indexer of model.sparse_attention scores only earlier tokens, but a prefix sees later tokens"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys of this kind of layer break."""
        if self.shared_indexer:
            yield from self._shared_indexer(model, path)
        elif model.sparse_attention is None and not {"index_heads", "top_k"} <= self.given.keys():
            rule = "there is no section model.sparse_attention, and the indexer's heads and top_k are not given"
            yield Problem(f"{path}.kind", self.kind, rule, "give model.sparse_attention")
            return
        yield from super().problems(model, path)
        if model.sparse_attention is None:
            yield from _indexer_rules(self.resolved(model), model, path)

    def _shared_indexer(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the broken rules about layers without an indexer."""
        for key in (key for key in SparseAttentionKeys.model_fields if key in self.given):
            rule = "shared_indexer is true, and the key belongs to an indexer"
            yield Problem(f"{path}.{key}", self.given[key], rule, "leave it out")
        spec = model.spec
        without = [i for i in range(model.num_layers) if getattr(spec.layers[i].mixer, "shared_indexer", False)]
        if (first := next((i for i in without if i not in spec.sources), None)) is not None:
            rule = f"no layer before layer {first} has an indexer"
            yield Problem(f"{path}.shared_indexer", True, rule, "give an earlier layer an indexer")


def sparse_attention(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules about the section model.sparse_attention that are broken in any run."""
    if m.sparse_attention is None:
        return
    path = "model.sparse_attention"
    if m.latent_attention is None:
        works = f"give model.latent_attention, or leave {path} out"
        yield Problem(path, "set", "it needs latent attention", works)
        return
    yield from _indexer_rules(SparseLatentMixerConfig().resolved(m), m, path)


def _indexer_rules(record: SparseLatentMixerConfig, m: ModelSection, path: str) -> Iterator[Problem]:
    """Yield the rules that a complete record of sparse attention breaks; its keys are at `path`."""
    off = f"or leave {path} out"
    if record.q_rank is None:
        rule = f"{path} is set, and its indexer reads the query latent"
        yield Problem("model.latent_attention.q_rank", None, rule, f"give a width, {off}")
    if record.index_head_dim < record.rope_head_dim:
        rule = f"below model.latent_attention.rope_head_dim ({record.rope_head_dim}), the number of rotated channels"
        yield Problem(f"{path}.index_head_dim", record.index_head_dim, rule, f"try {record.rope_head_dim} or more")
    if m.sliding_window is not None:
        rule = f"{path} is set, and it chooses among all earlier tokens"
        yield Problem("model.sliding_window", m.sliding_window, rule, f"try null, {off}")
    if record.position_embedding == "none":
        rule = f"{path} is set, and its heads and indexer have rotary positions"
        yield Problem("model.position_embedding", "none", rule, f"try rope, {off}")
    if record.query_scaling is not None:
        rule = f"{path} is set, and its queries are not scaled by position"
        yield Problem("model.query_scaling", "set", rule, f"leave it out, {off}")
    if m.attention_dropout:
        rule = f"{path} is set, and its probabilities have no dropout"
        yield Problem("model.attention_dropout", m.attention_dropout, rule, f"try 0, {off}")
