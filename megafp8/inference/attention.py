"""Attention of a step's tokens to the pages of their sequences.

The tokens of a step are packed one after the other, of whatever sequences, as `[n, 1, ...]`: everything else in a model
computes each token by itself. First come sequences with one token, which attend together, each to its own pages; then
each longer chunk by itself, to its own keys if it begins its sequence, else to its pages. What a query may attend to,
and what a score is, `layers.attention.op` knows: the mask has the position of each query, and the keys behind it, in
the rest of its last page or of longer sequences beside it, are masked as later tokens are.

Shapes: n tokens of a step, s of a chunk, b sequences, t keys, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk
from megafp8.layers.attention.mask import AttentionMask, causal_mask
from megafp8.layers.attention.op import attention
from megafp8.layers.attention.scores import PLAIN, Scores
from megafp8.layers.mixer import AttendTo

T = TypeVar("T")


class _LongChunk(NamedTuple):
    """`rows`: of its tokens in the step. `table_1p`: pages of its keys, which with `positions_1s` is None if it begins
    its sequence. `state_1`: int64, the slot of its states."""

    rows: slice
    table_1p: Tensor | None
    positions_1s: Tensor | None
    state_1: Tensor


@dataclass(frozen=True)
class PackedStep:
    """The tokens of a step on the device, the same for all layers. int64 but for the table.

    `tokens_1n`, `positions_1n`: the last `padding` of them repeat the last token, so that no amax is that of another.
    `slots_n`: where their keys are stored. `table_bm`: int32, the pages of the first b tokens' sequences, filled up
    with others. `states_b`: the slots of these sequences' states. `lengths_n`: the most tokens that each token's
    sequence may have. `rows_r`: the tokens after which the model is to give the next. `keys`: as many as any sequence
    has, or more.
    """

    tokens_1n: Tensor
    positions_1n: Tensor
    slots_n: Tensor
    lengths_n: Tensor
    table_bm: Tensor
    states_b: Tensor
    long: tuple[_LongChunk, ...]
    rows_r: Tensor
    keys: int
    padding: int = 0

    @classmethod
    def pack(cls, batch: Sequence[Chunk], cache: PagedCache, device: torch.device, multiple: int = 1) -> PackedStep:
        """`batch`: chunks of one token first. `multiple`: the number of tokens is padded to one."""
        count = sum(len(chunk.tokens) for chunk in batch)
        padding = -count % multiple
        tokens_4n = torch.empty(4, count + padding, dtype=torch.int64)
        long: list[_LongChunk] = []
        rows, at = [], 0
        for chunk in batch:
            chunk_rows = slice(at, at + len(chunk.tokens))
            at = chunk_rows.stop
            positions = torch.arange(chunk.start, chunk.start + len(chunk.tokens))
            pages = torch.tensor(chunk.pages)
            slots = pages[positions // cache.page_size] * cache.page_size + positions % cache.page_size
            lengths = torch.full_like(positions, chunk.sequence.max_length)
            tokens_4n[:, chunk_rows] = torch.stack([torch.tensor(chunk.tokens), positions, slots, lengths])
            if chunk.last:
                rows.append(chunk_rows.stop - 1)
            if len(chunk.tokens) == 1:
                assert not long, "a chunk of one token after longer ones"
                continue
            state = torch.tensor([chunk.state], device=device)
            if chunk.start == 0:
                long.append(_LongChunk(chunk_rows, None, None, state))
            else:
                long.append(_LongChunk(chunk_rows, pages.to(device)[None], positions.to(device)[None], state))
        tokens_4n[:, count:] = tokens_4n[:, count - 1 : count]
        tokens_4n[_SLOTS, count:] = cache.unread_slot
        singles = [chunk for chunk in batch if len(chunk.tokens) == 1]
        table = torch.zeros(len(singles), max((len(x.pages) for x in singles), default=0), dtype=torch.int32)
        for row, chunk in zip(table, singles, strict=True):
            row[: len(chunk.pages)] = torch.tensor(chunk.pages)
        longest = max(len(chunk.pages) for chunk in batch) * cache.page_size
        return cls(
            *_by_kind(tokens_4n.to(device)),
            table.to(device),
            torch.tensor([chunk.state for chunk in singles], dtype=torch.int64, device=device),
            tuple(long),
            torch.tensor(rows, device=device),
            1 << (longest - 1).bit_length(),
            padding,
        )

    @cached_property
    def _derived(self) -> dict[Any, Any]:
        return {}

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """`make()`, once for all layers."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


_SLOTS = 2


