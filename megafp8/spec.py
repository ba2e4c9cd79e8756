"""The network of a run, resolved: a record of every layer, and the facts that follow from them.

The config (`megafp8.config`) is what a user writes: some keys, in one of two spellings. `megafp8.config.resolve` makes
a `ModelSpec` of it, once. Models, conversion, the planner, inference and `prove` read the spec and never the model
section of the config, so nothing has to be looked up or derived again while a model runs.

A record of a part (`PartRecord`) holds the keys of one mixer or feed-forward network. In the config it holds the keys
that the user gave; in a `LayerSpec` it is complete.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from megafp8.host.problems import Problem
from megafp8.section import PartialSection

if TYPE_CHECKING:
    from typing_extensions import Self

Architecture = Literal["gpt", "bert", "t5"]
NormPosition = Literal["pre", "output", "both", "post"]

ModelSection: TypeAlias = Any
"""`ModelConfig` of `megafp8.config.schema`, which is made of records and so stands above this module."""

RunConfig: TypeAlias = Any
"""`Config` of `megafp8.config.schema`."""


class PartRecord(PartialSection):
    """Record of a mixer or of a feed-forward network. Keys that are not given have the model section's values."""

    module: ClassVar[str]
    """Where its module is defined, as `module:class`."""

    tensor_prefix: ClassVar[str]
    """Prefix of its tensors' names within a layer: layers.0.<tensor_prefix>.*."""

    present: ClassVar[bool] = True
    """Whether the layer has this part, with a norm and weights."""

    hugging_face: ClassVar[Mapping[str, str]] = {}
    """Names of its modules, or parameters, in the layers of most Hugging Face families;
    `conversion.huggingface.families` has the
    names of other families. Names of experts have a * for the number."""

    megatron: ClassVar[Mapping[str, str]] = {}
    """Names of its modules, or parameters, in Megatron core's layers; several modules may be rows of one tensor."""

    def resolved(self, model: ModelSection) -> Self:
        """Return the complete record: one value for each key."""
        return self

    # --- Facts about a complete record ---

    @property
    def shares_context(self) -> bool:
        """Whether sequences that begin alike can share what is computed from their beginning."""
        return not self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """Whether it passes a state from token to token instead of attending to tokens."""
        return False

    @property
    def no_qk_clip(self) -> str | None:
        """Reason why weights cannot be scaled to lower its attention logits. Empty if they can; None without such
        logits."""
        return None

    @property
    def normalizes_input(self) -> bool:
        """Whether the part normalizes its input itself, so that the layer has no norm before it."""
        return False

    @property
    def index_loss(self) -> float | None:
        """Weight of the loss of its indexer; None without an indexer."""
        return None

    @property
    def has_router_loss(self) -> bool:
        """Whether its router has a loss that is differentiated and not reported in the model's loss."""
        return False

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the linear layers that LoRA can adapt."""
        return ()

    # --- Rules, for the checks of a config ---

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the sizes, by key, that tensor parallelism divides between its ranks. The record is complete."""
        return {}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that its keys at `path` break in any run."""
        return iter(())

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the rules between its keys at `path` and other sections that a run breaks."""
        return iter(())


