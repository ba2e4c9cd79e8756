"""Base of recurrent mixers: a recurrence linear in the state before, and in many a causal convolution before it.

    x  [s, b, n]   each channel's causal convolution over the last `kernel` tokens, then SiLU
    S  [b, ...]    the state of a sequence: for each token S ← T S + U, with T and U of that token alone

Tokens leave behind a `State`: the last inputs that later tokens read, if any, and S, if there is one. A mixer says how
tokens advance a state (`advance`), and how a run of tokens maps the S before it to the S after it (`transition`), from
which ranks that share a sequence compute where each begins (`megafp8.layers.recurrent.context_parallel`).

A document that begins resets the state: no input is read across it, and T is zero at its first token.

Shapes: s sequence, b micro-batch, n channels of the convolution, k tokens that it sees, t = k - 1 before a token.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from megafp8.layers.context import BuildContext, new_parameter
from megafp8.layers.costs import MicroBatch
from megafp8.layers.mixer import Mixer, RecurrentInputs, StateCache, Tokens
from megafp8.layers.recompute import recomputed
from megafp8.layers.recurrent.op import State, Transition
from megafp8.layers.short_convolution.op import last_inputs
from megafp8.parallel.sharding import Init, shard_dim
from megafp8.parallel.tensor.mappings import copy_to_tensor_parallel, gather_from_sequence_parallel


class RecurrentMixer(Mixer):
    """A mixer that passes a state from token to token."""

    context: BuildContext

    def shared(self, x: Tensor) -> Tensor:
        """Return what all ranks compute of their own tokens, of all tokens.

        Each rank's heads use it, so its gradient is their sum.
        """
        share = gather_from_sequence_parallel if self.context.sequence_sharded else copy_to_tensor_parallel
        return share(x, self.context.tensor)

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a sequence's S on this rank, kept in fp32 or wider; empty where there is a convolution only."""

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """The shape of a sequence's `Transition.factor` on this rank, by default a matrix; empty without S."""
        return () if not self.state_shape else (*self.state_shape[:-1], self.state_shape[-2])

    @property
    def last_shape(self) -> tuple[int, ...]:
        """The shape of a sequence's last inputs that later tokens read, on this rank; empty where they read none."""
        return ()

    @abstractmethod
    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """The outputs `[s, b, ...]` of tokens, and the state after them.

        `xs`: what the mixer computes of each token, `[s, b, ...]`.
        `starts_sb`: bool, the tokens that begin a document; None where none does.
        """

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition | None:
        """Return the map of S by all these tokens together; None without S.

        S in `state` is zero, so that it can serve as the state that gives `Transition.added`.
        """
        assert not self.state_shape, "a mixer with S says how it is mapped"
        return None

    @property
    @abstractmethod
    def rule_flops(self) -> float:
        """Model FLOPs by which a token reads and writes S."""

    def flops(self, batch: MicroBatch) -> float:
        """Model FLOPs of the recurrence."""
        return batch.tokens * self.rule_flops

    def inputs(self, layer: int, tokens: Tokens) -> RecurrentInputs:
        return RecurrentInputs(tokens.recurrence(layer))

    def run(self, inputs: RecurrentInputs, *xs: Tensor) -> Tensor:
        """The recurrence over a micro-batch's tokens; only `xs` are kept for its backward."""
        if not torch.is_grad_enabled():
            return inputs.recurrence(self, xs)
        return recomputed(lambda *xs: inputs.recurrence(self, xs), *xs)

    @property
    def cache(self) -> tuple[StateCache]:
        return (self.state_cache,)

    @property
    def state_cache(self) -> StateCache:
        """The last inputs that later tokens read, and S."""
        dtype = next(self.parameters()).dtype
        kept = [(self.last_shape, dtype), (self.state_shape, torch.promote_types(dtype, torch.float32))]
        shapes, dtypes = zip(*(x for x in kept if x[0]))
        return StateCache(shapes, dtypes)

    def zeros(self, b: int) -> State:
        """The state of sequences at their start."""
        device = next(self.parameters()).device
        return tuple(torch.zeros(b, *shape, dtype=dtype, device=device) for shape, dtype in zip(*self.state_cache))

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor | None:
        """Return the inputs that the tokens after these read, `[b, t, n]`, of at least t tokens; None for none."""
        return None

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Bytes of T, U and last inputs of two slots (`megafp8.layers.recurrent.context_parallel`)."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(*self.state_cache)]
        factor = math.prod(self.factor_shape) * self.state_cache.dtypes[-1].itemsize if self.factor_shape else 0
        return 2 * batch.sequences * (sum(sizes) + factor)


class ConvolvedMixer(RecurrentMixer):
    """A recurrent mixer with a causal convolution of the first of `xs` before the recurrence.

    Args:
        convolution: Weight of this rank's channels, `[n, 1, k]`.
    """

    convolution: nn.Parameter

    @property
    def last_shape(self) -> tuple[int, ...]:
        n, _, k = self.convolution.shape
        return k - 1, n

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor:
        last_btn = self.zeros(xs[0].shape[1])[0]
        return last_inputs(xs[0], last_btn.shape[1], last_btn, starts_sb)

    def flops(self, batch: MicroBatch) -> float:
        """Model FLOPs of the recurrence and the convolution."""
        return batch.tokens * (self.rule_flops + 2.0 * self.convolution.numel())


def short_convolution(
    name: str, context: BuildContext, widths: dict[str, int], kernel: int, **options: bool
) -> nn.Parameter:
    """Return the weight of convolutions with `widths` channels each, `[n, 1, kernel]` as in torch's Conv1d.

    Channels are divided over tensor-parallel ranks.
    """
    group = context.tensor
    shards = [
        shard_dim(f"{name}.{part}_conv.weight", (width, 1, kernel), 0, group.rank(), group.size())
        for part, width in widths.items()
    ]
    return new_parameter(context, shards, Init("normal", kernel**-0.5), replicated_over_tp=False, **options)
