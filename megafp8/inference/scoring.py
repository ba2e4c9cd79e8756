"""`Scorer`: log-probabilities of tokens after given contexts, with a model in any layout.

Sequences are packed one after the other, without padding between them and without a cache. Requests with the same
context, such as the choices of a question, compute the context once: each continuation attends to the keys of the
context and to its own keys. Logits are computed only for tokens before scored tokens, some rows at a time. They are
never gathered from the ranks that divide the vocabulary.

Shapes: n tokens of a step, r tokens before scored tokens, c scored tokens after one of these, h hidden, v vocabulary,
t tensor-parallel size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.data.samples import room_for
from megafp8.inference.attention import AttentionWithoutBackward, scores_of_length
from megafp8.inference.model import Model, PackedModel, RunTokens
from megafp8.inference.sampling import VocabShard
from megafp8.layers.attention.mask import AttentionMask, causal_mask, key_ranges
from megafp8.layers.attention.op import CoreAttention, attention
from megafp8.layers.attention.scores import PLAIN, Scores
from megafp8.layers.mixer import AttendTo, one_of_each
from megafp8.layers.recurrent.op import Recurrence, RecurrentRule
from megafp8.models.gpt import GPTStage
from megafp8.parallel.collectives import broadcast, broadcast_object

_LOGIT_ROWS = 1024
"""Number of rows of float32 logits that are computed at once."""
_CUDA_ROWS = 256
"""Multiple to which numbers of tokens and keys are padded on a GPU, because kernels are prepared for each shape."""


OnKeys = Callable[[int, Tensor, Tensor], None]


class Request(NamedTuple):
    """Request to score `continuation` after `context`. Both have at least one token id."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """Log-probability of each token of a continuation, in nats, and whether all tokens are the most probable ones."""

    logprobs: list[float]
    greedy: bool


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[Request]:
    """Yield requests that score every token except the first exactly once, with at most `length` tokens of input.

    The first request scores as many tokens as fit. Each later request scores the next `stride` tokens, with as many
    tokens before them as fit.
    """
    assert 1 <= stride <= length
    scored = 1
    while scored < len(tokens):
        end = min(scored + (length if scored == 1 else stride), len(tokens))
        yield Request(tokens[max(0, end - 1 - length) : scored], tokens[scored:end])
        scored = end


class _Group(NamedTuple):
    """Context with one or more continuations."""

    context: list[int]
    continuations: list[list[int]]


@dataclass(frozen=True)
class _Step:
    """Tokens of a step on the device (`megafp8.inference.model.PackedTokens`).

    Tensors are int64, except the segments.

    Attributes:
        tokens_1n: Token ids, padded by repeating the last one.
        positions_1n: Position of each token in its sequence.
        lengths_n: Length of each token's sequence.
        tokens: Number of tokens without padding.
        segments_q: Cumulative numbers of queries of the segments, int32 `[1, m + 1]`; None if there is one segment.
        segments_k: Cumulative numbers of keys of the segments, int32 `[1, m + 1]`; None if there is one segment.
        key_rows: Rows of the keys that the segments attend to, in order. None if no context is shared: a segment then
            attends to the keys of its own rows.
        rows_r: Tokens after which other tokens are scored.
        labels_rc: Scored tokens after each of these, filled up with 0.
        places: Row and column in `labels_rc` of each scored token, in order.
    """

    tokens_1n: Tensor
    positions_1n: Tensor
    lengths_n: Tensor
    tokens: int
    segments_q: Tensor | None
    segments_k: Tensor | None
    key_rows: Tensor | None
    rows_r: Tensor
    labels_rc: Tensor
    places: list[tuple[int, int]]

    @property
    def keys(self) -> int:
        """Upper bound of the number of keys of any segment, a power of two."""
        return 1 << (self.tokens_1n.shape[1] - 1).bit_length()

    @classmethod
    def pack(cls, groups: Sequence[_Group], device: torch.device, multiple: int) -> _Step:
        """Pack groups into a step, and pad the number of tokens to a multiple."""
        packing = _Packing()
        for group in groups:
            packing.add(group)
        rows, labels = list(packing.labels), list(packing.labels.values())
        columns = max(map(len, labels))
        number = {row: i for i, row in enumerate(rows)}
        count, padding = len(packing.tokens), -len(packing.tokens) % multiple

        def tensor(values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def padded(values: list[int]) -> Tensor:
            return tensor(values + values[-1:] * padding)

        def ends(values: list[int]) -> Tensor:
            return tensor([[0, *values, *values[-1:] * (room_for(len(values)) - len(values))]], torch.int32)

        segments_q = segments_k = key_rows = None
        if len(packing.ends_q) > 1:
            segments_q = segments_k = ends(packing.ends_q)
        if packing.shares:
            segments_k = ends(packing.ends_k)
            key_rows = tensor(packing.key_rows + [0] * (-len(packing.key_rows) % multiple))
        return cls(
            padded(packing.tokens).unsqueeze(0),
            padded(packing.positions).unsqueeze(0),
            padded(packing.lengths),
            count,
            segments_q,
            segments_k,
            key_rows,
            tensor(rows),
            tensor([x + [0] * (columns - len(x)) for x in labels]),
            [(number[row], column) for row, column in packing.scored],
        )

    def mask(self, window: int | None, chunk: int | None) -> AttentionMask:
        """Return the attention mask of a layer with this window or these chunks."""
        if self.key_rows is None:
            return causal_mask(self.segments_q, window, self.tokens_1n.shape[1], self.tokens_1n.device, chunk)
        assert chunk is None, "sequences share no context then"
        return AttentionMask(self.segments_q, self.segments_k, window=window)

    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """Return the first key of each token, and the key after its last, `[1, n]` each."""
        queries = self.tokens_1n.shape[1]
        keys = queries if self.key_rows is None else len(self.key_rows)
        return key_ranges(AttentionMask(self.segments_q, self.segments_k), queries, keys, self.tokens_1n.device)


class _Packing:
    """Builder of a `_Step`: tokens of groups as lists. `labels` has the scored tokens after each row."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.lengths: list[int] = []
        self.ends_q: list[int] = []
        self.ends_k: list[int] = []
        self.key_rows: list[int] = []
        self.labels: dict[int, list[int]] = {}
        self.scored: list[tuple[int, int]] = []
        self.shares = False

    def add(self, group: _Group) -> None:
        """Add a group. A single continuation shares a segment with its context; several get separate segments."""
        context, several = group.context, len(group.continuations) > 1
        first = len(self.tokens)
        self._segment(context if several else context + group.continuations[0][:-1], range(0))
        own_start = first + len(context)
        for continuation in group.continuations:
            if several and len(continuation) > 1:
                own_start = len(self.tokens)
                self._segment(continuation[:-1], range(first, first + len(context)))
            for i, label in enumerate(continuation):
                self._score(first + len(context) - 1 if i == 0 else own_start + i - 1, label)

    def _segment(self, tokens: list[int], before: range) -> None:
        """Add tokens that attend to the rows `before`, and causally to each other."""
        first, start, length = len(self.tokens), len(before), len(before) + len(tokens)
        self.tokens += tokens
        self.positions += range(start, length)
        self.lengths += [length] * len(tokens)
        self.key_rows += [*before, *range(first, first + len(tokens))]
        self.ends_q.append(len(self.tokens))
        self.ends_k.append(len(self.key_rows))
        self.shares |= len(before) > 0

    def _score(self, row: int, label: int) -> None:
        row_labels = self.labels.setdefault(row, [])
        self.scored.append((row, len(row_labels)))
        row_labels.append(label)