@dataclass(frozen=True)
class LayerSpec:
    """One layer: complete records of its parts, and its place in the model.

    Args:
        norm_position: Where its parts have their norms.
        is_decoder: Whether it belongs to T5's decoder.
        is_prediction: Whether it is a depth of multi-token prediction.
        keys_are_read: Whether later layers read its keys and values.
    """

    mixer: Any
    ffn: Any
    norm_position: NormPosition
    is_decoder: bool = False
    is_prediction: bool = False
    keys_are_read: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward network has experts."""
        return bool(self.ffn.kind == "moe")


@dataclass(frozen=True)
class NormSpec:
    """Norms of the residual stream.

    Args:
        kind: `rmsnorm` or `layernorm`.
        eps: Number added to the variance.
        weighted: Whether norms multiply by learned weights.
        zero_centered: Whether norms multiply by 1 + weight.
    """

    kind: Literal["rmsnorm", "layernorm"]
    eps: float
    weighted: bool
    zero_centered: bool


@dataclass(frozen=True)
class StemSpec:
    """Embeddings: everything before the first layer.

    Args:
        vocab_size: Number of tokens; None until the tokenizer is known.
        padded_vocab_size: Rows of the embedding and of the output layer, a multiple of `vocab_multiple`; None until the
            tokenizer is known.
        position_embedding: How positions enter the model, as in model.position_embedding.
        max_position_embeddings: Rows of the learned position table, or None for the sequence length of training.
        relative_buckets, relative_distance: Number of learned biases of scores, and the distance from which they share
            one (T5).
        normalizes: Whether embeddings are normalized.
        multiplier: Factor of embeddings.
        token_types: Number of token types with an embedding.
        per_layer_width: Channels of the per-layer embeddings, or 0 without any.
    """

    vocab_size: int | None
    vocab_multiple: int
    padded_vocab_size: int | None
    position_embedding: Literal["rope", "learned", "alibi", "relative", "none"]
    max_position_embeddings: int | None
    relative_buckets: int
    relative_distance: int
    normalizes: bool
    multiplier: float
    token_types: int
    per_layer_width: int

    @property
    def known_vocab_size(self) -> int:
        """Number of tokens, once the tokenizer is known."""
        assert self.vocab_size is not None, "vocab_size is resolved from the tokenizer before the model is built"
        return self.vocab_size

    @property
    def rows(self) -> int:
        """Rows of the embedding and of the output layer, once the tokenizer is known."""
        assert self.padded_vocab_size is not None, "vocab_size is resolved from the tokenizer before the model is built"
        return self.padded_vocab_size


@dataclass(frozen=True)
class HeadSpec:
    """Output layer and losses: everything after the last layer.

    Args:
        normalizes: Whether a norm comes first.
        activation: GELU before the output layer of BERT, or None.
        tied: Whether the output layer's weight is the embedding's.
        logits_divisor: Number that logits are divided by.
        logit_softcap: Bound of logits, or None.
        binary: Whether BERT also predicts the order of two sentences.
        extra_losses: Number of losses in addition to the loss of tokens: depths of multi-token prediction, or the
            binary head.
        extra_losses_factor: Weight of their mean in the loss that is differentiated.
    """

    normalizes: bool
    activation: Literal["gelu", "gelu_tanh"] | None
    tied: bool
    logits_divisor: float
    logit_softcap: float | None
    binary: bool
    extra_losses: int
    extra_losses_factor: float


@dataclass(frozen=True)
class ModelSpec:
    """A network, complete. `megafp8.config.resolve` makes it from either spelling of the config.

    Args:
        num_layers: Number of blocks; in T5 of the encoder.
        num_blocks: Number of blocks that pipeline stages divide between them: with those of T5's decoder.
        layers: All layers: blocks, then depths of multi-token prediction.
        kinds: For each layer the first layer of its kind. Layers of one kind differ in their number alone.
        kv_sources: Layers whose keys and values others read, and the last layer that reads each.
        causal: Whether a token attends to earlier tokens only.
        cuts_documents: Whether context parallelism cuts each document into parts, rather than the sample.
        hyper_connections: Section model.hyper_connections, or None with one residual stream.
        stream_width: Channels that flow from layer to layer: of all residual streams.
        hidden_init_std: Standard deviation of the initial weights of blocks.
        output_init_std: Standard deviation of the initial weights whose output is added to the residual stream.
        width_multiplier: Ratio of the width to the width of muP's base model; 1 without muP.
        activation: Activation of the model section, for parts outside of feed-forward networks.
        lora_targets: Linear layers that LoRA can adapt; in a model with experts, of mixers only.
        keys: Keys of the model section that this spec was made from. For writing configs; nothing else reads them.
    """

    architecture: Architecture
    hidden_size: int
    num_layers: int
    num_blocks: int
    layers: tuple[LayerSpec, ...]
    kinds: tuple[int, ...]
    stem: StemSpec
    head: HeadSpec
    norm: NormSpec
    kv_sources: Mapping[int, int]
    causal: bool
    cuts_documents: bool
    parallel_block: bool
    residual_multiplier: float
    layer_scalar: bool
    hyper_connections: Any
    stream_width: int
    linear_bias: bool
    activation: Any
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    hidden_init_std: float
    output_init_std: float
    width_multiplier: float
    has_experts: bool
    has_indexers: bool
    has_auxiliary_loss: bool
    lora_targets: tuple[str, ...]
    keys: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def indices(self) -> range:
        """Numbers of all layers, as in their tensors' names."""
        return range(len(self.layers))

    @property
    def num_prediction_layers(self) -> int:
        """Depths of multi-token prediction."""
        return len(self.layers) - self.num_blocks

    @property
    def attention_widths(self) -> list[int]:
        """Widths of queries and keys of softmax attention, each once; empty without such layers."""
        mixers = (layer.mixer for layer in self.distinct_layers)
        return [*dict.fromkeys(mixer.channels for mixer in mixers if mixer.present and not mixer.is_recurrent)]

    @property
    def embeds_on_last_stage(self) -> bool:
        """Whether the last pipeline stage needs the embedding's weight, too."""
        return self.head.tied or self.num_prediction_layers > 0

    @property
    def has_layer_tail(self) -> bool:
        """Whether layers change the residual stream after their parts."""
        return self.layer_scalar or self.stem.per_layer_width > 0

    @property
    def distinct_layers(self) -> list[LayerSpec]:
        """One layer of each kind."""
        return [self.layers[index] for index in sorted(set(self.kinds))]

    @property
    def expert_records(self) -> list[Any]:
        """Records of the feed-forward networks with experts, each kind of experts once."""
        records: list[Any] = []
        for layer in self.distinct_layers:
            if layer.has_experts and layer.ffn not in records:
                records.append(layer.ffn)
        return records
