"""Continuous batching: which tokens of which sequences the model runs in each step. Pure Python, no tensors.

A step either reads prompts, as many tokens as `max_batch_tokens` (a longer prompt takes several steps), or computes one
more token of every running sequence. Prompts come first: a sequence that waits starts as soon as its prompt has pages,
and one that ends makes room at once (Yu et al. 2022, "Orca").

Pages are taken as sequences grow. If none is free, the sequence that was started last gives its pages back, waits, and
is read again later, prompt and output. The first one always goes on, so all end. Every rank runs the same scheduler
with the same tokens, so nothing about batches is communicated.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megafp8.inference.pages import PageAllocator


@dataclass(eq=False)
class GrowingSequence:
    """A sequence of tokens that grows.

    `tokens`: the prompt, and what was chosen after it. `cached`: how many of them, from the first, are in the cache, in
    `pages`. `max_length`: the most tokens that it may have.
    """

    tokens: list[int]
    max_length: int
    pages: MutableSequence[int] = field(default_factory=lambda: array("i"))
    cached: int = 0


class Chunk(NamedTuple):
    """Tokens of a sequence that a step runs: `tokens`, which stand at positions from `start` on.

    `pages`: of the sequence, enough for them. `last`: they end with the sequence's last token, so that the model gives
    the next one.
    """

    sequence: GrowingSequence
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    last: bool


class Scheduler:
    """Sequences that wait and run. `max_sequences`: the most that run at once."""

    def __init__(self, allocator: PageAllocator, *, max_batch_tokens: int, max_sequences: int) -> None:
        self.allocator = allocator
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self.waiting: deque[GrowingSequence] = deque()
        self.running: list[GrowingSequence] = []

    def add(self, sequence: GrowingSequence) -> None:
        """A sequence that at its greatest length fits into the whole cache."""
        assert self.allocator.pages_for(sequence.max_length) <= self.allocator.num_pages
        self.waiting.append(sequence)

    def remove(self, sequence: GrowingSequence) -> None:
        """A sequence that has ended, or is not wanted any more."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._forget(sequence)

    def next_batch(self) -> list[Chunk]:
        """The chunks of the next step, those of one token first; empty if there is no sequence. `done` must follow."""
        while self.waiting and len(self.running) < self.max_sequences:
            if not self.allocator.extend(self.waiting[0].pages, len(self.waiting[0].tokens)):
                break
            self.running.append(self.waiting.popleft())
        return self._prompts() or self._next_tokens()

    def done(self, batch: Sequence[Chunk]) -> None:
        """The chunks of `batch` are in the cache."""
        for chunk in batch:
            chunk.sequence.cached += len(chunk.tokens)

    def _prompts(self) -> list[Chunk]:
        batch: list[Chunk] = []
        room = self.max_batch_tokens
        for x in self.running:
            if x.cached < len(x.tokens) - 1 and room:
                tokens = x.tokens[x.cached : x.cached + room]
                batch.append(Chunk(x, tokens, x.cached, x.pages, x.cached + len(tokens) == len(x.tokens)))
                room -= len(tokens)
        return sorted(batch, key=lambda chunk: len(chunk.tokens) > 1)

    def _next_tokens(self) -> list[Chunk]:
        batch: list[Chunk] = []
        while len(batch) < len(self.running):
            x = self.running[len(batch)]
            if self.allocator.extend(x.pages, len(x.tokens)):
                batch.append(Chunk(x, x.tokens[-1:], x.cached, x.pages, last=True))
            else:
                last = self.running.pop()
                self._forget(last)
                self.waiting.appendleft(last)
        return batch

    def _forget(self, sequence: GrowingSequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.cached = array("i"), 0