def _by_kind(tokens_4n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and positions `[1, n]`, slots and lengths `[n]`."""
    return tokens_4n[:1], tokens_4n[1:2], tokens_4n[_SLOTS], tokens_4n[3]


class DecodeInputs:
    """A step of one token of each of n sequences, at fixed addresses, for a CUDA graph.

    `most_pages`: of a sequence. `longest`: tokens of one. The device must be done with a step before the next one is
    filled in.
    """

    def __init__(self, n: int, most_pages: int, longest: int, cache: PagedCache, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._page_size, self._unread_slot = cache.page_size, cache.unread_slot
        self._host_5n = torch.zeros(5, n, dtype=torch.int64, pin_memory=pinned)
        self._host_nm = torch.zeros(n, most_pages, dtype=torch.int32, pin_memory=pinned)
        self._tokens_5n, self._table_nm = (torch.zeros_like(x, device=device) for x in (self._host_5n, self._host_nm))
        keys = 1 << (longest - 1).bit_length()
        self.step = PackedStep(
            *_by_kind(self._tokens_5n[:4]), self._table_nm, self._tokens_5n[4], (), torch.arange(n, device=device), keys
        )  # fmt: skip

    def fill(self, batch: Sequence[Chunk]) -> None:
        """Chunks of one token, up to n of them; the last one is repeated."""
        tokens, table, size = self._host_5n.numpy(), self._host_nm.numpy(), self._page_size
        for i, chunk in enumerate(batch):
            page, place = divmod(chunk.start, size)
            slot = chunk.pages[page] * size + place
            tokens[:, i] = chunk.tokens[0], chunk.start, slot, chunk.sequence.max_length, chunk.state
            table[i, : len(chunk.pages)] = chunk.pages
        tokens[:, len(batch) :] = tokens[:, len(batch) - 1 : len(batch)]
        tokens[_SLOTS, len(batch) :] = self._unread_slot
        table[len(batch) :] = table[len(batch) - 1]
        self._tokens_5n.copy_(self._host_5n, non_blocking=True)
        self._table_nm.copy_(self._host_nm, non_blocking=True)


@dataclass(frozen=True)
class PagedAttention:
    """A layer's core attention (`layers.attention.op.CoreAttention`) that stores keys and values, and attends to the
    pages.

    `window`: the layer's, None: all tokens before. `chunk`: tokens of the chunks that attention stays within. `stores`:
    False: another layer of the step has stored them.
    """

    step: PackedStep
    cache: PagedCache
    layer: int
    window: int | None
    chunk: int | None = None
    stores: bool = True

    def __call__(
        self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Attention of `[n, 1, ...]` tensors. `scores`: of sequences of `step.keys` tokens."""
        step, cache, b = self.step, self.cache, len(self.step.table_bm)
        if self.stores:
            cache.append(self.layer, k_sbgd[:, 0], v_sbgd[:, 0], step.slots_n, step.positions_1n[0])
        w = v_sbgd.shape[-1]
        y_sbad = q_sbad.new_empty(*q_sbad.shape[:3], w)
        if b and cache.in_place:
            positions_b = step.positions_1n[0, :b]
            y_bad = cache.attend(
                self.layer, q_sbad[:b, 0], step.table_bm, positions_b, self.window, self.chunk, sink_a, scores
            )[..., :w]
            if b == len(q_sbad):
                return y_bad.unsqueeze(1)
            y_sbad[:b, 0] = y_bad
        elif b:
            k, v = cache.read(self.layer, step.table_bm)
            mask = step.once((self.window, self.chunk), self._mask_of_singles)
            q = q_sbad[:b].transpose(0, 1)
            y = attention(q, k, v, mask, sink_a, scores_of_length(scores, len(k))).transpose(0, 1)
            if b == len(q_sbad):
                return y
            y_sbad[:b] = y
        for rows, table_1p, positions_1s, _ in step.long:
            q, k, v = q_sbad[rows], k_sbgd[rows], v_sbgd[rows]
            if table_1p is None:
                mask = causal_mask(None, self.window, len(q), q.device, self.chunk)
            else:
                k, v = cache.read(self.layer, table_1p)
                mask = step.once(
                    (rows.start, self.window, self.chunk),
                    partial(AttentionMask, window=self.window, chunk=self.chunk, positions_bs=positions_1s),
                )
            y_sbad[rows] = attention(q, k, v, mask, sink_a, scores_of_length(scores, len(k)))
        if step.padding:
            y_sbad[-step.padding :] = y_sbad[-step.padding - 1]
        return y_sbad

    def _mask_of_singles(self) -> AttentionMask:
        positions_b1 = self.step.positions_1n[:, : len(self.step.table_bm)].transpose(0, 1)
        return AttentionMask(window=self.window, chunk=self.chunk, positions_bs=positions_b1)

    @property
    def tensors(self) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class PagedKeys:
    """`megafp8.layers.mixer.AttendToKeys` of a step: stores a layer's keys, and attends to those of the pages.

    The first of the two is stored as the key of the only head, the second as its value.
    """

    step: PackedStep
    cache: PagedCache
    layer: int

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        step, b = self.step, len(self.step.table_bm)
        # One sequence of packed tokens is as one head.
        self.cache.append(self.layer, *keys, step.slots_n, step.positions_1n[0])
        parts = []
        if b:
            stop_b1 = step.positions_1n[:, :b].t() + 1
            single_queries = tuple(x[:b].transpose(0, 1) for x in queries)
            parts.append(attend(single_queries, self._stored(step.table_bm), 0 * stop_b1, stop_b1).transpose(0, 1))
        for rows, table_1p, positions_1s, _ in step.long:
            stored = keys[0][rows], keys[1][rows][every - 1 :: every]
            if table_1p is None:
                positions_1s = torch.arange(len(stored[0]), device=stored[0].device).unsqueeze(0)
            else:
                stored = self._stored(table_1p)
            assert positions_1s is not None
            parts.append(attend(tuple(x[rows] for x in queries), stored, 0 * positions_1s, positions_1s + 1))
        if step.padding:
            parts.append(parts[-1][-1:].expand(step.padding, *parts[-1].shape[1:]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _stored(self, table_bp: Tensor) -> tuple[Tensor, Tensor]:
        """The keys in these pages, `[t, b, ...]`, and one of each so many tokens."""
        first, second = self.cache.read(self.layer, table_bp)
        return first.squeeze(2), second.squeeze(2)

    @property
    def tensors(self) -> list[Tensor]:
        return []


def scores_of_length(scores: Scores, t: int) -> Scores:
    """`scores` of longer sequences, for those of t tokens."""
    if scores.distance_bias_ar is None:
        return scores
    middle = scores.distance_bias_ar.shape[1] // 2  # the distance 0
    return replace(scores, distance_bias_ar=scores.distance_bias_ar[:, middle - t + 1 : middle + t])
