"""Forward passes from packed tokens to logits, with and without a paged cache, in every layout of ranks.

The modules are the same as in training, in evaluation mode: no dropout, no FP8 statistics. A step runs the stages one
after the other, so with pipeline parallelism only one rank computes at a time.

Shapes: n tokens of a step, r tokens whose next token is predicted, h hidden, v vocabulary, t tensor-parallel size.
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
"""Numbers of tokens that FP8 GEMMs, and each rank that quantizes a slice, get a multiple of. The second number is the
largest `shard_alignment`."""


@dataclass(frozen=True)
class Model:
    """Stages of a model on this rank, and the layout of the model.

    Attributes:
        spec: Description of the model.
        stages: Stages of this rank, in the order of its chunks.
        placement: Ranks of all stages.
        parallel: Process groups of the layout.
        fp8: FP8 state of the layers.
        trained_length: Length of the sequences that a run trained the model with; 0 if unknown.
        why_eager: Reason that decode steps are not replayed from CUDA graphs; empty if they are.
        in_training: Whether this is a live model: its weights change, and training uses them with gradients.
        weights: Format that weights of linear layers are quantized to; None: not quantized.
        stored_fp8: Names of the weights that an FP8 folder stores in FP8. If there are any, no other weights are
            quantized (`quantized_weights`).
        own_texts: Whether each group of ranks `parallel.model` generates different texts. If False, all ranks generate
            the same texts.
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
        """Ranks that generate the same texts."""
        return self.parallel.model if self.own_texts else self.parallel.world

    @property
    def last_rank(self) -> int:
        """Pipeline rank of the last stage, which computes the logits."""
        return self.placement.homes[-1][0]

    def check_length(self, max_length: int) -> None:
        """Raise ValueError if the model has too few positions for sequences of `max_length` tokens."""
        rows = self.spec.stem.max_position_embeddings
        if self.spec.stem.position_embedding == "learned" and rows is not None and max_length > rows:
            raise ValueError(f"max_length = {max_length}: the model has a table of {rows} positions; try {rows}")


def check_decoder(model: ModelSpec) -> None:
    """Raise ValueError for a model that cannot continue a text."""
    if model.architecture != "gpt":
        raise ValueError(f"model.architecture = {model.architecture}: only the architecture gpt can continue a text")


class PackedTokens(Protocol):
    """Tokens of a forward pass, packed one after the other."""

    @property
    def tokens_1n(self) -> Tensor:
        """Token ids, int64, padded to a multiple of `PackedModel.multiple`."""
        ...

    @property
    def positions_1n(self) -> Tensor:
        """Position of each token in its sequence, int64, padded like `tokens_1n`."""
        ...

    @property
    def lengths_n(self) -> Tensor:
        """Largest number of tokens that the sequence of each token may reach."""
        ...

    @property
    def keys(self) -> int:
        """Upper bound of the number of tokens of any sequence."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunTokens(Tokens):
    """Packed tokens as layers see them. `lengths_n` is as in `PackedTokens`, `trained_length` as in `Model`."""

    lengths_n: Tensor
    trained_length: int

    def rotary(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the tokens' positions.

        With LongRoPE, sequences that may become long use the long table. All sequences use it if a run trained the
        model with long sequences.
        """
        scaling = rope.keys.longrope
        return super().rotary(rope) if scaling is None else self.once(rope.key, lambda: self._longrope(rope, scaling))

    def _longrope(self, rope: RotaryEmbedding, scaling: LongRopeConfig) -> tuple[Tensor, Tensor]:
        longest_short = scaling.original_max_position_embeddings
        short, long = (rope.table(self.positions, longest_short + extra) for extra in (0, 1))
        is_long = (self.lengths_n.clamp(min=self.trained_length) > longest_short).view(-1, 1, 1, 1)
        return torch.where(is_long, long[0], short[0]), torch.where(is_long, long[1], short[1])


@dataclass(frozen=True, kw_only=True)
class CachedTokens(RunTokens):
    """Tokens of a generation step, with the pages and recurrent states of their sequences."""

    step: PackedStep
    pages: PagedCache
    states: StateStore

    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        """Return the core attention of a layer with cached keys and values."""
        return PagedAttention(self.step, self.pages, layer, window, chunk, stores)

    def keys(self, layer: int) -> PagedKeys:
        """Return the attention of a layer to cached keys without values."""
        return PagedKeys(self.step, self.pages, layer)

    def recurrence(self, layer: int) -> Recurrence:
        """Return the recurrence of a layer with cached states."""
        return StepRecurrence(self.step, self.states, layer)


P = TypeVar("P", bound=PackedTokens)


