"""Config keys and rules of Mamba-2 after a transformer that several layers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from megafp8.host.problems import Problem
from megafp8.layers.attention.record import AttentionConfig
from megafp8.layers.mamba2.record import Mamba2Config
from megafp8.layers.mlp.record import MlpConfig
from megafp8.section import Channels, Count
from megafp8.spec import ModelSection, RunConfig


class SharedAttentionConfig(Mamba2Config):
    """Mamba-2 whose input is the residual stream plus the output of a shared transformer (Zamba2, arXiv:2411.15242).

    The transformer consists of attention to the residual stream and the token embeddings, side by side, and an MLP. All
    layers of a kind share its weights; each layer adds adapters of low rank to them. The other keys are Mamba-2's.
    """

    module: ClassVar[str] = "megafp8.layers.shared_attention.module:SharedAttention"
    tensor_prefix: ClassVar[str] = "shared_attention"
    hugging_face: ClassVar[Mapping[str, str]] = {}

    kind: Literal["shared_attention"] = "shared_attention"  # type: ignore[assignment]
    """Kind of mixer: Mamba-2 after a shared transformer."""
    shared_block: Count = 0
    """Number of the transformer. Another kind of layer with another number shares another one (num_mem_blocks)."""
    adapter_rank: Channels = 128
    """Rank of the adapters."""
    adapt_attention: bool = False
    """Adapt queries, keys and values, in addition to the MLP (use_shared_attention_adapter)."""
    attention: AttentionConfig | None = None
    """Keys of the transformer's attention that differ from the model section."""
    mlp: MlpConfig | None = None
    """Keys of the transformer's MLP that differ from the model section."""

    def resolved(self, model: ModelSection) -> SharedAttentionConfig:
        """Return the complete record, with the records of attention and MLP."""
        parts = {"attention": self.attention or AttentionConfig(), "mlp": self.mlp or MlpConfig()}
        return self.model_copy(update={name: part.resolved(model) for name, part in parts.items()})

    @property
    def normalizes_input(self) -> bool:
        """Whether the mixer normalizes its input itself: True."""
        return True

    @property
    def shares_weights(self) -> bool:
        """Whether all layers of a kind share weights: True."""
        return True

    @property
    def head_width(self) -> int | None:
        """Head width of the transformer's attention."""
        return None if self.attention is None else self.attention.head_width

    @property
    def no_qk_clip(self) -> str:
        """Reason why QK-Clip cannot scale the weights of queries and keys."""
        return "in shared_attention several layers share the weights of queries and keys"

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the sizes of all parts that tensor parallelism divides."""
        parts = [part.widths(model) for part in (self.attention, self.mlp) if part is not None]
        return {**super().widths(model), **parts[0], **parts[1]}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys at `path` break in any run."""
        yield from super().problems(model, path)
        if self.attention is not None:
            yield from self.attention.model_copy(update={"kv_layer": None}).problems(model, f"{path}.attention")
            if self.attention.kv_layer is not None:
                yield Problem(f"{path}.attention.kv_layer", self.attention.kv_layer, "not supported", "leave it out")
        m, rule = model, f"layers of {path} read the embeddings or share weights, and do not support it"
        excluded = {
            "architecture": m.architecture != "gpt", "norm_position": m.norm_position == "post",
            "parallel_block": m.parallel_block, "hyper_connections": m.hyper_connections,
            "mtp_num_layers": m.mtp_num_layers, "attention_dropout": m.attention_dropout,
        }  # fmt: skip
        for key in (key for key, is_excluded in excluded.items() if is_excluded):
            shown = "(a section)" if key == "hyper_connections" else getattr(m, key)
            yield Problem(f"model.{key}", shown, rule, "leave it out")
        numbers = [(kind, getattr(x.mixer, "shared_block", None)) for kind, x in zip(m.spec.kinds, m.spec.layers)]
        if len({kind for kind, number in numbers if number == self.shared_block}) > 1:
            rule = "two kinds of layers have this number, but only equal layers share a transformer"
            yield Problem(f"{path}.shared_block", self.shared_block, rule, "give each kind another number")

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the rules that a run breaks, including pipeline parallelism."""
        yield from super().run_problems(config, path)
        if config.parallel.pipeline > 1:
            rule = f"layers of {path} share weights and read the embeddings, but stages send only the residual stream"
            yield Problem("parallel.pipeline", config.parallel.pipeline, rule, "try 1, with parallel.tensor or fsdp")
