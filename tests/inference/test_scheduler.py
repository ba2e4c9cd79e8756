"""Which sequences run in a step, and where their pages are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megafp8.inference.pages import PageAllocator
from megafp8.inference.scheduler import GrowingSequence, Scheduler


def scheduler(pages: int = 8, page_size: int = 4, tokens: int = 6, sequences: int = 3) -> Scheduler:
    return Scheduler(PageAllocator(pages, page_size), max_batch_tokens=tokens, max_sequences=sequences)


def step(own: Scheduler, remove: bool = False) -> list[tuple[int, int, int, bool]]:
    """Run a step that chooses the token 0; the chunks as (first token of the sequence, start, length, last).

    `remove`: sequences that have their greatest length.
    """
    batch = own.next_batch()
    own.done(batch)
    for chunk in batch:
        if chunk.last:
            chunk.sequence.tokens.append(0)
            if remove and len(chunk.sequence.tokens) == chunk.sequence.max_length:
                own.remove(chunk.sequence)
    return [(x.sequence.tokens[0], x.start, len(x.tokens), x.last) for x in batch]


def test_prompts_are_read_in_chunks_before_others_go_on() -> None:
    own = scheduler()
    first = GrowingSequence([1] * 9, 12)
    own.add(first)
    assert step(own) == [(1, 0, 6, False)]
    own.add(GrowingSequence([2] * 4, 8))
    assert step(own) == [(1, 6, 3, True), (2, 0, 3, False)]
    assert step(own) == [(1, 9, 1, True), (2, 3, 1, True)]
    own.remove(first)
    assert step(own) == [(2, 4, 1, True)]
    assert [len(x.pages) for x in own.running] == [2]


def test_the_last_sequence_gives_way() -> None:
    own = scheduler(pages=3)
    one, two = GrowingSequence([1] * 3, 12), GrowingSequence([2] * 3, 5)
    own.add(one)
    own.add(two)
    assert step(own) == [(1, 0, 3, True), (2, 0, 3, True)]
    assert step(own) == [(1, 3, 1, True), (2, 3, 1, True)]
    assert step(own) == [(1, 4, 1, True)]
    assert (list(own.waiting), list(two.pages), two.cached, len(two.tokens)) == ([two], [], 0, 5)
    own.remove(one)
    assert step(own) == [(2, 0, 5, True)]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(8, 12),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_every_sequence_ends_and_no_page_has_two_owners(
    lengths: list[tuple[int, int]], page_size: int, more: int, tokens: int, sequences: int
) -> None:
    pages = max(-(-(prompt + new) // page_size) for prompt, new in lengths)
    own = scheduler(pages + more % 3, page_size, tokens, sequences)
    left = {GrowingSequence([i] * prompt, prompt + new) for i, (prompt, new) in enumerate(lengths)}
    for x in sorted(left, key=lambda x: x.tokens[0]):
        own.add(x)
    for _ in range(10_000):
        batch = own.next_batch()
        if not batch:
            break
        assert [len(x.tokens) > 1 for x in batch] == sorted(len(x.tokens) > 1 for x in batch)
        taken = [page for x in own.running for page in x.pages]
        assert len(set(taken)) == len(taken) == own.allocator.num_pages - own.allocator.num_free
        own.done(batch)
        for chunk in batch:
            x = chunk.sequence
            assert x.tokens[chunk.start : chunk.start + len(chunk.tokens)] == list(chunk.tokens)
            assert len(chunk.pages) * page_size >= x.cached
            assert chunk.last == (x.cached == len(x.tokens))
            if chunk.last:
                x.tokens.append(0)
                if len(x.tokens) == x.max_length:
                    own.remove(x)
                    left.remove(x)
    assert not left
    assert own.allocator.num_free == own.allocator.num_pages


def test_clients_and_requests_have_equal_shares() -> None:
    """One has the whole batch alone; another one runs at once, until both have as many; the first goes on after it."""
    own = scheduler(pages=64, tokens=64, sequences=8)
    for _ in range(16):
        own.add(GrowingSequence([1], 100, client="a", request=1))
    step(own)
    assert len(own.running) == 8
    for _ in range(6):
        own.add(GrowingSequence([2], 100, client="b", request=2))
    step(own)
    assert Counter(x.client for x in own.running) == {"a": 4, "b": 4}
    own.add(GrowingSequence([3], 100, client="b", request=3))
    step(own)
    assert Counter(x.request for x in own.running) == {1: 4, 2: 3, 3: 1}
    for _ in range(5):
        before = list(own.running)
        step(own)
        assert own.running == before, "nobody has to give way without need"
    for x in [x for x in (*own.running, *own.waiting) if x.client == "b"]:
        own.remove(x)
    step(own)
    assert Counter(x.client for x in own.running) == {"a": 8}


def test_short_requests_beside_64_long_texts_end_in_a_bounded_number_of_steps() -> None:
    """Another client's requests, beside 64 texts of 2,000 tokens, which are more than batch and pages hold.

    A short request needs a step for each token. Steps that read prompts delay it: the most when many pages become free
    at once and texts that gave theirs up are read again, which is as many tokens as the cache holds. Two more are for
    its own pages.
    """
    prompt, new, pages, page_size, batch_tokens = 20, 16, 512, 16, 256
    most = new + pages * page_size // batch_tokens + 2
    own = scheduler(pages, page_size, batch_tokens, sequences=48)
    long = [GrowingSequence([1] * 8, 8 + 2000, client="a", request=1) for _ in range(64)]
    for x in long:
        own.add(x)
    steps = []
    for arrival in range(100):
        for _ in range((0, 1, 61, 250)[arrival % 4]):
            step(own, remove=True)
        short = GrowingSequence([2] * prompt, prompt + new, client="b", request=2 + arrival)
        own.add(short)
        steps.append(0)
        while len(short.tokens) < short.max_length:
            step(own, remove=True)
            steps[-1] += 1
            assert steps[-1] <= most, f"short request {arrival}"
    assert {len(x.tokens) for x in long} >= {8, 8 + 2000}, "some have ended, and others still wait"
    assert max(steps) > new, "none had to wait, so this tests nothing"


def test_a_client_with_all_pages_gives_some_to_another() -> None:
    own = scheduler(pages=8, page_size=4, tokens=64, sequences=8)
    for _ in range(4):
        own.add(GrowingSequence([1] * 7, 8, client="a"))
    step(own)
    assert own.allocator.num_free == 0
    own.add(GrowingSequence([2] * 7, 8, client="b"))
    step(own)
    assert Counter(x.client for x in own.running) == {"a": 3, "b": 1}
    assert len(own.waiting) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=12))
def test_all_end_however_they_are_shared(texts: list[tuple[str, int, int]]) -> None:
    own = scheduler(pages=4, page_size=4, tokens=16, sequences=4)
    left = [GrowingSequence([1] * (length - 1 or 1), length + 1, client=x, request=n) for x, n, length in texts]
    for x in left:
        own.add(x)
    for _ in range(400):
        step(own)
        for x in [x for x in own.running if len(x.tokens) == x.max_length]:
            own.remove(x)
            left.remove(x)
    assert not left
    assert own.allocator.num_free == 4
