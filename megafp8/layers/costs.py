"""Memory and compute of a part of the network for one micro-batch on one rank, as the planner needs them.

Before a run, the planner builds the parts on torch's meta device (`megafp8.planner.outline`) and asks each of them
three questions: how many bytes it saves for backward, by tensor; how many bytes its kernels read and write, excluding
linear layers; and which attention it computes. Saved bytes follow what each part's autograd Functions save, and a
storage counts once. Where the CPU and CUDA differ, the answers hold for CUDA. Linear layers are not part of the
answers, because their cost follows from their sizes and plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from megafp8.config import Config
from megafp8.layers.experts.own_rows import MARGIN
from megafp8.linear.state import LinearState
from megafp8.numerics.dtypes import DTYPES
from megafp8.numerics.recipes.base import OPERANDS, Fp8Recipe, OperandName
from megafp8.numerics.tensor import Granularity, on_hopper
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.plan import LinearSite

ELEMENT = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Bytes per element, by the dtype's name in a config."""


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of a micro-batch on one rank.

    Attributes:
        tokens: Number of tokens inside tensor-parallel regions.
        own_tokens: Number of tokens between tensor-parallel regions; with sequence parallelism this is a part of
            `tokens`.
        sequences: Number of sequences.
        length: Tokens of each sequence, summed over all context-parallel ranks.
        encoder_length: Tokens of each sequence to which the decoder of T5 attends.
        element: Bytes per element of an activation.
        statistic: Bytes per statistic of a norm.
        recipe: FP8 recipe; None without FP8.
        replayed: Whether CUDA graphs replay the step, so that buffer sizes are fixed before their contents are known.
        expert_room: Room for the rows of a rank's experts in a replayed step, as a multiple of an even load.
    """

    tokens: int
    own_tokens: int
    sequences: int
    length: int
    encoder_length: int
    element: int
    statistic: int
    recipe: Fp8Recipe | None
    replayed: bool
    expert_room: float = MARGIN

    @classmethod
    def from_config(cls, config: Config, recipe: Fp8Recipe | None, *, decoder: bool = False) -> MicroBatch:
        """Return the micro-batch of a run with this config; with `decoder`, in the decoder of T5."""
        p, t = config.parallel, config.training
        length = t.seq_length
        if decoder:
            assert config.decoder_length is not None
            length = config.decoder_length
        tokens, element = length // p.context * t.micro_batch_size, ELEMENT[t.precision]
        return cls(
            tokens=tokens,
            own_tokens=tokens // p.tensor if p.sequence_parallel else tokens,
            sequences=t.micro_batch_size,
            length=length,
            encoder_length=t.seq_length,
            element=element,
            statistic=max(4, element),
            recipe=recipe,
            replayed=t.cuda_graphs is not False and t.precision == "bf16",
        )

    def tokens_of(self, site: LinearSite) -> int:
        """Return the number of tokens that the linear layer at `site` multiplies."""
        if site.tokens is None:  # whole on each rank
            return self.own_tokens
        return site.tokens * (site.tensor_parallel if site.sequence_parallel else 1)

    def granularity(self, layer: str, operand: OperandName) -> Granularity:
        """Return which elements of an operand of the FP8 layer `layer` share a scale."""
        recipes = None if self.recipe is None else self.recipe.operands(layer)
        assert recipes is not None
        return recipes[OPERANDS.index(operand)].granularity(operand)

    def saved_input(self, state: LinearState) -> int:
        """Return the bytes that a linear layer saves of its input."""
        plan, k, tokens = state.plan, state.site.inputs, self.tokens_of(state.site)
        if plan.saved == "recompute":
            return 0
        if plan.saved == "high":
            return tokens * k * self.element
        if plan.saved == "columnwise shard":
            assert state.site.tokens is not None
            tokens = state.site.tokens
        return fp8_bytes(self.granularity(plan.name, "input"), k, tokens)

    def saved_input_beside(self, other: LinearState | None, width: int) -> int:
        """Return the bytes that a high-precision product saves of its input of `width` channels for its own tokens.

        The result is 0 if the linear layer `other`, which has the same input, already saves it.
        """
        high = other is not None and other.plan.saved == "high" and self.tokens == self.own_tokens
        return 0 if high else self.own_tokens * width * self.element


def fp8_bytes(granularity: Granularity, r: int, c: int) -> int:
    """Return the bytes of an FP8 matrix `[r, c]` with its scales.

    A matrix with Blackwell's block scales counts as its values dequantized to bf16.
    """
    if not on_hopper(granularity):
        return 2 * r * c + 4
    return r * c + 4 * math.prod(granularity.grid(r, c))


class KernelWork(NamedTuple):
    """Memory traffic and number of kernels, excluding GEMMs and attention.

    Attributes:
        forward: Bytes that the forward pass reads and writes.
        backward: Bytes that the backward pass reads and writes.
        kernels: Number of kernels in each pass.
        column_sums: Bytes of output gradients of linear layers that are read a second time for the bias gradient.
        more_in_backward: Number of kernels that backward has in addition to `kernels`.
    """

    forward: float = 0.0
    backward: float = 0.0
    kernels: int = 0
    column_sums: float = 0.0
    more_in_backward: int = 0

    def __add__(self, other: KernelWork) -> KernelWork:  # type: ignore[override]
        return KernelWork(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


class AttentionWork(NamedTuple):
    """Sizes of a micro-batch's attention.

    Attributes:
        heads: Number of query heads on this rank.
        width: Channels of a head's query and key.
        value_width: Channels of a head's value.
        queries: Queries of a whole sequence.
        pairs: Pairs of a query and a key of a whole sequence.
        modified: Whether scores are changed by more than a mask (biases, soft cap), which needs another kernel.
    """

    heads: int
    width: int
    value_width: int
    queries: int
    pairs: float
    modified: bool


class DispatchTraffic(NamedTuple):
    """Traffic of a micro-batch's tokens between `ranks` neighboring ranks, one way: to their experts, or back.

    Attributes:
        ranks: Number of ranks over which the experts are divided.
        tokens: Bytes of this rank's own tokens.
        received: Bytes from the other ranks.
        gathered: Whether every rank receives all tokens.
    """

    ranks: int
    tokens: int
    received: float
    gathered: bool


def pairs_of(length: int, window: int | None, *, causal: bool, chunk: int | None = None) -> float:
    """Return the number of pairs of a query and a key in a sequence of `length` tokens.

    Without a window this is the usual formula, half of all pairs if `causal`.

    Args:
        length: Tokens of the sequence.
        window: Largest number of keys per query; the first `window` queries have 1, 2, ... keys. None means no window.
        causal: Whether a query attends only to itself and to earlier tokens.
        chunk: Tokens of the chunks into which the sequence is cut; None means one chunk.
    """
    if chunk is not None and chunk < length:
        whole, rest = divmod(length, chunk)
        return (whole * chunk * chunk + rest * rest) / 2
    if window is not None and window < length:
        return length * window - window * (window - 1) / 2
    return length * length / 2 if causal else length * length


def column_sums(part: nn.Module, batch: MicroBatch) -> float:
    """Return the bytes of the output gradients of the part's linear layers with a bias."""
    layers = (x for x in part.modules() if isinstance(x, (ColumnParallelLinear, RowParallelLinear)))
    sites = [x.state.site for x in layers if x.bias is not None]
    return float(sum(batch.tokens_of(site) * site.outputs for site in sites) * batch.element)
