"""Config keys of attention to blocks of tokens that an indexer chooses, and their rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.host.problems import Problem
from megafp8.layers.attention.record import AttentionConfig
from megafp8.section import Chosen, NonNegative, Tokens
from megafp8.spec import ModelSection, RunConfig


class BlockSparseAttentionConfig(AttentionConfig):
    """Softmax attention to blocks of tokens that an indexer chooses for each group of query heads (MiniMax-M3)."""

    module: ClassVar[str] = "megafp8.layers.block_sparse_attention.module:BlockSparseAttention"
    hugging_face: ClassVar[Mapping[str, str]] = {
        **AttentionConfig.hugging_face, **{f"index_{x}": f"self_attn.indexer.{x}_proj" for x in "qk"},
        **{f"index_{x}_norm": f"self_attn.indexer.{x}_norm" for x in "qk"},
    }  # fmt: skip

    kind: Literal["block_sparse_attention"] = "block_sparse_attention"  # type: ignore[assignment]
    """Softmax attention to chosen blocks of tokens."""
    top_k: Chosen = 16
    """Number of blocks to which a token attends for each group of heads (index_topk_blocks). Among blocks with equal
    scores, the earlier ones are chosen."""
    block_size: Tokens = 128
    """Number of tokens of a block, counted from the start of a document (index_block_size)."""
    local_blocks: Chosen = 1
    """Number of the latest blocks that are always chosen, including the token's own block (index_local_blocks)."""
    kl_loss: NonNegative = 1.0
    """Weight of the indexer's loss, as in model.sparse_attention, with the mean probabilities of each group's heads."""

    @property
    def no_qk_clip(self) -> str:
        """Reason why QK-Clip is not supported: the logits are not recorded."""
        return "sparse attention does not record its logits"

    @property
    def index_loss(self) -> float:
        """Weight of the indexer's loss."""
        return float(self.kl_loss)

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys of this kind of layer break."""
        yield from super().problems(model, path)
        record, needed = self.resolved(model), {"position_embedding": "rope", "qk_norm": True}
        absent = ("sliding_window", "attention_chunk", "attention_softcap", "query_scaling", "kv_layer")
        needed |= dict.fromkeys(absent) | dict.fromkeys(("attention_sinks", "value_norm", "keys_as_values"), False)
        for key, value in {**needed, "output_gate": False}.items():
            if getattr(record, key) != value:
                yield Problem(f"{path}.{key}", getattr(record, key), f"{self.kind} lacks it", f"try {value!r}")
        if model.attention_dropout or model.architecture != "gpt":
            key = "attention_dropout" if model.attention_dropout else "architecture"
            rule = f"layers of kind {self.kind} lack it"
            yield Problem(f"model.{key}", getattr(model, key), rule, "try 0" if model.attention_dropout else "try gpt")
        if self.local_blocks > self.top_k:
            rule = f"above top_k ({self.top_k}), the number of all chosen blocks"
            yield Problem(f"{path}.local_blocks", self.local_blocks, rule, f"try {self.top_k} or less")

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the broken rule that attention to earlier tokens excludes prefixes."""
        if config.data.prefix_lm is not None:
            rule = f"layers of {path} see only earlier tokens, but a prefix sees later tokens"
            yield Problem("data.prefix_lm", "set", rule, "leave it out")
