"""Attention of a step's tokens to the cached pages of their sequences.

The tokens of all sequences in a step are packed as `[n, 1, ...]`; everything in a model except attention and recurrence
computes each token by itself. Sequences with one token come first. They attend in one call, each to its pages. Longer
chunks follow one by one: a chunk at the beginning of its sequence attends to its own keys, and any other chunk to its
pages. `layers.attention.op` defines what a query may attend to, and the scores. The mask has the position of each
query. Keys after that position, in the rest of the last page or because another sequence in the call is longer, are
masked like later tokens.

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
    """Chunk of several tokens in a step.

    Attributes:
        rows: Rows of its tokens in the step.
        table_1p: Pages of its keys; None if it begins its sequence.
        positions_1s: Positions of its tokens; None if it begins its sequence.
        state_1: Slot of its recurrent states, int64.
    """

    rows: slice
    table_1p: Tensor | None
    positions_1s: Tensor | None
    state_1: Tensor


@dataclass(frozen=True)
class PackedStep:
    """Tokens of a step on the device, shared by all layers. All tensors are int64 except the page table.

    Attributes:
        tokens_1n: Token ids. The last `padding` of them repeat the last token, so that padding changes no amax.
        positions_1n: Position of each token in its sequence, padded like `tokens_1n`.
        slots_n: Cache slot in which the key of each token is stored.
        lengths_n: Largest number of tokens that the sequence of each token may reach.
        table_bm: Pages of the sequences of the first b tokens, int32; rows are filled up with arbitrary pages.
        states_b: Slots of the recurrent states of these sequences.
        long: Chunks of several tokens.
        rows_r: Tokens after which the model predicts the next token.
        keys: Upper bound of the number of keys of any sequence, a power of two.
        padding: Number of padding tokens.
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
        """Pack the chunks of a step, which has chunks of one token first. Pad the number of tokens to a multiple."""
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
        """Return the result of `make()`, which is called once for all layers and cached under `key`."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


_SLOTS = 2


def _by_kind(tokens_4n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of `tokens_4n`: tokens and positions `[1, n]`, slots and lengths `[n]`."""
    return tokens_4n[:1], tokens_4n[1:2], tokens_4n[_SLOTS], tokens_4n[3]


class DecodeInputs:
    """Step with one token of each of n sequences, at fixed addresses, for a CUDA graph.

    `most_pages` and `longest` are the largest numbers of pages and tokens of a sequence. The device must have finished
    a step before the next one is filled in.
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
        """Fill in the step with up to n chunks of one token. The last chunk is repeated up to n."""
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


class AttentionWithoutBackward:
    """Base of the attention of a layer in generation and scoring."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a backward pass would read in addition to the arguments; none."""
        return []


@dataclass(frozen=True)
class PagedAttention(AttentionWithoutBackward):
    """Core attention of a layer (`layers.attention.op.CoreAttention`) with cached keys and values.

    It stores the keys and values of the step, and attends to the pages.

    Attributes:
        step: Tokens of the step.
        cache: Cache of keys and values.
        layer: Number of the layer in the cache.
        window: Size of the layer's attention window; None: all earlier tokens.
        chunk: Number of tokens of the chunks that attention stays within; None: no chunks.
        stores: Store keys and values; False if another layer of the step has stored them.
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
        """Return the attention of `[n, 1, ...]` tensors. `scores` are made for sequences of `step.keys` tokens."""
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


@dataclass(frozen=True)
class PagedKeys(AttentionWithoutBackward):
    """Attention of a layer to cached keys without values (`megafp8.layers.mixer.AttendToKeys`).

    It stores the keys of the step and attends to the keys in the pages. The first of the two key tensors is stored as
    the key of a single head, the second as its value.
    """

    step: PackedStep
    cache: PagedCache
    layer: int

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        """Store the keys of the step, and return the output `[n, 1, ...]` of `attend` for all tokens."""
        step, b = self.step, len(self.step.table_bm)
        # A packed sequence looks like one head: keys `[n, 1, d]` are stored as they are.
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
        """Return both key tensors in these pages, `[t, b, ...]`; the second has one entry for every few tokens."""
        first, second = self.cache.read(self.layer, table_bp)
        return first.squeeze(2), second.squeeze(2)


def scores_of_length(scores: Scores, t: int) -> Scores:
    """Cut `scores` of longer sequences to sequences of t tokens."""
    if scores.distance_bias_ar is None:
        return scores
    middle = scores.distance_bias_ar.shape[1] // 2  # the distance 0
    return replace(scores, distance_bias_ar=scores.distance_bias_ar[:, middle - t + 1 : middle + t])
