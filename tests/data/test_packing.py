"""Packed documents against a best fit of one document after another, and what either packing cuts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data.packing import BestFit, Concatenation, DocumentSpan, Packing


def epoch(packing: Packing, seed: int = 0) -> list[list[DocumentSpan]]:
    index = packing.make_index(np.random.default_rng(seed))
    assert [(x.dtype, len(x)) for x in index] == [(np.dtype(dtype), length) for dtype, length in packing.layout]
    return [list(packing.spans(index, place)) for place in range(packing.samples)]


def rooms_of_naive_best_fit(lengths: list[int], s: int) -> list[int]:
    """Padding of each sample, sorted: documents are cut into parts that overlap by a token, and placed one by one."""
    parts = [min(length - first, s + 1) for length in lengths for first in range(0, length - 1, s)]
    rooms: list[int] = []
    for part in sorted(parts, reverse=True):
        least = min((room for room in rooms if room >= part), default=s + 1)
        if least in rooms:
            rooms.remove(least)
        rooms.append(least - part)
    return sorted(rooms)


def check(lengths: list[int], s: int, seed: int) -> None:
    packing = BestFit(np.array(lengths, np.int64), s)
    samples = epoch(packing, seed)
    rooms = [s + 1 - sum(span.length for span in sample) for sample in samples]
    assert sorted(rooms) == rooms_of_naive_best_fit(lengths, s)
    assert packing.padding_share == pytest.approx(sum(rooms) / max(1, len(rooms) * (s + 1)))
    spans = [span for sample in samples for span in sample]
    predicted = Counter((document, skip + i) for document, skip, length in spans for i in range(1, length))
    assert predicted == Counter((document, i) for document, n in enumerate(lengths) for i in range(1, n))
    whole = {document for document, n in enumerate(lengths) if 2 <= n <= s + 1}
    assert {span.document for span in spans if span.length == lengths[span.document]} == whole
    assert all(
        sample == [DocumentSpan(span.document, span.skip, s + 1)]
        for sample in samples
        for span in sample
        if span.length > s
    )


@given(lengths=st.lists(st.integers(0, 40), max_size=40), s=st.integers(1, 16), seed=st.integers(0, 9))
def test_each_token_is_predicted_once_in_as_few_samples_as_by_a_naive_best_fit(
    lengths: list[int], s: int, seed: int
) -> None:
    check(lengths, s, seed)


def test_many_documents_of_a_length() -> None:
    """Groups of many samples, which shorter documents split."""
    check(np.random.default_rng(0).lognormal(3, 1, 1500).astype(int).tolist(), 100, 0)
    check([70_000, *range(0, 60_000, 7000)], 66_000, 0)  # lengths of more than 16 bits


def test_documents_change_places_every_epoch() -> None:
    packing = BestFit(np.array([9] * 20 + [5] * 40 + [30, 3, 3]), 12)
    one, other = epoch(packing, 1), epoch(packing, 2)
    assert Counter(map(tuple, one)) != Counter(map(tuple, other))
    assert [len(sample) for sample in one] != [len(sample) for sample in other], "samples were not shuffled"
    assert epoch(packing, 1) == one


def test_shares_in_the_description() -> None:
    """Of documents that concatenation cuts: what 30 epochs of it do cut."""
    lengths, s = np.random.default_rng(0).integers(0, 60, 400), 40
    windows = Concatenation(lengths, s)
    cut = 0
    for seed in range(30):
        whole = {
            span.document for sample in epoch(windows, seed) for span in sample if span.length == lengths[span.document]
        }
        cut += sum(length > 0 and document not in whole for document, length in enumerate(lengths.tolist()))
    expected = np.mean(np.clip((lengths - 2) / s, 0, 1))
    assert cut / (30 * len(lengths)) == pytest.approx(expected, abs=0.01)
    packing = BestFit(lengths, s)
    assert packing.describe() == (
        f"best_fit: {packing.samples} samples per epoch; {packing.padding_share:.2%} of their tokens are padding; "
        f"{(lengths > 41).mean():.2%} of documents are cut (longer than a sample; concatenate would cut {expected:.2%})"
    )
