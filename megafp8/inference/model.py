"""A model without and with a paged cache: from packed tokens to logits, on every layout of ranks.

The modules are those of training, in evaluation: no dropout, no FP8 statistics. A step runs the stages one after the
other, so with a pipeline one rank computes at a time.

Shapes: n tokens of a step, r of them before a token that is to be chosen, h hidden, v vocabulary, t tensor-parallel
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megafp8.config import LongRopeConfig
from megafp8.fp8 import Fp8Manager
from megafp8.inference.attention import PackedStep, PagedAttention, PagedKeys
from megafp8.inference.decode_graphs import DecodeGraphs
from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk
from megafp8.inference.states import StateStore, StepRecurrence
from megafp8.layers.attention.op import CoreAttention
from megafp8.layers.head.op import at_temperature, vocab_parallel_cross_entropy
from megafp8.layers.mixer import StateCache, TokenCache, Tokens
from megafp8.layers.recurrent.op import Recurrence
from megafp8.layers.rotary.module import RotaryEmbedding
from megafp8.linear.quantized_weight import QuantizedWeightFormat
from megafp8.models.gpt import GPTStage
from megafp8.parallel.collectives import all_gather, own_slice, recv_async, send_async
from megafp8.parallel.parallel_state import Group, ParallelState
from megafp8.parallel.pipeline.actions import StagePlacement
from megafp8.spec import ModelSpec

_FP8_ROWS, _FP8_SHARD = 16, 128
"""FP8 GEMMs, and ranks that quantize slices, get a multiple of this many tokens: the largest `shard_alignment`."""


@dataclass(frozen=True)
class Model:
    """This rank's stages of a model, in the order of its chunks, and the layout they belong to.

    `trained_length`: tokens of the sequences that a run trained it with; 0 where that is not known. `why_eager`: why
    decode steps are not replayed from CUDA graphs; empty where they are. `in_training`: its weights change, and what it
    makes of them is used with gradients. `weights`: the format that weights of linear layers are quantized to.
    `stored_fp8`: where there are any, the only weights that are, those of a folder in FP8 (`quantized_weights`).
    `own_texts`: the ranks of `parallel.model` generate texts of their own, else all ranks the same.
    """

    spec: ModelSpec
    stages: Sequence[GPTStage]
    placement: StagePlacement
    parallel: ParallelState
    fp8: Fp8Manager
    trained_length: int = 0
    why_eager: str = ""
    in_training: bool = False
    weights: QuantizedWeightFormat | None = None
    stored_fp8: frozenset[str] = frozenset()
    own_texts: bool = False

    @property
    def batch_invariant(self) -> bool:
        """Whether forward passes are batch-invariant (`megafp8.numerics.batch_invariance`)."""
        return self.fp8.batch_invariant

    @property
    def ranks(self) -> Group:
        """The ranks that generate the same texts."""
        return self.parallel.model if self.own_texts else self.parallel.world

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage, which has the logits."""
        return self.placement.homes[-1][0]

    def check_length(self, max_length: int) -> None:
        """ValueError if the model has no positions for sequences of `max_length` tokens."""
        rows = self.spec.stem.max_position_embeddings
        if self.spec.stem.position_embedding == "learned" and rows is not None and max_length > rows:
            raise ValueError(f"max_length = {max_length}: the model has a table of {rows} positions; try {rows}")


def check_decoder(model: ModelSpec) -> None:
    """ValueError for a model that does not continue a text."""
    if model.architecture != "gpt":
        raise ValueError(f"model.architecture = {model.architecture}: only models of architecture gpt continue a text")


class PackedTokens(Protocol):
    """Tokens of a forward pass, packed one after the other.

    `tokens_1n`, `positions_1n`: int64, padded to a multiple of `PackedModel.multiple`. `lengths_n`: the most tokens
    that each token's sequence may have. `keys`: as many tokens as any sequence has, or more.
    """

    @property
    def tokens_1n(self) -> Tensor: ...
    @property
    def positions_1n(self) -> Tensor: ...
    @property
    def lengths_n(self) -> Tensor: ...
    @property
    def keys(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RunTokens(Tokens):
    """Packed tokens. `lengths_n`, `trained_length`: as in `PackedTokens` and `Model`."""

    lengths_n: Tensor
    trained_length: int

    def rotary(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """With LongRoPE those of long sequences for each that may become long, and for all if a run trained the model
        with long ones."""
        scaling = rope.keys.longrope
        return super().rotary(rope) if scaling is None else self.once(rope.key, lambda: self._longrope(rope, scaling))

    def _longrope(self, rope: RotaryEmbedding, scaling: LongRopeConfig) -> tuple[Tensor, Tensor]:
        longest_short = scaling.original_max_position_embeddings
        short, long = (rope.table(self.positions, longest_short + extra) for extra in (0, 1))
        is_long = (self.lengths_n.clamp(min=self.trained_length) > longest_short).view(-1, 1, 1, 1)
        return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])