class PackedModel:
    """Runner of forward passes of a model over packed tokens. Collective: used on every rank."""

    def __init__(self, model: Model) -> None:
        check_decoder(model.spec)
        context = model.stages[0].context
        self.model = model
        self._ranks = context.tensor.size() if context.sequence_sharded else 1
        self.multiple = self._ranks
        if model.fp8.recipe is not None:
            self.multiple *= _FP8_ROWS if self._ranks == 1 else _FP8_SHARD
        # On a CPU in inference mode, operations without a megafp8 kernel run in PyTorch (`linear.fusion.runs_unfused`).
        own_ops = context.device.type == "cpu" and not model.in_training and not model.batch_invariant
        self._inference_mode = own_ops

    def run(self, packed: P, run_stage: Callable[[int, Tensor | None, P], Tensor | None]) -> Tensor | None:
        """Run all stages, and return the output of the last stage, or None on ranks without it.

        `run_stage` maps the index of a stage, the residual stream before it and `packed` to the residual stream after
        it. Collective: every rank of the model passes equal tokens.
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
        """Run a stage's blocks. Return the residual stream, and the last branch, which is not yet added to it."""
        if stage.embedding is not None:
            x_sbh = stage.embedding(packed.tokens_1n, packed.positions_1n)
        assert x_sbh is not None
        inputs = stage.with_embeddings(stage.inputs_of(tokens), packed.tokens_1n, x_sbh)
        return stage.run_blocks(x_sbh, inputs)

    def logits(self, stage: GPTStage, x_sbh: Tensor, branch_sbh: Tensor | None, rows_r: Tensor) -> Tensor:
        """Return this rank's logits after the tokens `rows_r`, float32 `[r, v/t]`.

        The arguments are the results of `run_blocks` for the last stage. For a batch-invariant model, the logits are
        without the soft cap, as the loss reads them (`capped`, `loss_logprobs`).
        """
        assert stage.head is not None
        streams = [None if x is None else self._rows(x, rows_r, stage) for x in (x_sbh, branch_sbh)]
        logits_rbv: Tensor = stage.head(*streams, None, capped=not self.model.batch_invariant)
        return logits_rbv[: len(rows_r), 0].float()

    def capped(self, logits_rv: Tensor) -> Tensor:
        """Return the result of `logits` with the model's soft cap."""
        cap = self.model.spec.head.logit_softcap
        return logits_rv if cap is None or not self.model.batch_invariant else cap * (logits_rv / cap).tanh()

    def loss_logprobs(self, logits_rv: Tensor, tokens_rc: Tensor, divisors: Sequence[float] | None = None) -> Tensor:
        """Return the log-probabilities `[r, c]` of tokens, computed like the training loss from this rank's `logits`.

        The logits of each row are divided by its entry of `divisors`, as in `megafp8.objectives.grpo`; None means 1.
        """
        size, cap = self.model.spec.stem.known_vocab_size, self.model.spec.head.logit_softcap
        assert size is not None
        context = self.model.stages[0].context
        group = context.tensor
        # Same dtype as in training: a kernel that reads a wider dtype sums in another order.
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
        """Return the rows `rows_r` of the residual stream, sharded like the stream and padded to equal shards."""
        if not stage.context.sequence_sharded:
            return x_sbh[rows_r]
        group, padding = stage.context.tensor, -len(rows_r) % self._ranks
        rows_r = torch.cat([rows_r, rows_r.new_zeros(padding)])
        return own_slice(all_gather(x_sbh, group)[rows_r], group)


class CachedModel(PackedModel):
    """Runner of forward passes of a model with a paged cache. Collective: used on every rank.

    Args:
        model: Model to run.
        num_pages: Number of pages, which the sequences of all steps share.
        page_size: Number of tokens of a page.
        sequences: Largest number of sequences that run at once.
        longest: Largest number of tokens of a sequence.
        stored: Dtype in which keys and values are stored quantized: float8_e4m3fn or int8. None: not quantized.
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
        """Discard CUDA graphs if layers use quantized copies of the weights, which now have other addresses."""
        if self.model.fp8.recipe is not None or self.model.weights is not None:
            self._graphs = self._new_graphs()

    def step(self, batch: Sequence[Chunk]) -> Tensor | None:
        """Run the chunks, and return this rank's logits after each chunk that is `last`, float32 `[r, v/t]`.

        Return None on ranks without the last stage, and if no chunk is `last`. Collective: every rank of the model
        passes equal chunks.
        """
        if self._graphs is not None and all(len(chunk.tokens) == 1 for chunk in batch):
            logits_rv = self.run(self._graphs.fill(batch), self._graphs.run)
        else:
            step = PackedStep.pack(batch, self.cache, self.model.parallel.device, self.multiple)
            logits_rv = self.run(step, self._run_stage)
        return None if logits_rv is None else logits_rv[: len(batch)]

    def _run_stage(self, index: int, x_sbh: Tensor | None, step: PackedStep) -> Tensor | None:
        """Return the residual stream after a stage. The last stage returns logits, or None if no token is predicted."""
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
