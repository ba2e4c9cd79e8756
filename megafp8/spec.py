"""Resolved network of a run: a complete record of every layer, and the facts that follow from the records.

The config (`megafp8.config`) is what a user writes: some keys, in one of two spellings. `megafp8.config.resolve` turns
it into a `ModelSpec` once. Models, conversion, the planner, inference and `prove` read the spec and never the model
section of the config, so nothing has to be looked up or derived again while a model runs.

A record of a part (`PartRecord`) holds the keys of one mixer or feed-forward network. In the config it holds the keys
that the user set; in a `LayerSpec` it is complete.

This module does not import torch.
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
NormPosition = Literal["pre", "output", "both", "mlp_both", "post"]

ModelSection: TypeAlias = Any
"""`ModelConfig` of `megafp8.config.schema`. That module is built from records and imports this one."""

RunConfig: TypeAlias = Any
"""`Config` of `megafp8.config.schema`."""


class PartRecord(PartialSection):
    """Record of a mixer or a feed-forward network. Keys that are not set take the values of the model section."""

    module: ClassVar[str]
    """Module that implements the part, as `module:class`."""

    tensor_prefix: ClassVar[str]
    """Prefix of the part's tensor names within a layer: layers.0.<tensor_prefix>.*."""

    present: ClassVar[bool] = True
    """Whether the layer has this part, with a norm and weights."""

    hugging_face: ClassVar[Mapping[str, str]] = {}
    """Names of the part's modules or parameters in the layers of most Hugging Face families.

    `conversion.huggingface.families` has the names of other families. In names of experts, * stands for the number.
    """

    megatron: ClassVar[Mapping[str, str]] = {}
    """Names of the part's modules or parameters in Megatron Core's layers; several may be rows of one tensor."""

    def resolved(self, model: ModelSection) -> Self:
        """Return the complete record, with a value for each key."""
        return self

    # --- Facts about a complete record ---

    @property
    def shares_context(self) -> bool:
        """Whether sequences with the same beginning can share the state computed from it."""
        return not self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """Whether the part passes a state from token to token instead of attending to tokens."""
        return False

    @property
    def shares_weights(self) -> bool:
        """Whether all layers of a kind share weights of the part."""
        return False

    @property
    def head_width(self) -> int | None:
        """Head width of queries and keys of the part's softmax attention; None without attention."""
        return None

    @property
    def no_qk_clip(self) -> str | None:
        """Reason why QK-clip cannot scale weights to lower the attention logits.

        Empty if it can; None if the part has no attention logits.
        """
        return None

    @property
    def normalizes_input(self) -> bool:
        """Whether the part normalizes its input itself, so that the layer has no norm before it."""
        return False

    @property
    def index_loss(self) -> float | None:
        """Weight of the indexer's loss; None without an indexer."""
        return None

    @property
    def has_router_loss(self) -> bool:
        """Whether the router has a loss that is differentiated but not reported in the model's loss."""
        return False

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the linear layers that LoRA can adapt."""
        return ()

    # --- Rules for config checks ---

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the sizes, by key, that tensor parallelism divides between its ranks. The record must be complete."""
        return {}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the record's keys at `path` break in any run."""
        return iter(())

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Yield the rules between the record's keys at `path` and other config sections that a run breaks."""
        return iter(())


@dataclass(frozen=True)
class LayerSpec:
    """Complete records of one layer's parts, and the layer's place in the model.

    Attributes:
        mixer: Record of the mixer.
        ffn: Record of the feed-forward network.
        norm_position: Position of the norms: at the inputs of the parts, at their outputs, at both, at the inputs and
            the output of the feed-forward network, or after the additions.
        is_decoder: Whether the layer belongs to T5's decoder.
        is_prediction: Whether the layer is a depth of multi-token prediction.
        is_read: Whether later layers read the layer's keys and values, or the tokens that its indexer chooses.
    """

    mixer: Any
    ffn: Any
    norm_position: NormPosition
    is_decoder: bool = False
    is_prediction: bool = False
    is_read: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether the feed-forward network has experts."""
        return bool(self.ffn.kind == "moe")


@dataclass(frozen=True)
class NormSpec:
    """Norms of the residual stream.

    Attributes:
        kind: Kind of norm, as in model.normalization.
        eps: Number added to the variance.
        weighted: Whether norms multiply by learned weights.
        zero_centered: Whether norms multiply by 1 + weight.
    """

    kind: Literal["rmsnorm", "layernorm", "layernorm_no_bias"]
    eps: float
    weighted: bool
    zero_centered: bool


@dataclass(frozen=True)
class StemSpec:
    """Embeddings: everything before the first layer.

    Attributes:
        vocab_size: Number of tokens; None until the tokenizer is known.
        vocab_multiple: Number that `padded_vocab_size` is a multiple of.
        padded_vocab_size: Rows of the embedding and of the output layer, a multiple of `vocab_multiple`; None until the
            tokenizer is known.
        position_embedding: How positions enter the model, as in model.position_embedding.
        max_position_embeddings: Rows of the learned position table; None means the sequence length of training.
        relative_buckets, relative_distance: Number of learned score biases, and the distance from which tokens share
            one bias (T5).
        normalizes: Whether embeddings are normalized.
        multiplier: Factor by which embeddings are multiplied.
        token_types: Number of token types with an embedding.
        per_layer_width: Channels of the per-layer embeddings; 0 without per-layer embeddings.
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
        """Number of tokens. Valid once the tokenizer is known."""
        assert self.vocab_size is not None, "vocab_size is resolved from the tokenizer before the model is built"
        return self.vocab_size

    @property
    def rows(self) -> int:
        """Rows of the embedding and of the output layer. Valid once the tokenizer is known."""
        assert self.padded_vocab_size is not None, "vocab_size is resolved from the tokenizer before the model is built"
        return self.padded_vocab_size


