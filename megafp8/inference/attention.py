"""Attention of a step's tokens to the pages of their sequences.

The tokens of a step are packed one after the other, of whatever sequences, as `[n, 1, ...]`: everything else in a model
computes each token by itself. First come sequences with one token, which attend together, each to its own pages; then
each longer chunk by itself, to its own keys if it begins its sequence, else to its pages. What a query may attend to,
and what a score is, `ops.attention` knows: the mask has the position of each query, and the keys behind it, in the
rest of its last page or of longer sequences beside it, are masked as later tokens are.

Shapes: n tokens of a step, s of a chunk, b sequences, t keys, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk
from megafp8.ops.attention import attention
from megafp8.ops.attention_mask import AttentionMask, causal_mask
from megafp8.ops.attention_scores import PLAIN, Scores


class _LongChunk(NamedTuple):
    """`rows`: of its tokens in the step. `slots_t1`: of its keys, which with `positions_1s` is None if it begins its
    sequence."""

    rows: slice
    slots_t1: Tensor | None
    positions_1s: Tensor | None


@dataclass(frozen=True)
class PackedStep:
    """The tokens of a step on the device, the same for all layers. All tensors int64.

    `tokens_1n`, `positions_1n`: the last `padding` of them repeat the last token, so that no amax is that of another.
    `slots_n`: where their keys are stored. `single_slots_tb`: of the keys of the first b tokens' sequences, filled up
    with others. `lengths_n`: the most tokens that each token's sequence may have. `rows_r`: the tokens after which the
    model is to give the next. `keys`: as many as any sequence has, or
    more.
    """

    tokens_1n: Tensor
    positions_1n: Tensor
    slots_n: Tensor
    single_slots_tb: Tensor
    lengths_n: Tensor
    long: tuple[_LongChunk, ...]
    rows_r: Tensor
    keys: int
    padding: int

    @classmethod
    def pack(cls, batch: Sequence[Chunk], cache: PagedCache, device: torch.device, multiple: int = 1) -> PackedStep:
        """`batch`: chunks of one token first. `multiple`: the number of tokens is padded to one."""
        size = cache.page_size
        tokens = [token for chunk in batch for token in chunk.tokens]
        positions = [chunk.start + i for chunk in batch for i in range(len(chunk.tokens))]
        slots = [
            chunk.pages[at // size] * size + at % size
            for chunk in batch
            for at in range(chunk.start, chunk.start + len(chunk.tokens))
        ]
        lengths = [chunk.sequence.max_length for chunk in batch for _ in chunk.tokens]
        padding = -len(tokens) % multiple

        def tensor(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        singles = [chunk.pages for chunk in batch if len(chunk.tokens) == 1]
        most = max(map(len, singles), default=0)
        long, rows, at = [], [], 0
        for chunk in batch:
            own = slice(at, at + len(chunk.tokens))
            at = own.stop
            if chunk.last:
                rows.append(own.stop - 1)
            if len(chunk.tokens) == 1:
                assert own.start < len(singles), "a chunk of one token after longer ones"
            elif chunk.start == 0:
                long.append(_LongChunk(own, None, None))
            else:
                slots_t1, positions_1s = cache.slots(tensor([chunk.pages])), tensor([positions[own]])
                long.append(_LongChunk(own, slots_t1, positions_1s))
        longest = max(len(chunk.pages) for chunk in batch) * size
        return cls(
            tensor([tokens + tokens[-1:] * padding]),
            tensor([positions + positions[-1:] * padding]),
            tensor(slots + [cache.unread_slot] * padding),
            cache.slots(tensor([[*pages, *[0] * (most - len(pages))] for pages in singles]).view(len(singles), most)),
            tensor(lengths + lengths[-1:] * padding),
            tuple(long),
            tensor(rows),
            1 << (longest - 1).bit_length(),
            padding,
        )


@dataclass(frozen=True)
class PagedAttention:
    """A layer's core attention (`ops.attention.CoreAttention`) that stores keys and values, and attends to the pages.

    `window`: the layer's, None: all tokens before.
    """

    step: PackedStep
    cache: PagedCache
    layer: int
    window: int | None

    def __call__(
        self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """All `[n, 1, ...]`. `scores`: of sequences of `step.keys` tokens."""
        step, b = self.step, self.step.single_slots_tb.shape[1]
        self.cache.append(self.layer, k_sbgd[:, 0], v_sbgd[:, 0], step.slots_n)
        y_sbad = torch.empty_like(q_sbad)
        if b:
            k, v = self.cache.read(self.layer, step.single_slots_tb)
            mask = AttentionMask(window=self.window, positions_bs=step.positions_1n[:, :b].transpose(0, 1))
            q = q_sbad[:b].transpose(0, 1)
            y_sbad[:b] = attention(q, k, v, mask, sink_a, _of_length(scores, len(k))).transpose(0, 1)
        for rows, slots_t1, positions_1s in step.long:
            q, k, v = q_sbad[rows], k_sbgd[rows], v_sbgd[rows]
            if slots_t1 is None:
                mask = causal_mask(None, self.window, len(q), q.device)
            else:
                k, v = self.cache.read(self.layer, slots_t1)
                mask = AttentionMask(window=self.window, positions_bs=positions_1s)
            y_sbad[rows] = attention(q, k, v, mask, sink_a, _of_length(scores, len(k)))
        if step.padding:
            y_sbad[-step.padding :] = y_sbad[-step.padding - 1]
        return y_sbad

    @property
    def tensors(self) -> list[Tensor]:
        return []


def _of_length(scores: Scores, t: int) -> Scores:
    """`scores` of longer sequences, for those of t tokens."""
    if scores.distance_bias_ar is None:
        return scores
    middle = scores.distance_bias_ar.shape[1] // 2  # the distance 0
    return replace(scores, distance_bias_ar=scores.distance_bias_ar[:, middle - t + 1 : middle + t])
