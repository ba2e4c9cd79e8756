"""Which tokens of which documents form a sample of seq_length + 1 tokens: three ways to pack documents.

`Concatenation` joins shuffled documents and cuts the stream into windows. No token is padding, but most documents that
are not much shorter than a window are cut: what follows a cut is trained without its context.

`BestFit` puts every document that fits whole into one sample, by best-fit decreasing (Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv:2404.10830): from the longest document to the shortest, each goes into the
sample with the least room that it fits in, or into a new one. What stays empty is padding. The result depends on
lengths only, so it is computed on their histogram (as Krell et al. 2021, arXiv:2107.02027, pack): documents of one
length are placed together, and samples that hold the same lengths are one group, a range of samples. Time and memory
grow with the number of different lengths, at most s, and not with that of documents. What each epoch draws at random
is which document of a length goes where, and the order of the samples.

`Sentences` fills a sample with consecutive sentences of one document, as many as fit, for models that are trained on
pairs of sentences.

A run may go on with samples of another length within an epoch. Then the *rest* of the epoch, the tokens that no sample
has had as a label yet, is packed like an epoch: it consists of `Pieces` of documents, which take the documents' place.

A sample has s + 1 tokens, of which s are labels. A document of n tokens has n - 1 to predict, all but its first, so it
fits whole if n <= s + 1. A longer one is cut into full samples and a *rest*, which overlap by one token: the last label
of one part is the first input of the next, as for windows. So each of these n - 1 tokens is predicted exactly once. A
document of one token has nothing to predict and is left out.

Shapes: n documents, s sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PackingName = Literal["concatenate", "best_fit", "sentences"]
Arrays = Sequence[NDArray[Any]]
Layout = Sequence[tuple[type[np.generic], int]]
"""Dtype and length of each of several arrays."""


class DocumentSpan(NamedTuple):
    """`length` tokens of a document, after its first `skip`."""

    document: int
    skip: int
    length: int


class Pieces(NamedTuple):
    """Parts of documents, int64 `[p]` each: the document, how many of its tokens come before, and how many it has."""

    documents: NDArray[np.int64]
    skips: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Packing(Protocol):
    """How documents of known lengths fill the samples of an epoch.

    The *index* of an epoch is arrays of dtypes and lengths `layout`; what is the same in all epochs is not part of it.
    `too_few` ends the error message if `samples` < 1.
    """

    name: PackingName
    samples: int
    layout: Layout
    too_few: str

    def make_index(self, generator: np.random.Generator) -> Arrays:
        """The index of an epoch that draws from `generator`."""

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        """The content of the sample at `place` of an epoch, at most s + 1 tokens."""

    def rest(self, index: Arrays, given: int, *, context: bool) -> Pieces:
        """What is left of an epoch after its first `given` samples: all tokens that were no label yet.

        `context`: a piece that begins within a document begins one token earlier, since the first token of a piece is
        not predicted.
        """


class Concatenation:
    """Windows of the shuffled documents' stream; they overlap by one token. What does not fill a window is left out.

    Index: position of each document of the stream, the documents `[n]`, and the windows, both permuted.
    """

    name: PackingName = "concatenate"

    def __init__(self, lengths: NDArray[np.int64], seq_length: int) -> None:
        self.lengths, self.seq_length = lengths, seq_length
        self.samples = (int(lengths.sum()) - 1) // seq_length
        self.too_few = f"too few for one sample of training.seq_length + 1 = {seq_length + 1:,}"
        number = _smallest(max(len(lengths), self.samples))
        self.layout: Layout = ((np.int64, len(lengths)), (number, len(lengths)), (number, self.samples))

    def make_index(self, generator: np.random.Generator) -> Arrays:
        number = self.layout[1][0]
        documents = generator.permutation(len(self.lengths)).astype(number)
        starts = np.concatenate([[0], np.cumsum(self.lengths[documents])[:-1]]).astype(np.int64)
        return starts, documents, generator.permutation(self.samples).astype(number)

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        starts, documents, samples = index
        position, missing = int(samples[place]) * self.seq_length, self.seq_length + 1
        j = int(np.searchsorted(starts, position, side="right")) - 1
        while missing:
            document = int(documents[j])
            skip = position - int(starts[j])
            taken = min(missing, int(self.lengths[document]) - skip)
            yield DocumentSpan(document, skip, taken)
            position, missing, j = position + taken, missing - taken, j + 1

    def rest(self, index: Arrays, given: int, *, context: bool) -> Pieces:
        starts, documents, samples = index
        firsts = np.sort(samples[:given].astype(np.int64)) * self.seq_length
        # Gaps between the labels of the windows that were given; the first token of the stream is no label.
        lows = np.concatenate([[0], firsts + self.seq_length + 1])
        highs = np.concatenate([firsts + 1, [int(self.lengths.sum())]])
        if given and firsts[0] == 0:
            lows, highs = lows[1:], highs[1:]
        begins = np.unique(np.concatenate([lows, starts]))
        place = np.searchsorted(starts, begins, side="right") - 1
        gap = np.searchsorted(lows, begins, side="right") - 1
        ends = np.minimum(highs[gap], starts[place] + self.lengths[documents[place]])
        nonempty = (gap >= 0) & (ends > begins)
        chosen = documents[place[nonempty]].astype(np.int64)
        skips, lengths = (begins - starts[place])[nonempty], (ends - begins)[nonempty]
        context_tokens = (skips > 0).astype(np.int64) if context else 0
        return Pieces(chosen, skips - context_tokens, lengths + context_tokens)


class BestFit:
    """Whole documents by best-fit decreasing.

    Samples are numbered: first those that a part of a long document fills, in the order of documents, then the others,
    group by group. Index: the documents that have a rest (short documents are all rest) by decreasing length of that,
    permuted within a length, and the permuted samples.
    """

    name: PackingName = "best_fit"
    too_few = "none in a document of two or more, and a document's first token is not predicted"

    def __init__(self, lengths: NDArray[np.int64], seq_length: int) -> None:
        self.lengths, self.seq_length = lengths, seq_length
        full, rests = self._split()
        self._long = np.flatnonzero(full)
        self._full_ends = np.cumsum(full[self._long])
        counts = np.bincount(rests, minlength=2)
        counts[:2] = 0  # nothing to predict
        self.groups = best_fit(counts, seq_length + 1)
        self.full_samples = int(full.sum())
        self.samples = self.full_samples + self.groups.samples
        number = _smallest(max(len(lengths), self.samples))
        self.layout: Layout = ((number, int(counts.sum())), (number, self.samples))
        room = self.groups.samples * (seq_length + 1) - int(counts @ np.arange(len(counts)))
        self.padding_share = room / max(1, self.samples * (seq_length + 1))

    def make_index(self, generator: np.random.Generator) -> Arrays:
        rests, number = self._split()[1], self.layout[0][0]
        documents = generator.permutation(np.flatnonzero(rests > 1).astype(number))
        # Integers of 16 bits are sorted in linear time.
        keys = (self.seq_length - rests[documents]).astype(np.uint16 if self.seq_length < 2**16 else np.uint32)
        documents = documents[np.argsort(keys, kind="stable")]
        return documents, generator.permutation(self.samples).astype(number)

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        documents, samples = index
        sample, s = int(samples[place]), self.seq_length
        if sample < self.full_samples:
            i = int(np.searchsorted(self._full_ends, sample, side="right"))
            later = int(self._full_ends[i]) - sample
            document = int(self._long[i])
            yield DocumentSpan(document, ((int(self.lengths[document]) - 1) // s - later) * s, s + 1)
            return
        for places in self.groups.places(sample - self.full_samples):
            for document in documents[places].tolist():
                length = int(self.lengths[document])
                rest = (length - 1) % s + 1
                yield DocumentSpan(document, length - rest, rest)

    def rest(self, index: Arrays, given: int, *, context: bool) -> Pieces:
        assert context, "the first token of a document is not predicted"
        documents, samples = index
        left = np.ones(self.samples, np.bool_)
        left[samples[:given]] = False
        full, rests = self._split()
        numbers = np.arange(self.full_samples) - np.repeat(np.cumsum(full) - full, full)
        long_ones = np.repeat(np.arange(len(full)), full)[left[: self.full_samples]]
        short_ones = documents[left[self.full_samples + self.groups.samples_of_places(len(documents))]].astype(np.int64)
        chosen = np.concatenate([long_ones, short_ones])
        skips = np.concatenate([numbers[left[: self.full_samples]], full[short_ones]]) * self.seq_length
        ends = np.concatenate(
            [skips[: len(long_ones)] + self.seq_length + 1, skips[len(long_ones) :] + rests[short_ones]]
        )
        order = np.lexsort((skips, chosen))
        chosen, skips, ends = chosen[order], skips[order], ends[order]
        # Parts that follow each other overlap by one token, and are one piece.
        first = np.ones(len(chosen), np.bool_)
        first[1:] = (chosen[1:] != chosen[:-1]) | (skips[1:] != ends[:-1] - 1)
        last = np.roll(first, -1)
        return Pieces(chosen[first], skips[first], ends[last] - skips[first])

    def describe(self) -> str:
        """Samples an epoch, padding, and the documents that are cut, here and (expected) by concatenation."""
        s, lengths = self.seq_length, self.lengths
        cut = float(np.mean(lengths > s + 1))
        # A document of n > 1 tokens is whole if it begins with one of the first s + 2 - n tokens of a window, and it
        # begins with any of the s tokens before the next window with equal probability.
        cut_by_windows = float(np.mean(np.clip((lengths - 2) / s, 0, 1)))
        return (
            f"best_fit: {self.samples:,} samples an epoch, {self.padding_share:.2%} of their tokens padding, {cut:.2%} "
            f"of documents cut (longer than a sample; concatenate would cut {cut_by_windows:.2%})"
        )

    def _split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Full samples of each document, and tokens of its rest, one of which is not predicted: both `[n]`."""
        full, rests = np.divmod(np.maximum(self.lengths - 1, 0), self.seq_length)
        return full, rests + 1


