"""The parts of a layer, mixer and feed-forward network: what they read of a micro-batch and answer about themselves.

A part is built from its record (`megafp8.spec.PartRecord`) and knows nothing of where tokens come from.
Whoever runs a stage passes `Tokens`: a micro-batch of training, a step of generation, or texts to score. From these a
mixer takes what it reads besides the residual stream (`Mixer.inputs`), once for each micro-batch: rotary tables, masks,
or the state that a sequence has got to. Layers that read equal tables share them.

Shapes: s tokens of a micro-batch's sequences on this rank, b sequences, h hidden.
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
from megafp8.layers.context import BuildContext
from megafp8.layers.costs import AttentionWork, DispatchTraffic, KernelWork, MicroBatch
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.layers.recurrent.op import Recurrence
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec, PartRecord

if TYPE_CHECKING:
    from megafp8.layers.experts.router import Router
    from megafp8.layers.rotary.module import RotaryEmbedding

T = TypeVar("T")


AttendTo = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor], Tensor]
"""Attention of a layer's own: from tensors of queries `[s, b, ...]` and of keys `[t, b, ...]` to outputs `[s, b, ...]`.

The other arguments: int64 `[1 or b, s]`, the first key that a query may attend to, and the one after the last."""


class TokenCache(NamedTuple):
    """What attention keeps of each token in generation: keys and values of `groups` heads of this rank.

    `width`, `value_width`: channels of a head's key and value. `every`: there is a value for so many tokens, with the
    last of them.
    """

    groups: int
    width: int
    value_width: int
    every: int = 1


class StateCache(NamedTuple):
    """What a recurrence keeps of each sequence in generation: tensors of these shapes and dtypes, zero at its start."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class AttendToKeys(Protocol):
    """Runs attention of a layer's own over the tokens of a micro-batch or a step, each with the keys that it may attend
    to: earlier ones of its sequence or document, and itself."""

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], /, every: int = 1
    ) -> Tensor:
        """`[s, b, ...]`, from `queries` and `keys` of these tokens; what the layer keeps of a token are `keys`.

        `every`: the second of them is that of so many tokens of a sequence or document, with the last of them, and zero
        with others; `attend` gets `one_of_each` of it.
        """
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it reads besides its arguments."""
        ...


def one_of_each(x_tb: Tensor, every: int) -> Tensor:
    """Of so many rows that follow each other, of which at most one is not zero, that one: `[t / every, b, ...]`."""
    if every == 1:
        return x_tb
    padding = x_tb.new_zeros(-len(x_tb) % every, *x_tb.shape[1:])
    return torch.cat([x_tb, padding]).unflatten(0, (-1, every)).sum(1)


@dataclass(frozen=True)
class Tokens(ABC):
    """The tokens that a stage computes, and how those of a sequence reach each other.

    `positions`: int64 `[s]` or `[b, s]`. `length`: tokens of a whole sequence, on all context-parallel ranks.
    `ids_bs`: int64, of all tokens also where ranks hold slices of the residual stream; so is `padding_bs`: bool, which
    are padding, None where none are.
    `samples_b`: int64, the indices of the samples in the run; None: no dropout. `distance_bias_ar`: learned biases of
    scores by distance (T5), as in `Scores`. `depth`: of multi-token prediction, with the padding that `at_depth` says.
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
        """Return these tokens as layers of depth `depth` of multi-token prediction read them; 0 is the model's own."""
        return self

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, once for all layers with an equal key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def rotary(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions."""
        return self.once(rope.key, lambda: rope.table(self.positions, self.length))

    @abstractmethod
    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        """Softmax attention to keys and values of layer `layer` with a sliding window, or within chunks of so many
        tokens.

        `positions`: scores depend on positions. `stores`: generation stores these keys and values; False: that layer
        has stored them.
        """

    @abstractmethod
    def keys(self, layer: int) -> AttendToKeys:
        """How attention of layer `layer`'s own runs over these tokens."""

    @abstractmethod
    def recurrence(self, layer: int) -> Recurrence:
        """How the recurrence of layer `layer` runs over these tokens."""


class PartInputs(Protocol):
    """What a part reads besides the residual stream."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Its tensors, which are not offloaded: all layers read them."""
        ...


@dataclass(frozen=True)
class RecurrentInputs:
    """What a recurrent mixer reads: how its recurrence runs over the tokens."""

    recurrence: Recurrence

    @property
    def tensors(self) -> Sequence[Tensor]:
        return ()


@dataclass(frozen=True)
class NoInputs:
    """Of a part that reads the residual stream only."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        return ()


class LayerPart(nn.Module, ABC):
    """`[s, b, h]` (or `[s/t, b, h]` sequence-parallel) -> the same shape; built as `make_part` says."""

    @property
    def input_format(self) -> InputFormat | None:
        """The form in which the norm before it gives its input; None: values."""
        return None

    @abstractmethod
    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes that it keeps for its backward pass, by tensor."""

    @abstractmethod
    def work(self, batch: MicroBatch) -> KernelWork:
        """What its kernels beside linear layers and softmax attention compute, read and write."""

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Bytes that its backward needs at most beside what is saved and the gradient of the residual stream.

        0 for what needs no more than the other part of its layer does.
        """
        return 0

    def flops(self, batch: MicroBatch) -> float:
        """Model FLOPs of its forward pass beside linear layers and softmax attention."""
        return 0.0


class Mixer(LayerPart):
    """A part that mixes tokens. `index_loss`: what its backward passes add up of its indexer's loss, float64 `[1]`;
    None without an indexer. `largest_logits_a`: fp32 or wider, is raised to the largest attention logit of each head of
    this rank; None where it is not recorded."""

    index_loss: Tensor | None = None
    largest_logits_a: Tensor | None = None

    @abstractmethod
    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """What it reads besides the residual stream (`PartInputs`), as the mixer of layer `layer`."""

    @abstractmethod
    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> Tensor: ...

    @property
    @abstractmethod
    def cache(self) -> tuple[TokenCache | StateCache, ...]:
        """What it keeps in generation, on this rank: one of each at most."""

    def row_factors(self, factor_a: Tensor) -> dict[str, Tensor]:
        """By name of its weights, what their rows are to be multiplied by, so that the attention logits of its heads
        are multiplied by `factor_a` `[heads]`, up to 1, or less."""
        return {}

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Its softmax attention."""
        return []

    def kept(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes by tensor that it keeps for later layers, even where its layer is recomputed."""
        return {}

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Bytes of what other context-parallel ranks need of this rank's tokens."""
        return 0

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Which kernels compute it, where there is a choice. `documents`: attention stays within them; `prefix`: a
        sample's first tokens attend to each other both ways."""
        return None


class FeedForward(LayerPart):
    """A part that computes each token by itself; one with experts says how tokens get to them."""

    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """What it reads besides the residual stream (`PartInputs`), as that of layer `layer`."""
        return NoInputs()

    @abstractmethod
    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any = None) -> Tensor:
        """`inputs`: what the method of this name has given."""

    @abstractmethod
    def activation_bytes(self, batch: MicroBatch) -> int:
        """Bytes that its activation reads and writes once more where it is recomputed."""

    @property
    def routers(self) -> Sequence[Router]:
        """Its routers, whose losses and loads a job watches."""
        return ()

    def router_gemms(self, batch: MicroBatch) -> list[LinearSize]:
        """The GEMMs of its routers, as so many of training.precision."""
        return []

    def rows(self, batch: MicroBatch) -> int:
        """Rows of this rank's experts if the load is even."""
        return 0

    def reserved_rows(self, batch: MicroBatch) -> int:
        """Rows of this rank's experts that buffers have room for."""
        return 0

    def dispatch_traffic(self, batch: MicroBatch) -> DispatchTraffic | None:
        """What ranks send each other on the tokens' way to experts, and once more on the way back."""
        return None


@dataclass(frozen=True)
class LayerInputs:
    """What every block of a micro-batch reads besides the residual stream. `mixers`, `ffns`: by layer.

    `places`: of the residual stream's tokens; None: no dropout in it. `per_layer_sblp`: per-layer embeddings.
    """

    mixers: Mapping[int, PartInputs]
    ffns: Mapping[int, PartInputs]
    places: Any = None
    per_layer_sblp: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        tensors = [x for inputs in (*self.mixers.values(), *self.ffns.values()) for x in inputs.tensors]
        tensors += [] if self.per_layer_sblp is None else [self.per_layer_sblp]
        return tensors if self.places is None else [*tensors, *self.places.tensors]


def make_part(
    name: str,
    record: PartRecord,
    model: ModelSpec,
    context: BuildContext,
    *,
    input: Neighbor,
    memory: BlockMemory = KEEP_ALL,
) -> Any:
    """The module of a resolved record. `input`: the norm before it. `memory`: what is recomputed in backward."""
    module, _, cls = record.module.partition(":")
    return getattr(import_module(module), cls)(name, record, model, context, input=input, memory=memory)