@dataclass(frozen=True)
class HeadSpec:
    """Output layer and losses: everything after the last layer.

    Attributes:
        normalizes: Whether the output layer's input is normalized.
        activation: GELU before the output layer of BERT; None for other models.
        tied: Whether the output layer shares the embedding's weight.
        logits_divisor: Number that logits are divided by.
        logit_softcap: Bound of the logits, or None.
        biased: Whether the output layer has a bias.
        binary: Whether BERT also predicts the order of two sentences.
        extra_losses: Number of losses in addition to the token loss: depths of multi-token prediction, or the binary
            head.
        extra_losses_factor: Weight of the mean of the extra losses in the differentiated loss.
    """

    normalizes: bool
    activation: Literal["gelu", "gelu_tanh"] | None
    tied: bool
    logits_divisor: float
    logit_softcap: float | None
    biased: bool
    binary: bool
    extra_losses: int
    extra_losses_factor: float


@dataclass(frozen=True)
class ModelSpec:
    """Complete description of a network. `megafp8.config.resolve` makes it from either spelling of the config.

    Attributes:
        num_layers: Number of blocks; for T5, the blocks of the encoder.
        num_blocks: Number of blocks that pipeline stages divide between them, including the blocks of T5's decoder.
        layers: All layers: blocks, then depths of multi-token prediction.
        kinds: Index of the first layer of the same kind, for each layer. Layers of one kind differ only in their
            number.
        sources: For each layer that reads keys and values, or chosen tokens, of an earlier layer, the earlier layer.
        causal: Whether a token attends only to earlier tokens.
        cuts_documents: Whether context parallelism splits each document into parts, instead of the whole sample.
        parallel_block: Whether attention and MLP read the same block input, as in model.parallel_block.
        hyper_connections: Section model.hyper_connections; None with one residual stream.
        stream_width: Channels that flow from layer to layer, over all residual streams.
        attention_bias: Whether the linear layers of attention have biases.
        mlp_bias: Whether the linear layers of MLPs and experts, and routers, have biases.
        hidden_init_std: Standard deviation of the initial weights of blocks.
        output_init_std: Standard deviation of the initial weights of layers that write to the residual stream.
        score_init_std: Standard deviation of the initial weights of routers and gates of shared experts.
        width_multiplier: Ratio of the width to the width of muP's base model; 1 without muP.
        activation: Activation of the model section, for parts outside feed-forward networks.
        lora_targets: Linear layers that LoRA can adapt; in a model with experts, only layers of mixers.
        keys: Keys of the model section that this spec was made from. Only used to write configs.
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
    sources: Mapping[int, int]
    causal: bool
    cuts_documents: bool
    parallel_block: bool | Literal["shared_norm"]
    residual_multiplier: float
    layer_scalar: bool
    hyper_connections: Any
    stream_width: int
    attention_bias: bool
    mlp_bias: bool
    activation: Any
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    hidden_init_std: float
    output_init_std: float
    score_init_std: float
    width_multiplier: float
    has_experts: bool
    has_indexers: bool
    has_auxiliary_loss: bool
    lora_targets: tuple[str, ...]
    keys: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def indices(self) -> range:
        """Indices of all layers, as in tensor names."""
        return range(len(self.layers))

    @property
    def num_prediction_layers(self) -> int:
        """Number of depths of multi-token prediction."""
        return len(self.layers) - self.num_blocks

    @property
    def attention_widths(self) -> list[int]:
        """Distinct head widths of queries and keys of softmax attention; empty without such layers."""
        widths = dict.fromkeys(layer.mixer.head_width for layer in self.distinct_layers)
        return [width for width in widths if width is not None]

    @property
    def embeds_on_last_stage(self) -> bool:
        """Whether the last pipeline stage also needs the embedding's weight."""
        return self.head.tied or self.num_prediction_layers > 0

    @property
    def has_layer_tail(self) -> bool:
        """Whether layers modify the residual stream after their parts."""
        return self.layer_scalar or self.stem.per_layer_width > 0

    @property
    def distinct_layers(self) -> list[LayerSpec]:
        """First layer of each kind."""
        return [self.layers[index] for index in sorted(set(self.kinds))]

    @property
    def expert_records(self) -> list[Any]:
        """Distinct records of the feed-forward networks with experts."""
        records: list[Any] = []
        for layer in self.distinct_layers:
            if layer.has_experts and layer.ffn not in records:
                records.append(layer.ffn)
        return records
