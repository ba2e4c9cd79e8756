"""Base classes of the two parts of a layer, the mixer and the feed-forward network.

A part is built from its config record (`megafp8.spec.PartRecord`). It does not know where its tokens come from: whoever
runs a stage passes `Tokens`, which may be a micro-batch of training, a step of generation, or texts to score. Once per
micro-batch, `Mixer.inputs` derives from these tokens everything that the mixer reads in addition to the residual
stream, for example rotary tables, masks, or the recurrent state of each sequence. Layers that need equal tables share
them.

The planner also asks each part how much memory and time it needs (`LayerPart.saved`, `LayerPart.work`, ...).

Shapes: s tokens per sequence on this rank, b sequences, h hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from megafp8.fp8.speed_model import LinearSize
from megafp8.layers.attention.op import CoreAttention
from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext
from megafp8.layers.costs import AttentionWork, DispatchTraffic, KernelWork, MicroBatch
from megafp8.layers.recurrent.op import Recurrence
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat, LinearState
from megafp8.parallel.tensor.mappings import copy_to_tensor_parallel, gather_from_sequence_parallel
from megafp8.spec import PartRecord

if TYPE_CHECKING:
    from megafp8.layers.experts.router import Router
    from megafp8.layers.rotary.module import RotaryEmbedding

T = TypeVar("T")


AttendTo = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor], Tensor]
"""Attention that a layer implements itself: `attend(queries, keys, first, stop)` returns outputs `[s, b, ...]`.

`queries` are tensors `[s, b, ...]`, and `keys` are tensors `[t, b, ...]`. Each query attends to the keys from `first`
up to, but excluding, `stop`, both int64 `[1 or b, s]`.
"""


class TokenCache(NamedTuple):
    """Layout of what attention caches per token during generation: keys and values of this rank's heads.

    Attributes:
        groups: Number of key-value heads on this rank.
        width: Channels of one head's key.
        value_width: Channels of one head's value.
        every: Number of consecutive tokens that share one value, which is stored with the last of them.
    """

    groups: int
    width: int
    value_width: int
    every: int = 1


class StateCache(NamedTuple):
    """Shapes and dtypes of what a recurrence caches per sequence during generation; the tensors start as zeros."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class AttendToKeys(Protocol):
    """Function that runs a layer's own attention over the tokens of a micro-batch or of a generation step.

    Each token attends to itself and to the earlier tokens of its sequence or document.
    """

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], /, every: int = 1
    ) -> Tensor:
        """Run `attend` on the queries and keys of these tokens, and return its outputs `[s, b, ...]`.

        Args:
            attend: Attention function of the layer.
            queries: Tensors of queries, `[s, b, ...]`.
            keys: Two tensors `[s, b, ...]`, which are also what the layer caches per token during generation.
            every: Number of consecutive tokens of a sequence or document that share one row of the second tensor of
                `keys`. The row stands at the last of these tokens, and the rows of the other tokens are zero. `attend`
                receives the second tensor reduced by `one_of_each`.
        """
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that it reads in addition to its arguments."""
        ...


class SharedTensors:
    """Tensors of a layer for the later layers that read them, in one micro-batch or generation step.

    Only the first `fill` takes effect. If the layer is recomputed, later layers have already read the first values.
    """

    def __init__(self) -> None:
        self._given: tuple[Tensor, ...] | None = None

    def fill(self, *tensors: Tensor) -> None:
        """Store the tensors, unless some are already stored."""
        self._given = self._given or tensors

    def read(self) -> tuple[Tensor, ...]:
        """Return the stored tensors."""
        assert self._given is not None, "the layer has not run, or is in another stage"
        return self._given


def one_of_each(x_tb: Tensor, every: int) -> Tensor:
    """Reduce each run of `every` rows, at most one of them nonzero, to that row; return `[ceil(t / every), b, ...]`."""
    if every == 1:
        return x_tb
    padding = x_tb.new_zeros(-len(x_tb) % every, *x_tb.shape[1:])
    return torch.cat([x_tb, padding]).unflatten(0, (-1, every)).sum(1)


@dataclass(frozen=True)
class Tokens(ABC):
    """Tokens that a stage computes, and the rules by which tokens of one sequence attend to each other.

    Attributes:
        positions: Position of each token in its sequence, int64 `[s]` or `[b, s]`.
        length: Number of tokens of a whole sequence, summed over all context-parallel ranks.
        ids_bs: Token ids, int64 `[b, s]`. They cover all tokens even where a rank holds only a slice of the residual
            stream.
        samples_b: Index of each sample in the run, int64 `[b]`; None turns off dropout.
        distance_bias_ar: Learned biases of attention scores by distance (T5), as in `Scores`.
        padding_bs: Whether each token is padding, bool `[b, s]`; None if no token is padding. Like `ids_bs`, it covers
            all tokens.
        depth: Depth of multi-token prediction for which `padding_bs` holds; 0 is the main model.
    """

    positions: Tensor
    length: int
    ids_bs: Tensor | None = None
    samples_b: Tensor | None = None
    distance_bias_ar: Tensor | None = None
    padding_bs: Tensor | None = None
    depth: int = 0
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def at_depth(self, depth: int) -> Tokens:
        """Return these tokens as seen by the layers of multi-token prediction at `depth`; 0 is the main model."""
        return self

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, which is called only once for all layers that pass an equal key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def rotary(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Return the rotary cosines and sines of these positions."""
        return self.once(rope.key, lambda: rope.table(self.positions, self.length))

    @abstractmethod
    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        """Return the softmax attention of layer `layer` over these tokens.

        Args:
            layer: Layer that owns the keys and values.
            window: Size of the sliding window in tokens; None means no window.
            causal: Whether a token attends only to itself and to earlier tokens.
            positions: Whether scores depend on positions (biases, dropout).
            chunk: Size of the chunks within which tokens attend to each other; None means no chunks.
            stores: Whether generation stores these keys and values. False if `layer` has already stored them.
        """

    @abstractmethod
    def keys(self, layer: int) -> AttendToKeys:
        """Return the function that runs layer `layer`'s own attention over these tokens."""

    @abstractmethod
    def recurrence(self, layer: int) -> Recurrence:
        """Return the function that runs the recurrence of layer `layer` over these tokens."""


