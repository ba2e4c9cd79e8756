"""What recurrent mixers share: a causal convolution of a few tokens, and a recurrence linear in the state before.

    x  [s, b, n]   each channel's causal convolution over the last `kernel` tokens, then SiLU
    S  [b, ...]    the state of a sequence: for each token S ← T S + U, with T and U of that token alone

What the tokens of a sequence leave behind is a `State`: the convolution's last inputs, and S. A mixer says how tokens
advance a state (`advance`), and how a run of tokens maps the S before it to the S after it (`transition`), from which
ranks that share a sequence compute where each begins (`megafp8.context_parallel.recurrence`).

A document that begins resets the state: the convolution does not see across it, and T is zero at its first token.

Shapes: s sequence, b micro-batch, n channels of the convolution, k tokens that it sees, t = k - 1 before a token.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from megafp8.distributed.sharding import Init, shard_dim
from megafp8.models.context import BuildContext, new_parameter
from megafp8.models.costs import MicroBatch
from megafp8.models.mixer import Mixer, RecurrentInputs, StateCache, Tokens
from megafp8.models.recompute import recomputed
from megafp8.ops.recurrence import State
from megafp8.ops.short_convolution import last_inputs


class RecurrentMixer(Mixer):
    """A mixer that passes a state from token to token.

    `convolution`: the weight of this rank's channels, `[n, 1, k]`.
    """

    convolution: nn.Parameter

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a sequence's S on this rank, kept in fp32 or wider; empty where there is a convolution only."""

    @abstractmethod
    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """The outputs `[s, b, ...]` of tokens, and the state after them.

        `xs`: what the mixer computes of each token, `[s, b, ...]`; the first is the convolution's input.
        `starts_sb`: bool, the tokens that begin a document; None where none does.
        """

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, Tensor]:
        """T and U of all these tokens together: the S after them is T·S + U, where S is the one before.

        T is `[b, ..., d, d]` for a state `[b, ..., d, w]`, or broadcasts to it with d = 1: a factor of each state.
        Of `state` only the convolution's last inputs are read.
        """
        raise AssertionError("a state of the convolution only")

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
        """The convolution's last inputs, and S."""
        (n, _, k), dtype = self.convolution.shape, self.convolution.dtype
        window = (k - 1, n)
        if not self.state_shape:
            return StateCache((window,), (dtype,))
        return StateCache((window, self.state_shape), (dtype, torch.promote_types(dtype, torch.float32)))

    def zeros(self, b: int) -> State:
        """The state of sequences at their start."""
        device = self.convolution.device
        return tuple(torch.zeros(b, *shape, dtype=dtype, device=device) for shape, dtype in zip(*self.state_cache))

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor:
        """The convolution's inputs that the tokens after these see, `[b, t, n]`; there are at least t tokens."""
        window_btn = self.zeros(xs[0].shape[1])[0]
        return last_inputs(xs[0], window_btn.shape[1], window_btn, starts_sb)

    def keys_and_values(self, batch: MicroBatch) -> int:
        """T and U of two slots, and the convolution's last inputs (`megafp8.context_parallel.recurrence`)."""
        shapes, dtypes = self.state_cache
        window, *states = (torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
        d, w = self.state_shape[-2:] if self.state_shape else (0, 1)
        return 2 * batch.sequences * (window + sum(states) * (w + d) // w)


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
