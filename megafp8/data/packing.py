"""Three ways to pack documents into samples of seq_length + 1 tokens.

`Concatenation` joins shuffled documents and cuts the stream into windows. No token is padding, but most documents that
are not much shorter than a window are cut, and the tokens after a cut are trained without their context.

`BestFit` puts every document that fits into a sample as a whole, by best-fit decreasing (Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv:2404.10830). From the longest document to the shortest, each goes into the
sample with the least room that it fits in, or into a new sample. The space left over is padding. The result depends
only on lengths, so it is computed on their histogram, like the packing of Krell et al. 2021 (arXiv:2107.02027).
Documents of one length are placed together, and samples that hold the same lengths form one group, a range of samples.
Time and memory grow with the number of different lengths, at most s, and not with the number of documents. Each epoch
draws at random which document of a length goes where, and the order of the samples.

`Sentences` fills each sample with the consecutive sentences of one document that fit, for models that are trained on
pairs of sentences.

A run may change its sample length within an epoch. The *rest* of the epoch, all tokens that no sample has had as a
label yet, is then packed like an epoch. It consists of `Pieces` of documents, which are packed like documents.

A sample has s + 1 tokens and s labels. A document of n tokens has n - 1 tokens to predict, all but its first, so it
fits whole if n <= s + 1. A longer document is cut into full samples and a *rest*, which overlap by one token: the last
label of one part is the first input of the next, as for windows. So each of these n - 1 tokens is predicted exactly
once. A document of one token has nothing to predict and is left out.

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
    """`length` tokens of a document, after its first `skip` tokens."""

    document: int
    skip: int
    length: int


class Pieces(NamedTuple):
    """Parts of documents, as int64 arrays `[p]`: number of the document, tokens of it before the part, tokens in it."""

    documents: NDArray[np.int64]
    skips: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Packing(Protocol):
    """Assignment of documents of known lengths to the samples of an epoch.

    The *index* of an epoch is a list of arrays with everything that differs between epochs.

    Attributes:
        name: Name of the packing in the config.
        samples: Number of samples per epoch.
        layout: Dtype and length of each array of the index.
        too_few: End of the error message if `samples` < 1.
    """

    name: PackingName
    samples: int
    layout: Layout
    too_few: str

    def make_index(self, generator: np.random.Generator) -> Arrays:
        """Return the index of an epoch, drawn from `generator`."""

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        """Yield the parts of documents in the sample at `place` of an epoch, at most s + 1 tokens."""

    def rest(self, index: Arrays, given: int, *, context: bool) -> Pieces:
        """Return the rest of an epoch after its first `given` samples: all tokens that were not yet a label.

        With `context`, a piece that begins within a document starts one token earlier, because the first token of a
        piece is not predicted.
        """


class Concatenation:
    """Packing into windows of the stream of shuffled documents. Windows overlap by one token.

    The tokens after the last full window are left out. The index holds the start of each document in the stream `[n]`,
    the permuted documents `[n]`, and the permuted windows `[samples]`.
    """

    name: PackingName = "concatenate"

    def __init__(self, lengths: NDArray[np.int64], seq_length: int) -> None:
        self.lengths, self.seq_length = lengths, seq_length
        self.samples = (int(lengths.sum()) - 1) // seq_length
        self.too_few = f"too few for one sample of training.seq_length + 1 = {seq_length + 1:,}"
        number = _smallest(max(len(lengths), self.samples))
        self.layout: Layout = ((np.int64, len(lengths)), (number, len(lengths)), (number, self.samples))

    def make_index(self, generator: np.random.Generator) -> Arrays:
        """Permute the documents and the windows."""
        number = self.layout[1][0]
        documents = generator.permutation(len(self.lengths)).astype(number)
        starts = np.concatenate([[0], np.cumsum(self.lengths[documents])[:-1]]).astype(np.int64)
        return starts, documents, generator.permutation(self.samples).astype(number)

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        """Yield the parts of documents in a window, s + 1 tokens."""
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
        """Return the parts of documents between the windows that were read."""
        starts, documents, samples = index
        firsts = np.sort(samples[:given].astype(np.int64)) * self.seq_length
        # Gaps between the labels of the windows that were read. The first token of the stream is not a label.
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
    """Packing of whole documents by best-fit decreasing.

    The first sample numbers are the samples that are filled by a part of a long document, in the order of documents.
    The other samples follow, group by group. The index holds the documents that have a rest, sorted by decreasing
    length of the rest and permuted within each length (a short document is all rest), and the permuted samples.
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
        """Permute the documents of each length, and the samples."""
        rests, number = self._split()[1], self.layout[0][0]
        documents = generator.permutation(np.flatnonzero(rests > 1).astype(number))
        # 16-bit integers are sorted in linear time.
        keys = (self.seq_length - rests[documents]).astype(np.uint16 if self.seq_length < 2**16 else np.uint32)
        documents = documents[np.argsort(keys, kind="stable")]
        return documents, generator.permutation(self.samples).astype(number)

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        """Yield the documents of a sample, or the part of a long document that fills the sample."""
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
        """Return the parts of documents in the samples that were not read."""
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
        # Consecutive parts overlap by one token and form one piece.
        first = np.ones(len(chosen), np.bool_)
        first[1:] = (chosen[1:] != chosen[:-1]) | (skips[1:] != ends[:-1] - 1)
        last = np.roll(first, -1)
        return Pieces(chosen[first], skips[first], ends[last] - skips[first])

    def describe(self) -> str:
        """Describe the packing: samples per epoch, padding, and cut documents, also as expected with concatenation."""
        s, lengths = self.seq_length, self.lengths
        cut = float(np.mean(lengths > s + 1))
        # A document of n > 1 tokens stays whole if it begins at one of the first s + 2 - n tokens of a window. Its
        # first token is equally likely to be any of the s tokens before the next window.
        cut_by_windows = float(np.mean(np.clip((lengths - 2) / s, 0, 1)))
        return (
            f"best_fit: {self.samples:,} samples per epoch; {self.padding_share:.2%} of their tokens are padding; "
            f"{cut:.2%} of documents are cut (longer than a sample; concatenate would cut {cut_by_windows:.2%})"
        )

    def _split(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each document's number of full samples, and the number of tokens of its rest, both `[n]`.

        The first token of a rest is not predicted.
        """
        full, rests = np.divmod(np.maximum(self.lengths - 1, 0), self.seq_length)
        return full, rests + 1


class Sentences:
    """Packing of consecutive sentences of one document into samples of at most s + 1 tokens.

    Each token of an epoch is in one sample. A sentence that is longer than a sample is cut. The index holds the
    permuted samples.

    Args:
        lengths: Number of tokens of each sentence of all documents, `[n]`.
        starts: Position of the first token of each document.
        seq_length: Number of labels of a sample, s.
    """

    name: PackingName = "sentences"
    too_few = "none of them in a sentence"

    def __init__(self, lengths: NDArray[np.int64], starts: NDArray[np.int64], seq_length: int) -> None:
        self._documents, self._ends = starts, np.cumsum(lengths)
        self._samples = _runs(self._ends, starts, seq_length + 1)
        self.samples = len(self._samples) - 1
        self.layout: Layout = ((_smallest(self.samples), self.samples),)

    def make_index(self, generator: np.random.Generator) -> Arrays:
        """Permute the samples."""
        return (generator.permutation(self.samples).astype(self.layout[0][0]),)

    def spans(self, index: Arrays, place: int) -> Iterator[DocumentSpan]:
        """Yield a span for each sentence of a sample, or for the part of a sentence that is in it."""
        sample = int(index[0][place])
        start, end = (int(x) for x in self._samples[sample : sample + 2])
        document = int(np.searchsorted(self._documents, start, side="right")) - 1
        inner = self._ends[np.searchsorted(self._ends, start, side="right") : np.searchsorted(self._ends, end)]
        bounds = [start, *inner.tolist(), end]
        for first, last in pairwise(bounds):
            yield DocumentSpan(document, first - int(self._documents[document]), last - first)

    def rest(self, index: Arrays, given: int, *, context: bool) -> Pieces:
        """Raise ValueError: the sample length cannot change within an epoch of sentences."""
        raise ValueError("samples of sentences keep their length to the end of an epoch")


def _runs(ends: NDArray[np.int64], starts: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the position of the first token of each sample of `Sentences`, then the number of all tokens."""
    bounds, total = [0], int(ends[-1]) if len(ends) else 0
    for stop in [*starts[1:].tolist(), total]:
        while (start := bounds[-1]) < stop:
            latest = int(np.searchsorted(ends, min(start + capacity, stop), side="right")) - 1
            whole = int(ends[latest]) if latest >= 0 else 0
            bounds.append(whole if whole > start else start + capacity)
    return np.array(bounds, np.int64)


PACKINGS: dict[PackingName, Callable[[NDArray[np.int64], int], Packing]] = {x.name: x for x in (Concatenation, BestFit)}


def _smallest(largest: int) -> type[np.generic]:
    """Return the dtype for document and sample numbers up to `largest`."""
    return np.uint32 if largest < 2**32 else np.int64


@dataclass(frozen=True)
class Groups:
    """Samples in groups; all samples of a group hold pieces of the same lengths.

    Pieces are listed by decreasing length. Group g has the samples from `starts[g]` on, and the rows
    `ends[g]:ends[g + 1]` of `entries` `[e, 2]`. For an entry (first, count), sample i holds `count` pieces of the list,
    from place `first + i * count` on. All arrays are int64.
    """

    samples: int
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    entries: NDArray[np.int64]

    def places(self, sample: int) -> list[slice]:
        """Return the places in the list of the pieces in `sample`."""
        group = int(np.searchsorted(self.starts, sample, side="right")) - 1
        entries = self.entries[self.ends[group] : self.ends[group + 1]].tolist()
        return [slice(first + sample * count, first + (sample + 1) * count) for first, count in entries]

    def samples_of_places(self, places: int) -> NDArray[np.int64]:
        """Return the sample of each of the first `places` places of the list, `[places]`: the inverse of `places`."""
        samples = np.empty(places, np.int64)
        for group, (start, stop) in enumerate(pairwise([*self.starts.tolist(), self.samples])):
            for first, count in self.entries[self.ends[group] : self.ends[group + 1]].tolist():
                samples[first + start * count : first + stop * count] = np.repeat(np.arange(start, stop), count)
        return samples


_Group = tuple[int, int, int, tuple[tuple[int, int], ...]]
"""Room in each sample, number of the first sample, end of the samples, entries."""


def best_fit(counts: NDArray[np.int64], capacity: int) -> Groups:
    """Pack `counts[n]` pieces of n tokens, 0 < n <= `capacity`, into samples by best-fit decreasing. Pure.

    A piece goes into the sample with the least room that it fits in. Afterwards this sample still has the least room,
    so it also gets the next pieces of that length until none fits, and then the other samples of its group follow. This
    at least halves their room, and each length splits at most two groups: O(capacity · log(capacity)²) steps.
    """
    fitting: list[_Group] = []  # a heap
    others: defaultdict[int, list[_Group]] = defaultdict(list)  # by room, for room less than the current length
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
