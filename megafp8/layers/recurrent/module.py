"""Base of recurrent mixers: a recurrence that is linear in the state, often after a causal convolution.

    x  [s, b, n]   causal convolution of each channel over the last `kernel` tokens, then SiLU
    S  [b, ...]    state of a sequence: each token computes S ← T S + U, where T and U depend only on that token

After its tokens a sequence has a `State`: the last inputs that later tokens read, if any, and S, if there is one. A
mixer implements how tokens advance a state (`advance`), and how a run of tokens maps the S before it to the S after it
(`transition`). Ranks that share a sequence use `transition` to compute the state at the start of each rank's tokens
(`megafp8.layers.recurrent.context_parallel`).

The beginning of a document resets the state: T is zero at its first token, and no token reads inputs of an earlier
document.

Shapes: s sequence length, b micro-batch size, n channels of the convolution, k tokens that the convolution sees, t =
k - 1 tokens before the current one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.layers.build import PartBuild
from megafp8.layers.context import sharded_parameters
from megafp8.layers.costs import MicroBatch
from megafp8.layers.mixer import Mixer, RecurrentInputs, StateCache, Tokens
from megafp8.layers.recompute import recomputed
from megafp8.layers.recurrent.op import RecurrentRule, State, Transition
from megafp8.layers.short_convolution.op import last_inputs
from megafp8.parallel.sharding import Init
from megafp8.plan import Neighbor

BEFORE_DECAYS = Neighbor("attention_norm", "none", "the decays are computed from the norm's output too")
"""Norm before a projection, as the projection's plan sees it if decays are computed from the same input."""


class RecurrentMixer(Mixer):
    """Mixer that passes a state from token to token."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state S of one sequence on this rank, in fp32 or wider; empty for a convolution alone."""

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """Shape of `Transition.factor` of one sequence on this rank, by default a matrix; empty without S."""
        return () if not self.state_shape else (*self.state_shape[:-1], self.state_shape[-2])

    @property
    def last_shape(self) -> tuple[int, ...]:
        """Shape of the last inputs of one sequence that later tokens read, on this rank; empty if they read none."""
        return ()

    @abstractmethod
    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Run tokens through the recurrence.

        Args:
            xs: Tensors that the mixer computes from each token, `[s, b, ...]`.
            state: State before the tokens.
            starts_sb: Tokens that begin a document, bool; None if none does.

        Returns:
            Outputs `[s, b, ...]`, and the state after the tokens.
        """

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition | None:
        """Return the map of S by all these tokens together; None without S.

        S in `state` is zero, so that the state after the tokens is `Transition.added`.
        """
        assert not self.state_shape, "a mixer with S says how it is mapped"
        return None

    @property
    @abstractmethod
    def rule_flops(self) -> float:
        """Model FLOPs per token to read and write S."""

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs of the recurrence."""
        return batch.tokens * self.rule_flops

    def inputs(self, layer: int, tokens: Tokens) -> RecurrentInputs:
        """Return how the recurrence of layer `layer` runs over `tokens`."""
        return RecurrentInputs(tokens.recurrence(layer))

    def run(self, inputs: RecurrentInputs, *xs: Tensor, rule: RecurrentRule | None = None) -> Tensor:
        """Run a rule, by default this mixer, over a micro-batch; return its outputs and save only `xs` for backward."""
        rule = rule or self
        if not torch.is_grad_enabled():
            return inputs.recurrence(rule, xs)
        return recomputed(lambda *xs: inputs.recurrence(rule, xs), *xs)

    @property
    def cache(self) -> tuple[StateCache]:
        """Tensors that generation stores for each sequence."""
        return (self.state_cache,)

    @property
    def state_cache(self) -> StateCache:
        """Shapes and dtypes of the state of one sequence: the last inputs that later tokens read, and S."""
        dtype = next(self.parameters()).dtype
        kept = [(self.last_shape, dtype), (self.state_shape, torch.promote_types(dtype, torch.float32))]
        shapes, dtypes = zip(*(x for x in kept if x[0]))
        return StateCache(shapes, dtypes)

    def zeros(self, b: int) -> State:
        """Return the state of `b` sequences at their start, which is zero."""
        device = next(self.parameters()).device
        return tuple(torch.zeros(b, *shape, dtype=dtype, device=device) for shape, dtype in zip(*self.state_cache))

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor | None:
        """Return the last inputs `[b, t, n]`, which later tokens read, or None if they read none.

        There must be at least t tokens.
        """
        return None

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of T, U and last inputs of two slots (`megafp8.layers.recurrent.context_parallel`)."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(*self.state_cache)]
        factor = math.prod(self.factor_shape) * self.state_cache.dtypes[-1].itemsize if self.factor_shape else 0
        return 2 * batch.sequences * (sum(sizes) + factor)


class ConvolvedMixer(RecurrentMixer):
    """Recurrent mixer that applies a causal convolution to the first of `xs` before the recurrence."""

    convolution: nn.Parameter
    """Weight of this rank's channels, `[n, 1, k]`."""
    convolution_bias: nn.Parameter | None
    """Bias of this rank's channels, `[n]`."""

    def add_convolution(self, build: PartBuild[Any], widths: Mapping[str, int], *, bias: bool = False) -> None:
        """Create the weight of the convolutions of several inputs, `[n, 1, k]` as in PyTorch's Conv1d, and the bias.

        `widths` holds the number of channels of each input on all ranks. A weight is `<name>.<input>_conv.weight`.
        """
        kernel, shapes = build.record.conv_kernel_size, {f"{build.name}.{part}_conv": n for part, n in widths.items()}

        def parameter(which: str, init: Init, *dims: int, **spec: bool) -> nn.Parameter:
            slices = {f"{name}.{which}": (n, *dims) for name, n in shapes.items()}
            return sharded_parameters(build.context, slices, init, **spec)

        self.convolution = parameter("weight", Init("normal", kernel**-0.5), 1, kernel)
        self.convolution_bias = parameter("bias", Init("zeros"), weight_decay=False) if bias else None

    @property
    def last_shape(self) -> tuple[int, ...]:
        """Shape of the last inputs of the convolution, `(t, n)`."""
        n, _, k = self.convolution.shape
        return k - 1, n

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor | None:
        """Return the last inputs of the convolution, `[b, t, n]`."""
        last_btn = self.zeros(xs[0].shape[1])[0]
        return last_inputs(xs[0], last_btn.shape[1], last_btn, starts_sb)

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs of the recurrence and the convolution."""
        return batch.tokens * (self.rule_flops + 2.0 * self.convolution.numel())