class PartInputs(Protocol):
    """Inputs that a part reads in addition to the residual stream."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors among these inputs. They are never offloaded, because all layers read them."""
        ...


@dataclass(frozen=True)
class RecurrentInputs:
    """Inputs of a recurrent mixer: the function that runs its recurrence over the tokens."""

    recurrence: Recurrence

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Empty: a recurrence holds no tensors that layers share."""
        return ()


@dataclass(frozen=True)
class NoInputs:
    """Inputs of a part that reads only the residual stream."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Empty: there are no further inputs."""
        return ()


class LayerPart(nn.Module, ABC):
    """Mixer or feed-forward network of a layer, a module built by `make_part`.

    It maps the residual stream `[s, b, h]` to an update of the same shape. Under sequence parallelism the shape is
    `[s/t, b, h]` with t tensor-parallel ranks.
    """

    input_linear: LinearState | None = None
    """State of the linear layer that alone reads the part's input; None if other operations read it, too."""

    @property
    def input_format(self) -> InputFormat | None:
        """Format in which the preceding norm passes its output to this part; None means unquantized values."""
        return None if self.input_linear is None else self.input_linear.input_format

    @abstractmethod
    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the part saves for its backward pass, by tensor."""

    @abstractmethod
    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the memory traffic and number of the part's kernels, excluding linear layers and softmax attention."""

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the peak bytes that backward allocates, excluding saved tensors and the residual stream's gradient.

        Return 0 if the part needs no more than the other part of its layer.
        """
        return 0

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs of the forward pass, excluding linear layers and softmax attention."""
        return 0.0


