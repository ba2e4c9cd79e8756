"""Which sequences run in a step, and where their pages are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megafp8.inference.pages import PageAllocator
from megafp8.inference.scheduler import GrowingSequence, Scheduler


def scheduler(pages: int = 8, page_size: int = 4, tokens: int = 6, sequences: int = 3) -> Scheduler:
    return Scheduler(PageAllocator(pages, page_size), max_batch_tokens=tokens, max_sequences=sequences)


def step(own: Scheduler) -> list[tuple[int, int, int, bool]]:
    """Run a step that chooses the token 0; the chunks as (first token of the sequence, start, length, last)."""
    batch = own.next_batch()
    own.done(batch)
    for chunk in batch:
        if chunk.last:
            chunk.sequence.tokens.append(0)
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