@dataclass(frozen=True, kw_only=True)
class CachedTokens(RunTokens):
    """The tokens of a step of generation, whose sequences have pages and states."""

    step: PackedStep
    pages: PagedCache
    states: StateStore

    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        return PagedAttention(self.step, self.pages, layer, window, chunk, stores)

    def keys(self, layer: int) -> PagedKeys:
        return PagedKeys(self.step, self.pages, layer)

    def recurrence(self, layer: int) -> Recurrence:
        return StepRecurrence(self.step, self.states, layer)


P = TypeVar("P", bound=PackedTokens)


class PackedModel:
    """Forward passes of `model` over packed tokens. Collective: on every rank."""

    def __init__(self, model: Model) -> None:
        check_decoder(model.spec)
        context = model.stages[0].context
        self.model = model
        self._ranks = context.tensor.size() if context.sequence_sharded else 1
        self.multiple = self._ranks
        if model.fp8.recipe is not None:
            self.multiple *= _FP8_ROWS if self._ranks == 1 else _FP8_SHARD
        # Where operations without kernels of ours then run PyTorch's own (`linear.fusion.runs_unfused`).
        own_ops = context.device.type == "cpu" and not model.in_training and not model.batch_invariant
        self._inference_mode = own_ops

    def run(self, packed: P, run_stage: Callable[[int, Tensor | None, P], Tensor | None]) -> Tensor | None:
        """What `run_stage` gives for the last stage; None on ranks without it.

        `run_stage`: from a stage's index, the residual stream before it and `packed` to the stream after it.
        Collective: with equal tokens on every rank of the model.
        """
        model, pipeline = self.model, self.model.parallel.pipeline
        x_sbh: Tensor | None = None
        # torch.inference_mode(False) would allow gradients.
        without_gradients = torch.inference_mode if self._inference_mode else torch.no_grad
        with without_gradients(), model.fp8.recording(False):
            for index, (home, chunk) in enumerate(model.placement.homes):
                if home != pipeline.rank:
                    continue
                stage = model.stages[chunk]
                if index and (before := model.placement.homes[index - 1][0]) != home:
                    x_sbh = self._empty_stream(stage, packed)
                    recv_async(x_sbh, pipeline.group, before).wait()
                x_sbh = run_stage(chunk, x_sbh, packed)
                if stage.head is not None:
                    return x_sbh
                if (after := model.placement.homes[index + 1][0]) != home:
                    assert x_sbh is not None
                    send_async(x_sbh.contiguous(), pipeline.group, after).wait()
        return None

    def _empty_stream(self, stage: GPTStage, packed: PackedTokens) -> Tensor:
        rows = packed.tokens_1n.shape[1] // self._ranks
        context = stage.context
        return torch.empty(rows, 1, self.model.spec.stream_width, dtype=context.dtype, device=context.device)

    def run_blocks(
        self, stage: GPTStage, x_sbh: Tensor | None, packed: PackedTokens, tokens: Tokens
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after a stage's blocks, and what is still to be added to it."""
        if stage.embedding is not None:
            x_sbh = stage.embedding(packed.tokens_1n, packed.positions_1n)
        assert x_sbh is not None
        inputs = stage.with_per_layer(stage.inputs_of(tokens), packed.tokens_1n, x_sbh)
        return stage.run_blocks(x_sbh, inputs)

    def logits(self, stage: GPTStage, x_sbh: Tensor, branch_sbh: Tensor | None, rows_r: Tensor) -> Tensor:
        """This rank's logits `[r, v/t]`, float32, after these tokens, from the stream after the last stage's blocks.

        Where `model.batch_invariant` those without a soft cap, as the loss reads them (`capped`, `loss_logprobs`).
        """
        assert stage.head is not None
        streams = [None if x is None else self._rows(x, rows_r, stage) for x in (x_sbh, branch_sbh)]
        logits_rbv: Tensor = stage.head(*streams, None, capped=not self.model.batch_invariant)
        return logits_rbv[: len(rows_r), 0].float()

    def capped(self, logits_rv: Tensor) -> Tensor:
        """`logits` with the model's soft cap."""
        cap = self.model.spec.head.logit_softcap
        return logits_rv if cap is None or not self.model.batch_invariant else cap * (logits_rv / cap).tanh()

    def loss_logprobs(self, logits_rv: Tensor, tokens_rc: Tensor, divisors: Sequence[float] | None = None) -> Tensor:
        """Log-probabilities `[r, c]` of tokens, computed as the loss of training is, from this rank's `logits`.

        `divisors`: of each row, what its logits are divided by, as `megafp8.objectives.grpo` does; None: 1.
        """
        size, cap = self.model.spec.stem.known_vocab_size, self.model.spec.head.logit_softcap
        assert size is not None
        context = self.model.stages[0].context
        group = context.tensor
        # As training has them: a kernel that reads a wider dtype adds up in another order.
        logits_1rv, plain_rc = logits_rv.to(context.dtype).unsqueeze(0), None
        if divisors is not None and any(x != 1 for x in divisors):
            divisors_r1 = torch.tensor(divisors, dtype=torch.float64, device=context.device).unsqueeze(1)
            plain_rc = self.loss_logprobs(logits_rv, tokens_rc) if 1 in divisors else None
            logits_1rv, cap = at_temperature(self.capped(logits_1rv), divisors_r1), None
        losses = [
            vocab_parallel_cross_entropy(logits_1rv, x.contiguous().unsqueeze(0), group, vocab_size=size, softcap=cap)
            for x in tokens_rc.unbind(1)
        ]
        logprobs_rc = -torch.cat(losses).t()
        return logprobs_rc if plain_rc is None else torch.where(divisors_r1 == 1, plain_rc, logprobs_rc)

    def _rows(self, x_sbh: Tensor, rows_r: Tensor, stage: GPTStage) -> Tensor:
        """These tokens of the residual stream, sharded as it is, with some of padding then."""
        if not stage.context.sequence_sharded:
            return x_sbh[rows_r]
        group, padding = stage.context.tensor, -len(rows_r) % self._ranks
        rows_r = torch.cat([rows_r, rows_r.new_zeros(padding)])
        return own_slice(all_gather(x_sbh, group)[rows_r], group)


class CachedModel(PackedModel):
    """`model` with a cache of `num_pages` pages, which the sequences of all steps share. Collective: on every rank.

    `sequences`: the most that run at once. `longest`: the most tokens of a sequence. `stored`: float8_e4m3fn or int8 to
    store keys and values so.
    """

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        *,
        sequences: int,
        longest: int,
        stored: torch.dtype | None = None,
    ) -> None:
        super().__init__(model)
        context = model.stages[0].context
        last = model.spec.num_blocks
        blocks = [block for stage in model.stages for block in stage.all_blocks if block.index < last]
        kept = [(block.index, cache) for block in blocks for cache in block.mixer.cache]
        self.cache = PagedCache(
            {layer: cache for layer, cache in kept if isinstance(cache, TokenCache)},
            num_pages=num_pages,
            page_size=page_size,
            dtype=context.dtype,
            device=context.device,
            stored=stored,
        )
        states = {layer: cache for layer, cache in kept if isinstance(cache, StateCache)}
        self.states = StateStore(states, sequences, context.device)
        self._longest = longest
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> DecodeGraphs | None:
        if not self.cache.in_place or self.model.why_eager:
            return None
        device = self.model.stages[0].context.device
        return DecodeGraphs(self._run_stage, self.cache, device, longest=self._longest, multiple=self.multiple)

    def weights_changed(self) -> None:
        """Forget CUDA graphs if layers compute with something made of the weights, which has other addresses now."""
        if self.model.fp8.recipe is not None or self.model.weights is not None:
            self._graphs = self._new_graphs()

    def step(self, batch: Sequence[Chunk]) -> Tensor | None:
        """Run the chunks, and return this rank's logits `[r, v/t]` after those that are `last`, float32.

        None on ranks without the last stage, and where no chunk is the last. Collective: with equal chunks on every
        rank of the model.
        """
        if self._graphs is not None and all(len(chunk.tokens) == 1 for chunk in batch):
            logits_rv = self.run(self._graphs.fill(batch), self._graphs.run)
        else:
            step = PackedStep.pack(batch, self.cache, self.model.parallel.device, self.multiple)
            logits_rv = self.run(step, self._run_stage)
        return None if logits_rv is None else logits_rv[: len(batch)]

    def _run_stage(self, index: int, x_sbh: Tensor | None, step: PackedStep) -> Tensor | None:
        """The residual stream after a stage; of the last one logits, None if there is nothing to choose."""
        stage = self.model.stages[index]
        tokens = CachedTokens(
            step.positions_1n,
            step.keys,
            step.tokens_1n,
            lengths_n=step.lengths_n,
            trained_length=self.model.trained_length,
            step=step,
            pages=self.cache,
            states=self.states,
        )
        x_sbh, branch_sbh = self.run_blocks(stage, x_sbh, step, tokens)
        if stage.head is None:
            return x_sbh if branch_sbh is None else x_sbh + branch_sbh
        return self.logits(stage, x_sbh, branch_sbh, step.rows_r) if len(step.rows_r) else None