class Mixer(LayerPart):
    """Part that mixes tokens, for example attention or a recurrence.

    Attributes:
        index_loss: Sum of the indexer's losses over the backward passes so far, float64 `[1]`; None without an indexer.
        largest_logits_a: Largest attention logit of each of this rank's heads so far, `[heads]` in fp32 or wider; None
            if it is not recorded.
    """

    context: BuildContext
    index_loss: Tensor | None = None
    largest_logits_a: Tensor | None = None

    def shared(self, x: Tensor) -> Tensor:
        """Share a replicated tensor with the heads of all tensor-parallel ranks.

        With sequence parallelism, gather the tokens of all ranks. The gradient is the sum over ranks, because each
        rank's heads use the tensor.
        """
        share = gather_from_sequence_parallel if self.context.sequence_sharded else copy_to_tensor_parallel
        return share(x, self.context.tensor)

    @abstractmethod
    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """Return the inputs (`PartInputs`) that the mixer of layer `layer` reads in addition to the residual stream."""

    @abstractmethod
    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> Tensor:
        """Return the mixer's output for the residual stream's normalized value `[s, b, h]`, in the same shape."""

    @property
    @abstractmethod
    def cache(self) -> tuple[TokenCache | StateCache, ...]:
        """Layouts of the caches that the mixer needs for generation on this rank: at most one of each type."""

    def row_factors(self, factor_a: Tensor) -> dict[str, Tensor]:
        """Return the factors of weight rows that scale each head's attention logits by `factor_a` or less (QK-Clip).

        Args:
            factor_a: Factor of each head's logits, at most 1, `[heads]`.

        Returns:
            The factors of the rows of each weight, by name of the weight.
        """
        return {}

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the sizes of the mixer's softmax attention, one for each kind."""
        return []

    def kept(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes, by tensor, that the mixer keeps for later layers even if its own layer is recomputed."""
        return {}

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes, such as keys and values, that context-parallel ranks need of this rank's micro-batch."""
        return 0

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Describe the kernels that compute the mixer; return None if there is no choice.

        Args:
            device: Device of the run.
            length: Number of tokens of a sequence.
            documents: Whether attention stays within documents.
            prefix: Whether the first tokens of a sample attend to each other in both directions.
        """
        return None


class FeedForward(LayerPart):
    """Part that computes each token separately: an MLP, or experts with a router."""

    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """Return the inputs (`PartInputs`) that layer `layer` reads in addition to the residual stream."""
        return NoInputs()

    @abstractmethod
    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any = None) -> Tensor:
        """Return the update for `x_sbh`, in the same shape; `inputs` is the result of the method `inputs`."""

    @abstractmethod
    def activation_bytes(self, batch: MicroBatch) -> int:
        """Return the additional bytes that are read and written if the activation is recomputed in backward."""

    @property
    def routers(self) -> Sequence[Router]:
        """Routers of this part; the job watches their losses and loads."""
        return ()

    def router_gemms(self, batch: MicroBatch) -> list[LinearSize]:
        """Return the sizes of the routers' GEMMs, converted to GEMMs in `training.precision` that take as long."""
        return []

    def rows(self, batch: MicroBatch) -> int:
        """Return the number of token rows of this rank's experts if the load is balanced."""
        return 0

    def reserved_rows(self, batch: MicroBatch) -> int:
        """Return the number of token rows for which this rank's expert buffers have room."""
        return 0

    @property
    def most_room(self) -> float:
        """Largest useful `MicroBatch.expert_room` of this part."""
        return 1.0

    def dispatch_traffic(self, batch: MicroBatch) -> DispatchTraffic | None:
        """Return the traffic of dispatching tokens to experts, or None without expert parallelism.

        Combining the results causes the same traffic once more.
        """
        return None


@dataclass(frozen=True)
class LayerInputs:
    """Inputs that the blocks read for one micro-batch, in addition to the residual stream.

    Attributes:
        mixers: Inputs of the mixers, by layer.
        ffns: Inputs of the feed-forward networks, by layer.
        places: Positions and samples of the residual stream's tokens, which key its dropout; None means no dropout.
        per_layer_sblp: Per-layer embeddings, `[s, b, layers, width]`.
    """

    mixers: Mapping[int, PartInputs]
    ffns: Mapping[int, PartInputs]
    places: Any = None
    per_layer_sblp: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among these inputs."""
        tensors = [x for inputs in (*self.mixers.values(), *self.ffns.values()) for x in inputs.tensors]
        tensors += [] if self.per_layer_sblp is None else [self.per_layer_sblp]
        return tensors if self.places is None else [*tensors, *self.places.tensors]


def make_part(build: PartBuild[PartRecord]) -> Any:
    """Build the module of a resolved record."""
    module, _, cls = build.record.module.partition(":")
    return getattr(import_module(module), cls)(build)