class Sentences:
    """Runs of sentences of one document, of at most s + 1 tokens; each token of an epoch is in one sample.

    A sentence that is longer than a sample is cut. `lengths` `[n]`: of the sentences of all documents; `starts`: the
    first token of each document. Index: the permuted samples.
    """

    name: PackingName = "sentences"
    too_few = "none of them in a sentence"

    def __init__(self, lengths: NDArray[np.int64], starts: NDArray[np.int64], seq_length: int) -> None:
        self._documents, self._ends = starts, np.cumsum(lengths)
        self._samples = _runs(self._ends, starts, seq_length + 1)
        self.samples = len(self._samples) - 1
        self.layout: Layout = ((_smallest(self.samples), self.samples),)

    def make_index(self, generator: np.random.Generator) -> Arrays:
        return (generator.permutation(self.samples).astype(self.layout[0][0]),)

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        """A span for each sentence, or part of one."""
        sample = int(index[0][place])
        start, end = (int(x) for x in self._samples[sample : sample + 2])
        document = int(np.searchsorted(self._documents, start, side="right")) - 1
        inner = self._ends[np.searchsorted(self._ends, start, side="right") : np.searchsorted(self._ends, end)]
        bounds = [start, *inner.tolist(), end]
        for first, last in pairwise(bounds):
            yield DocumentSpan(document, first - int(self._documents[document]), last - first)

    def rest(self, index: Arrays, given: int, *, context: bool) -> Pieces:
        raise ValueError("samples of sentences keep their length to the end of an epoch")


