"""Continuous batching: the choice of the tokens that the model runs in each step. Pure Python, no tensors.

A step either reads prompts, up to `max_batch_tokens` tokens (a longer prompt takes several steps), or computes one more
token of every running sequence. Prompts come first. A waiting sequence starts as soon as there are pages for its
prompt, and a sequence that ends makes room at once (Yu et al. 2022, "Orca").

*Fairness.* The next waiting sequence is chosen from the client with the fewest running sequences, and from this
client's request with the fewest; ties go to the sequence that came first. If there is no room, a client or request may
have to give up the sequence that it started last. This happens if it has more than a quarter of the batch, or of the
pages, and would afterwards still have at least as much as the waiting one. So a client with many long texts does not
block others, but can use the whole batch while it is alone.

Pages are taken as sequences grow. If no page is free, the sequence that was started last returns its pages and waits.
Its prompt and output are read again later. The first sequence always continues, so all sequences end. Every rank runs
the same scheduler with the same tokens, so ranks do not communicate about batches.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megafp8.inference.pages import PageAllocator


def next_waiting(waiting: Sequence[GrowingSequence], running: Sequence[GrowingSequence]) -> GrowingSequence:
    """Return the waiting sequence that runs next. At least one sequence must wait."""
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
    """Return the running sequence that must wait so that `sequence` can run, or None if no sequence must give way.

    Args:
        sequence: Waiting sequence.
        running: Running sequences, in the order in which they started.
        size: Function that returns the size of a running sequence, such as its number of pages.
        needed: Size that `sequence` needs.
        whole: Total size available, in the same unit.
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
    """Sequence of tokens that grows by generation.

    Attributes:
        tokens: Tokens of the prompt and the generated tokens.
        max_length: Largest number of tokens that the sequence may reach.
        pages: Pages of the cache.
        state: Slot of the recurrent layers' states, while the sequence runs.
        cached: Number of tokens, from the first, that are in the cache.
        client: Client that the sequence belongs to.
        request: Request of the client that the sequence belongs to.
    """

    tokens: list[int]
    max_length: int
    pages: MutableSequence[int] = field(default_factory=lambda: array("i"))
    state: int = 0
    cached: int = 0
    client: str = ""
    request: int = 0


class Chunk(NamedTuple):
    """Consecutive tokens of a sequence that a step runs.

    Attributes:
        sequence: The sequence.
        tokens: Token ids.
        start: Position of the first token.
        pages: Pages of the sequence, with room for these tokens.
        last: Whether the chunk ends with the sequence's last token, so that the model predicts the next token.
        state: Slot of the sequence's recurrent states.
    """

    sequence: GrowingSequence
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    last: bool
    state: int = 0


class Scheduler:
    """Scheduler of waiting and running sequences. At most `max_sequences` run at once."""

    def __init__(self, allocator: PageAllocator, *, max_batch_tokens: int, max_sequences: int) -> None:
        self.allocator = allocator
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self._free_states = [*range(max_sequences)]
        self.waiting: deque[GrowingSequence] = deque()
        self.running: list[GrowingSequence] = []

    def add(self, sequence: GrowingSequence) -> None:
        """Add a waiting sequence. The whole cache must have room for its `max_length`."""
        assert self.allocator.pages_for(sequence.max_length) <= self.allocator.num_pages
        self.waiting.append(sequence)

    def remove(self, sequence: GrowingSequence) -> None:
        """Remove a sequence that has ended or was cancelled."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._forget(sequence)
        else:
            self.waiting.remove(sequence)

    def restart(self) -> None:
        """Make all running sequences wait and be read again, because their cache entries are from older weights."""
        while self.running:
            last = self.running.pop()
            self._forget(last)
            self.waiting.appendleft(last)

    def next_batch(self) -> list[Chunk]:
        """Return the chunks of the next step, chunks of one token first; empty if there is no sequence.

        Call `done` after the step.
        """
        while self.waiting:
            following = next_waiting(self.waiting, self.running)
            if not self._has_room(following):
                break
            self.waiting.remove(following)
            following.state = self._free_states.pop()
            self.running.append(following)
        return self._prompts() or self._next_tokens()

    def _has_room(self, sequence: GrowingSequence) -> bool:
        """Take pages for a waiting sequence, if necessary from others, and return whether it can run."""
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
        """Make a sequence of another client or request wait if that has too many. Return whether there was one."""
        victim = to_give_way(sequence, self.running, size, needed, whole)
        if victim is None:
            return False
        self.running.remove(victim)
        self._forget(victim)
        self.waiting.appendleft(victim)
        return True

    def done(self, batch: Sequence[Chunk]) -> None:
        """Record that the chunks of `batch` are in the cache."""
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
        """Free the state slot and the pages of a sequence that no longer runs."""
        self._free_states.append(sequence.state)
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.cached = array("i"), 0
