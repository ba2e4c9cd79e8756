"""How many samples a run has read of each data set: the record in its checkpoints, and how a resumed run continues.

A *source* is a data set as training reads it. Its identity is what decides its sequence of samples: the contents
(`IndexedDataset.fingerprint`) and the documents that data.split selects; seed and sequence length are those of the run.
Where the files lie, and at which place the config lists them, makes no difference.

A run that resumes with the same sources and shares continues the recorded `Segment` of the blend. With others it begins
a new one at the sample where it stands, in which each source continues with its first sample that was not given yet. A
source that is left out keeps its count, so that it continues when it is listed again.

All functions are pure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from megafp8.data.blend import Segment, shares
from megafp8.data.samples import split_documents

Identity = tuple[str, int, int]


@dataclass(frozen=True)
class Source:
    """A data set that the config lists, with `weight` > 0. `documents` are for training, of `num_documents` in all."""

    prefix: str
    contents: str
    documents: range
    num_documents: int
    weight: float

    @property
    def identity(self) -> Identity:
        return self.contents, self.documents.start, self.documents.stop


@dataclass(frozen=True)
class RecordedSource:
    """What the record says of a source.

    `contents` and `documents` (start, stop) are None where it was made of a config, which does not tell. `weight` is 0
    where the source is not read any more. `start`: samples given before the current segment; `consumed`: in all.
    """

    prefix: str
    contents: str | None
    documents: tuple[int, int] | None
    weight: float
    start: int
    consumed: int

    @property
    def identity(self) -> Identity:
        return self.contents or self.prefix, *(self.documents or (0, 0))


@dataclass(frozen=True)
class Conflict:
    """A source that the record does not know, although it has one like it.

    `split`: the same contents, other documents. `contents`: the same prefix, other contents. `unknown`: `recorded` does
    not tell its contents and is not listed any more, so `source` may be the same data set under a new prefix.
    """

    kind: Literal["split", "contents", "unknown"]
    source: Source
    recorded: RecordedSource


@dataclass(frozen=True)
class Progress:
    """The record of a run: every source that it has ever read, those of the current segment first and in its order.

    `list_weights`: what weighs a list of data sets; "equal" in runs that began before it was "tokens". `first_sample`:
    the global sample at which the current segment begins.
    """

    list_weights: Literal["tokens", "equal"]
    first_sample: int
    sources: tuple[RecordedSource, ...]

    @classmethod
    def begin(cls, sources: Sequence[Source]) -> Progress:
        """That of a run that begins. `sources` are combined."""
        return cls("tokens", 0, tuple(_listed(source, 0) for source in sources))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """The inverse of `as_json`."""
        sources = [
            RecordedSource(**{**entry, "documents": entry["documents"] and tuple(entry["documents"])})
            for entry in data["sources"]
        ]
        return cls(data["list_weights"], data["first_sample"], tuple(sources))

    @classmethod
    def from_config(cls, data: Mapping[str, Any], sources: Sequence[Source]) -> Progress:
        """That of a run whose checkpoints have no record yet, from the section `data` of its config.

        Such runs gave equal shares to the data sets of a list. Contents are taken to be those that `sources` have now.
        """
        train, entries = data["train"], []
        here = {_normalized(source.prefix): source for source in sources}
        weights = train if isinstance(train, Mapping) else dict.fromkeys(train, 1.0)
        for prefix, weight in weights.items():
            source, contents, documents = here.get(_normalized(prefix)), None, None
            if source is not None:
                part = split_documents(source.num_documents, data["split"])[0]
                contents, documents = source.contents, (part.start, part.stop)
            entries.append(RecordedSource(prefix, contents, documents, weight, 0, 0))
        return cls("tokens" if isinstance(train, Mapping) else "equal", 0, tuple(entries))

    def as_json(self) -> dict[str, Any]:
        """For metadata.json."""
        return asdict(self)

    @property
    def active(self) -> list[RecordedSource]:
        """Sources of the current segment, in its order."""
        return [source for source in self.sources if source.weight]

    def segment(self, seed: int) -> Segment:
        """The blend of the active sources."""
        weights, starts = zip(*((source.weight, source.start) for source in self.active))
        return Segment(weights, seed, self.first_sample, starts)

    def after(self, samples: int, seed: int) -> Progress:
        """With what each source has given before global sample `samples`, in the current segment."""
        given = self.segment(seed).given(samples)
        read = [replace(source, consumed=count) for source, count in zip(self.active, given)]
        return replace(self, sources=(*read, *(source for source in self.sources if not source.weight)))

    def conflicts(self, sources: Sequence[Source]) -> list[Conflict]:
        """Which of `sources` would begin with their first sample, though they look as if they should continue."""
        recorded, found = self._recognized(sources).sources, []
        known = {entry.identity for entry in recorded}
        for source in sources:
            if source.identity in known:
                continue
            prefix = _normalized(source.prefix)
            alike = [Conflict("split", source, entry) for entry in recorded if entry.contents == source.contents]
            alike += [Conflict("contents", source, e) for e in recorded if _normalized(e.prefix) == prefix]
            alike += [Conflict("unknown", source, e) for e in recorded if e.contents is None and e.weight]
            found += alike[:1]
        return found

    def proceed(self, sources: Sequence[Source], samples: int, seed: int) -> tuple[Progress, list[str]]:
        """That of a run that resumes after `samples` with `sources` (combined), and in words what changed.

        Sources that are not in the record begin with their first sample.
        """
        done = self._recognized(sources).after(samples, seed)
        now = {source.identity: source for source in sources}
        weights = [source.weight for source in sources]
        new = dict(zip(now, map(float, shares(weights))))
        old = dict(
            zip([entry.identity for entry in done.active], map(float, shares([entry.weight for entry in done.active])))
        )
        if old.keys() == new.keys() and all(_equal(old[key], new[key]) for key in new):
            moved = (replace(e, prefix=now[e.identity].prefix) if e.weight else e for e in done.sources)
            return replace(done, sources=tuple(moved)), []
        # A run from before the record may have read one source under two names: then the larger count.
        consumed = {e.identity: e.consumed for e in sorted(done.sources, key=lambda entry: entry.consumed)}
        changes = [
            f"{source.prefix} added with a share of {100 * new[key]:.4g}%, from its sample {consumed.get(key, 0):,} on"
            if key not in old
            else f"share of {source.prefix} {100 * old[key]:.4g}% -> {100 * new[key]:.4g}%"
            for key, source in now.items()
            if key not in old or not _equal(old[key], new[key])
        ]
        gone = [entry for entry in done.sources if entry.identity not in now]
        changes += [f"{e.prefix} removed after {e.consumed:,} of its samples" for e in gone if e.weight]
        kept = (replace(entry, weight=0.0, start=entry.consumed) for entry in gone)
        listed = (_listed(source, consumed.get(key, 0)) for key, source in now.items())
        return replace(done, first_sample=samples, sources=(*listed, *kept)), changes

    def _recognized(self, sources: Sequence[Source]) -> Progress:
        """With the contents of entries that do not tell them, where a source is listed under their prefix."""
        here = {_normalized(source.prefix): source for source in sources}

        def complete(entry: RecordedSource) -> RecordedSource:
            source = here.get(_normalized(entry.prefix)) if entry.contents is None else None
            if source is None:
                return entry
            return replace(entry, contents=source.contents, documents=(source.documents.start, source.documents.stop))

        return replace(self, sources=tuple(map(complete, self.sources)))


def combine(sources: Sequence[Source]) -> list[Source]:
    """`sources` with each identity once, of the sum of its weights, in the order of their first."""
    found: dict[Identity, Source] = {}
    for source in sources:
        same = found.get(source.identity)
        found[source.identity] = source if same is None else replace(same, weight=same.weight + source.weight)
    return list(found.values())


def _listed(source: Source, consumed: int) -> RecordedSource:
    documents = (source.documents.start, source.documents.stop)
    return RecordedSource(source.prefix, source.contents, documents, source.weight, consumed, consumed)


def _equal(share: float, other: float) -> bool:
    return math.isclose(share, other, rel_tol=1e-9)


def _normalized(prefix: str) -> str:
    """`prefix` without what makes no difference in a path."""
    return os.path.normpath(prefix)