def _runs(ends: NDArray[np.int64], starts: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The first token of each sample of `Sentences`, and the number of all tokens."""
    bounds, total = [0], int(ends[-1]) if len(ends) else 0
    for stop in [*starts[1:].tolist(), total]:
        while (start := bounds[-1]) < stop:
            latest = int(np.searchsorted(ends, min(start + capacity, stop), side="right")) - 1
            whole = int(ends[latest]) if latest >= 0 else 0
            bounds.append(whole if whole > start else start + capacity)
    return np.array(bounds, np.int64)


PACKINGS: dict[PackingName, Callable[[NDArray[np.int64], int], Packing]] = {x.name: x for x in (Concatenation, BestFit)}


def _smallest(largest: int) -> type[np.generic]:
    """The dtype of document and sample numbers."""
    return np.uint32 if largest < 2**32 else np.int64


@dataclass(frozen=True)
class Groups:
    """Samples in groups that hold pieces of the same lengths; pieces are listed by decreasing length.

    Group g has the samples from `starts[g]` on, and the rows `ends[g]:ends[g + 1]` of `entries` `[e, 2]`. For an entry
    (first, count), sample i holds the `count` pieces from place `first + i * count` of the list on. All are int64.
    """

    samples: int
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    entries: NDArray[np.int64]

    def places(self, sample: int) -> list[slice]:
        """The places of the pieces in `sample`."""
        group = int(np.searchsorted(self.starts, sample, side="right")) - 1
        entries = self.entries[self.ends[group] : self.ends[group + 1]].tolist()
        return [slice(first + sample * count, first + (sample + 1) * count) for first, count in entries]

    def samples_of_places(self, places: int) -> NDArray[np.int64]:
        """The sample that holds each of the `places` of the list: the inverse of `places`."""
        samples = np.empty(places, np.int64)
        for group, (start, stop) in enumerate(pairwise([*self.starts.tolist(), self.samples])):
            for first, count in self.entries[self.ends[group] : self.ends[group + 1]].tolist():
                samples[first + start * count : first + stop * count] = np.repeat(np.arange(start, stop), count)
        return samples


_Group = tuple[int, int, int, tuple[tuple[int, int], ...]]
"""Room in each sample, first sample, end of the samples, entries."""


def best_fit(counts: NDArray[np.int64], capacity: int) -> Groups:
    """Pack `counts[n]` pieces of n tokens, 0 < n <= `capacity`, into samples by best-fit decreasing. Pure.

    The sample with the least room that a piece fits in has the least room after it, too, while more of that length fit.
    So it gets as many as it takes, and after it the other samples of its group. This at least halves their room, and
    each length splits at most two groups: O(capacity · log(capacity)²) steps.
    """
    fitting: list[_Group] = []  # a heap
    others: defaultdict[int, list[_Group]] = defaultdict(list)  # with less room than the present length, by room
    samples = placed = 0
    longer = capacity + 1
    for length in np.flatnonzero(counts)[::-1].tolist():
        for room in range(length, longer):
            for group in others.pop(room, ()):
                heappush(fitting, group)
        longer, left = length, int(counts[length])
        while left:
            if fitting:
                room, start, stop, entries = heappop(fitting)
            else:
                room, start, entries = capacity, samples, ()
                stop = samples = start + -(-left // (capacity // length))
            count = min(room // length, left)
            end = min(stop, start + left // count)
            if end < stop:
                heappush(fitting, (room, end, stop, entries))
            group = (room - count * length, start, end, (*entries, (placed - start * count, count)))
            if group[0] < length:
                others[group[0]].append(group)
            else:
                heappush(fitting, group)
            placed, left = placed + (end - start) * count, left - (end - start) * count
    groups = sorted((group[1], group[3]) for sized in (fitting, *others.values()) for group in sized)
    return Groups(
        samples,
        np.array([start for start, _ in groups], np.int64),
        np.cumsum([0, *(len(entries) for _, entries in groups)], dtype=np.int64),
        np.array([entry for _, entries in groups for entry in entries], np.int64).reshape(-1, 2),
    )
