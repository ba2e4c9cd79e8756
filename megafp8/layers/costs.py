"""What a part of the network keeps and computes for one micro-batch on one rank: the values that parts answer with.

Parts are asked before a run, built on torch's meta device (`megafp8.planner.outline`): how many bytes they save for
their backward pass, by tensor, following what the autograd Functions of each kind save, each storage once; how many
bytes their kernels beside linear layers read and write; and their attention. Where the CPU and CUDA differ, these are
CUDA's. Linear layers are not among a part's work: their sizes and plans say what they cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from megafp8.config import Config
from megafp8.linear.state import LinearState
from megafp8.numerics.dtypes import DTYPES
from megafp8.numerics.recipes.base import OPERANDS, Fp8Recipe, OperandName
from megafp8.numerics.tensor import Granularity, on_hopper
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.plan import LinearSite

ELEMENT = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Bytes of an element, by the name of its dtype in a config."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch as one rank has it.

    `tokens`: inside of tensor-parallel regions; `own_tokens`: between them, a part of these with sequence parallelism.
    `sequences`, of `length` tokens on all context-parallel ranks together; `encoder_length`: of those that the decoder
    of T5 attends to. `element`, `statistic`: bytes of an element of an activation, and of a norm's statistics.
    `replayed`: CUDA graphs replay the step, so that buffers have their sizes before it is known what they will hold.
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

    @classmethod
    def from_config(cls, config: Config, recipe: Fp8Recipe | None, *, decoder: bool = False) -> MicroBatch:
        """That of a run; `decoder`: in the decoder of T5."""
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
        """Tokens that a linear layer computes."""
        if site.tokens is None:  # whole on each rank
            return self.own_tokens
        return site.tokens * (site.tensor_parallel if site.sequence_parallel else 1)

    def granularity(self, layer: str, operand: OperandName) -> Granularity:
        """Which elements of an operand of an FP8 layer share a scale."""
        recipes = None if self.recipe is None else self.recipe.operands(layer)
        assert recipes is not None
        return recipes[OPERANDS.index(operand)].granularity(operand)

    def saved_input(self, state: LinearState) -> int:
        """Bytes that a linear layer saves of its input."""
        plan, k, tokens = state.plan, state.site.inputs, self.tokens_of(state.site)
        if plan.saved == "recompute":
            return 0
        if plan.saved == "high":
            return tokens * k * self.element
        if plan.saved == "columnwise shard":
            assert state.site.tokens is not None
            tokens = state.site.tokens
        return fp8_bytes(self.granularity(plan.name, "input"), k, tokens)


def fp8_bytes(granularity: Granularity, r: int, c: int) -> int:
    """Bytes of an FP8 matrix `[r, c]` with its scales; of one with Blackwell's blocks, dequantized to bf16."""
    if not on_hopper(granularity):
        return 2 * r * c + 4
    return r * c + 4 * math.prod(granularity.grid(r, c))


class KernelWork(NamedTuple):
    """Bytes that kernels beside GEMMs and attention read and write, and the number of these kernels, each way.

    `column_sums`: bytes of the output gradients of linear layers that are read once more for the gradient of a bias.
    `more_in_backward`: kernels that backward has more than forward.
    """

    forward: float = 0.0
    backward: float = 0.0
    kernels: int = 0
    column_sums: float = 0.0
    more_in_backward: int = 0

    def __add__(self, other: KernelWork) -> KernelWork:  # type: ignore[override]
        return KernelWork(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


class AttentionWork(NamedTuple):
    """Attention of a micro-batch: `heads` of this rank of `width` channels, `queries` and `pairs` of a whole sequence.

    `value_width`: channels of a value. `modified`: scores are changed by more than a mask (biases, soft cap, sinks),
    for which there is another kernel.
    """

    heads: int
    width: int
    value_width: int
    queries: int
    pairs: float
    modified: bool


class DispatchTraffic(NamedTuple):
    """Tokens of a micro-batch that travel between `ranks` neighbouring ranks to their experts, or back.

    `tokens`: bytes of this rank's own; `received`: bytes from other ranks. `gathered`: all ranks get all tokens.
    """

    ranks: int
    tokens: int
    received: float
    gathered: bool


def pairs_of(length: int, window: int | None, *, causal: bool, chunk: int | None = None) -> float:
    """Pairs of a query and a key in a sequence, those without a window by the usual formula, half of all if `causal`.

    `window`: keys of a query at most; the first `window` queries have 1, 2, ... keys. `chunk`: tokens of the chunks
    that a sequence is cut into.
    """
    if chunk is not None and chunk < length:
        whole, rest = divmod(length, chunk)
        return (whole * chunk * chunk + rest * rest) / 2
    if window is not None and window < length:
        return length * window - window * (window - 1) / 2
    return length * length / 2 if causal else length * length


def column_sums(part: nn.Module, batch: MicroBatch) -> float:
    """Bytes of the output gradients of a part's linear layers with a bias."""
    layers = (x for x in part.modules() if isinstance(x, (ColumnParallelLinear, RowParallelLinear)))
    sites = [x.state.site for x in layers if x.bias is not None]
    return float(sum(batch.tokens_of(site) * site.outputs for site in sites) * batch.element)
