"""Continuous batching: which tokens of which sequences the model runs in each step. Pure Python, no tensors.

A step either reads prompts, as many tokens as `max_batch_tokens` (a longer prompt takes several steps), or computes one
more token of every running sequence. Prompts come first: a sequence that waits starts as soon as its prompt has pages,
and one that ends makes room at once (Yu et al. 2022, "Orca").

*Shares.* Of the sequences that wait, the next is one of the client with the fewest running ones, and of its request
with the fewest; of equal ones the first to come. Where there is no room, a client or request that has more than a
quarter of the batch, or of the pages, and would still have at least as much as the waiting one, gives up the sequence
that it started last. So one client with many long texts does not let others wait, and alone has the whole batch.

Pages are taken as sequences grow. If none is free, the sequence that was started last gives its pages back, waits, and
is read again later, prompt and output. The first one always goes on, so all end. Every rank runs the same scheduler
with the same tokens, so nothing about batches is communicated.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megafp8.inference.pages import PageAllocator


def next_waiting(waiting: Sequence[GrowingSequence], running: Sequence[GrowingSequence]) -> GrowingSequence:
    """The sequence that is to run next, of those that wait, at least one."""
    clients = Counter(x.client for x in running)
    requests = Counter((x.client, x.request) for x in running)
    return min(waiting, key=lambda x: (clients[x.client], requests[x.client, x.request]))


def to_give_way(
    sequence: GrowingSequence,
    running: Sequence[GrowingSequence],
    size: Callable[[GrowingSequence], int],
    needed: int,
    whole: int,
) -> GrowingSequence | None:
    """The running sequence that is to wait so that `sequence`, of size `needed`, can run; None if none has to.

    `size`: of a running sequence, in the unit of `whole`, what there is of it.
    """
    levels: list[tuple[list[GrowingSequence], Callable[[GrowingSequence], Hashable]]] = [
        (list(running), lambda x: x.client),
        ([x for x in running if x.client == sequence.client], lambda x: x.request),
    ]
    for among, owner in levels:
        pages_of_client = Counter[Hashable]()
        for x in among:
            pages_of_client[owner(x)] += size(x)
        if not pages_of_client:
            continue
        largest, most = pages_of_client.most_common(1)[0]
        if largest == owner(sequence) or most <= whole // 4:
            continue
        last = next(x for x in reversed(among) if owner(x) == largest)
        if most - size(last) >= pages_of_client[owner(sequence)] + needed:
            return last
    return None


@dataclass(eq=False)
class GrowingSequence:
    """A sequence of tokens that grows.

    `tokens`: the prompt, and what was chosen after it. `cached`: how many of them, from the first, are in the cache, in
    `pages`. `state`: while it runs, the slot of its recurrent layers' states. `max_length`: the most tokens that it may
    have. `client`, `request`: whose it is.
    """

    tokens: list[int]
    max_length: int
    pages: MutableSequence[int] = field(default_factory=lambda: array("i"))
    state: int = 0
    cached: int = 0
    client: str = ""
    request: int = 0


class Chunk(NamedTuple):
    """Tokens of a sequence that a step runs: `tokens`, which stand at positions from `start` on.

    `pages`: of the sequence, enough for them. `last`: they end with the sequence's last token, so that the model gives
    the next one. `state`: the slot of its states.
    """

    sequence: GrowingSequence
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    last: bool
    state: int = 0


class Scheduler:
    """Sequences that wait and run. `max_sequences`: the most that run at once."""

    def __init__(self, allocator: PageAllocator, *, max_batch_tokens: int, max_sequences: int) -> None:
        self.allocator = allocator
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self._free_states = [*range(max_sequences)]
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
            self._forget(sequence)
        else:
            self.waiting.remove(sequence)

    def restart(self) -> None:
        """Let all running sequences be read again, prompt and output: what is cached of them is of older weights."""
        while self.running:
            last = self.running.pop()
            self._forget(last)
            self.waiting.appendleft(last)

    def next_batch(self) -> list[Chunk]:
        """The chunks of the next step, those of one token first; empty if there is no sequence. `done` must follow."""
        while self.waiting:
            following = next_waiting(self.waiting, self.running)
            if not self._has_room(following):
                break
            self.waiting.remove(following)
            following.state = self._free_states.pop()
            self.running.append(following)
        return self._prompts() or self._next_tokens()

    def _has_room(self, sequence: GrowingSequence) -> bool:
        """Take pages for a sequence that waits, if need be from others; whether it can run."""
        pages = self.allocator.pages_for(len(sequence.tokens))
        while len(self.running) >= self.max_sequences:
            if not self._take_from_others(sequence, lambda x: 1, 1, self.max_sequences):
                return False
        while not self.allocator.extend(sequence.pages, len(sequence.tokens)):
            if not self._take_from_others(sequence, lambda x: len(x.pages), pages, self.allocator.num_pages):
                return False
        return True

    def _take_from_others(
        self, sequence: GrowingSequence, size: Callable[[GrowingSequence], int], needed: int, whole: int
    ) -> bool:
        """Let a sequence wait that another client, or another request of this one, has too many of; False if none."""
        victim = to_give_way(sequence, self.running, size, needed, whole)
        if victim is None:
            return False
        self.running.remove(victim)
        self._forget(victim)
        self.waiting.appendleft(victim)
        return True

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
                batch.append(Chunk(x, tokens, x.cached, x.pages, x.cached + len(tokens) == len(x.tokens), x.state))
                room -= len(tokens)
        return sorted(batch, key=lambda chunk: len(chunk.tokens) > 1)

    def _next_tokens(self) -> list[Chunk]:
        batch: list[Chunk] = []
        while len(batch) < len(self.running):
            x = self.running[len(batch)]
            if self.allocator.extend(x.pages, len(x.tokens)):
                batch.append(Chunk(x, x.tokens[-1:], x.cached, x.pages, True, x.state))
            else:
                last = self.running.pop()
                self._forget(last)
                self.waiting.appendleft(last)
        return batch

    def _forget(self, sequence: GrowingSequence) -> None:
        """Take back what a sequence has that does not run any more."""
        self._free_states.append(sequence.state)
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.cached = array("i"), 0