@dataclass(frozen=True)
class _PackedAttention(AttentionWithoutBackward):
    """Core attention of a layer within the segments of a step (`layers.attention.op.CoreAttention`)."""

    step: _Step
    mask: AttentionMask
    on_keys: Callable[[Tensor, Tensor], None] | None

    def __call__(
        self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Return the attention of `[n, 1, ...]` tensors. `scores` are made for sequences of `step.keys` tokens."""
        step = self.step
        if self.on_keys is not None:
            self.on_keys(k_sbgd, v_sbgd)
        if step.key_rows is not None:
            k_sbgd, v_sbgd = k_sbgd[step.key_rows], v_sbgd[step.key_rows]
        y_sbad = attention(q_sbad, k_sbgd, v_sbgd, self.mask, sink_a, scores_of_length(scores, len(q_sbad)))
        if len(y_sbad) > step.tokens:  # padding repeats the last token, so that it changes no amax
            y_sbad[step.tokens :] = y_sbad[step.tokens - 1]
        return y_sbad


@dataclass(frozen=True)
class _PackedKeys(AttentionWithoutBackward):
    """Attention of a layer to keys without values, within segments (`megafp8.layers.mixer.AttendToKeys`)."""

    step: _Step
    first_1n: Tensor
    stop_1n: Tensor

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        count, rows = self.step.tokens, self.step.key_rows
        first, second = keys if rows is None else (x[rows] for x in keys)
        whole = first, one_of_each(second, every)
        single_queries = tuple(x[:count] for x in queries)
        y_n1 = attend(single_queries, whole, self.first_1n[:, :count], self.stop_1n[:, :count])
        return torch.cat([y_n1, y_n1[-1:].expand(len(queries[0]) - count, *y_n1.shape[1:])])


@dataclass(frozen=True, kw_only=True)
class _StepTokens(RunTokens):
    """Tokens of a step as layers see them; each segment is a sequence."""

    step: _Step
    on_keys: OnKeys | None

    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        """Return the core attention of a layer within segments."""
        mask = self.once(("mask", window, chunk), lambda: self.step.mask(window, chunk))
        return _PackedAttention(self.step, mask, partial(self.on_keys, layer) if self.on_keys and stores else None)

    def keys(self, layer: int) -> _PackedKeys:
        """Return the attention of a layer to keys without values, within segments."""
        return self.once("keys", lambda: _PackedKeys(self.step, *self.step.key_ranges()))

    def recurrence(self, layer: int) -> Recurrence:
        """Return the recurrence of a layer, which starts anew in each segment."""
        return self._recurrence

    def _recurrence(self, rule: RecurrentRule, xs: tuple[Tensor, ...]) -> Tensor:
        count = self.step.tokens
        starts_n1 = self.once("starts", lambda: self.positions.t() == 0)
        y_n1, _ = rule.advance(tuple(x[:count] for x in xs), rule.zeros(1), starts_n1[:count])
        return torch.cat([y_n1, y_n1[-1:].expand(len(xs[0]) - count, *y_n1.shape[1:])])


class Scorer:
    """Scorer of tokens with a model in any layout. Collective: every rank creates it and makes every call.

    Args:
        model: Model that scores.
        max_length: Largest number of tokens of a sequence that the model reads.
        max_batch_tokens: Largest number of tokens of a forward pass. A longer sequence gets a separate pass.
        before: Function that is called before each call, for a model with changing weights.
        on_keys: Function that is called with the number of each attention layer, its keys and its values, as a cache
            stores them.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_length: int,
        max_batch_tokens: int = 8192,
        before: Callable[[], None] = lambda: None,
        on_keys: OnKeys | None = None,
    ) -> None:
        model.check_length(max_length)
        for name, value in (("max_length", max_length), ("max_batch_tokens", max_batch_tokens)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        self.model, self.max_length, self._before, self._on_keys = model, max_length, before, on_keys
        self._packed, self._max_batch_tokens = PackedModel(model), max_batch_tokens
        self._multiple = self._packed.multiple
        if model.parallel.device.type == "cuda":
            self._multiple = math.lcm(self._multiple, _CUDA_ROWS)
        mixers = [layer.mixer for layer in model.spec.distinct_layers]
        self._shares = all(mixer.shares_context for mixer in mixers)

    def score(self, requests: Iterable[Request]) -> Iterator[Score]:
        """Yield the scores of all requests, in order.

        All ranks use the requests of the first rank, and must read all scores. Contexts that are too long lose their
        first tokens. Successive requests with equal contexts compute the context once. Raises ValueError, on all ranks,
        for a request that does not fit, and any ValueError or OSError of reading `requests`.
        """
        world = self.model.parallel.world
        self._before()
        batches = self._batches(requests)
        while True:
            batch: list[_Group] | ValueError | OSError | None = None
            if world.is_first:
                try:
                    batch = next(batches, None)
                except (ValueError, OSError) as error:
                    batch = error
            batch = broadcast_object(batch, world.group)
            if batch is None:
                return
            if isinstance(batch, Exception):
                raise batch
            yield from self._scores(batch)

    def _batches(self, requests: Iterable[Request]) -> Iterator[list[_Group]]:
        """Yield batches of groups with at most `max_batch_tokens` tokens, or a single larger group.

        The first batch has one request, so that progress appears early.
        """
        batch: list[_Group] = []
        used, limit = 0, 0
        for request in requests:
            context, continuation = self._fitting(request)
            added = len(context) + len(continuation) - 1
            if self._shares and batch and batch[-1].context == context:
                added = len(continuation) - 1
            if batch and used + added > limit:
                yield batch
                batch, used, limit = [], 0, self._max_batch_tokens
                added = len(context) + len(continuation) - 1
            if self._shares and batch and batch[-1].context == context:
                batch[-1].continuations.append(continuation)
            else:
                batch.append(_Group(context, [continuation]))
            used += added
        if batch:
            yield batch

    def _fitting(self, request: Request) -> tuple[list[int], list[int]]:
        """Return context and continuation of a request, cut to the model's length. Raises ValueError."""
        context, continuation = ([int(token) for token in part] for part in request)
        if not context or not continuation:
            which = "continuation" if context else "context"
            raise ValueError(f"a request has an empty {which}; give at least one token")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, but max_length is {self.max_length}; score it in "
                "windows"
            )
        size = self.model.spec.stem.known_vocab_size
        assert size is not None
        if foreign := [token for token in itertools.chain(context, continuation) if not 0 <= token < size]:
            raise ValueError(f"a request has the token {foreign[0]}, but the model has tokens from 0 to {size - 1}")
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def _scores(self, groups: Sequence[_Group]) -> Iterator[Score]:
        parallel = self.model.parallel
        step = _Step.pack(groups, parallel.device, self._multiple)
        tokens = _StepTokens(
            step.positions_1n,
            step.keys,
            step.tokens_1n,
            lengths_n=step.lengths_n,
            trained_length=self.model.trained_length,
            step=step,
            on_keys=self._on_keys,
        )

        def run_stage(index: int, x_sbh: Tensor | None, step: _Step) -> Tensor:
            stage = self.model.stages[index]
            x_sbh, branch_sbh = self._packed.run_blocks(stage, x_sbh, step, tokens)
            if stage.head is None:
                return x_sbh if branch_sbh is None else x_sbh + branch_sbh
            return self._output(stage, x_sbh, branch_sbh, step)

        found_rc2 = self._packed.run(step, run_stage)
        if found_rc2 is None:
            found_rc2 = torch.empty(*step.labels_rc.shape, 2, dtype=torch.float64, device=parallel.device)
        ranks_of_a_stage = parallel.world_size // parallel.pipeline.size
        broadcast(found_rc2, parallel.world.group, self.model.last_rank * ranks_of_a_stage)
        values = found_rc2.tolist()
        scored = iter(values[row][column] for row, column in step.places)
        for group in groups:
            for continuation in group.continuations:
                logprobs, greedy = zip(*itertools.islice(scored, len(continuation)), strict=True)
                if any(map(math.isnan, logprobs)):
                    raise ValueError(
                        "the model's logits are not finite; its weights may be damaged, or too large for FP8"
                    )
                yield Score(list(logprobs), all(greedy))

    def _output(self, stage: GPTStage, x_sbh: Tensor, branch_sbh: Tensor | None, step: _Step) -> Tensor:
        """Return the log-probability of each label, and whether it is the most probable token, float64 `[r, c, 2]`."""
        group, size = self.model.parallel.tensor.group, self.model.spec.stem.known_vocab_size
        assert size is not None
        scores = []
        for rows_r, labels_rc in zip(step.rows_r.split(_LOGIT_ROWS), step.labels_rc.split(_LOGIT_ROWS), strict=True):
            logits_rv = self._packed.logits(stage, x_sbh, branch_sbh, rows_r)
            shard = VocabShard(self._packed.capped(logits_rv), size, group)
            if self.model.batch_invariant:
                logprobs_rc = self._packed.loss_logprobs(logits_rv, labels_rc)
            else:
                logprobs_rc = shard.at(shard.logits, labels_rc) - shard.logsumexp(shard.logits).unsqueeze(1)
            greedy_rc = shard.most_probable(shard.logits).unsqueeze(1) == labels_rc
            scores.append(torch.stack([logprobs_rc.double(), greedy_rc.double()], dim=-1))
        return torch.cat(scores)
