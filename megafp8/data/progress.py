"""The record of how many samples a run has read of each data set, and how a resumed run continues.

A *source* is a data set as training reads it. Its identity is what decides its sequence of samples: the contents
(`IndexedDataset.fingerprint`), the documents that data.split selects, and how they are packed. The seed is that of the
run; paths and the order in the config make no difference.

Contents are known by samples of them, so different files may seem to have the same ones. Such data sets are told apart
by a number (`tell_apart`). A resumed run finds each of them by its path or, if they were moved, by the most similar
path and then by their order.

A run that resumes with the same sources and weights continues the recorded `Segment` of the blend. With others it
starts a new one at its current sample, in which each source continues with its first sample that was not given yet. A
source that is removed keeps its count, and continues when it is listed again.

All functions are pure.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from megafp8.data.blend import Segment, shares
from megafp8.data.packing import PackingName
from megafp8.data.samples import SamplePosition, split_documents

Identity = tuple[str, int, int, PackingName]
_NUMBER = "#"
"""Precedes the number of a data set in its contents. The first of those that seem to be equal has none."""


@dataclass(frozen=True)
class DataSource:
    """A data set of the config, of `weight` > 0. `documents`: those for training, of `num_documents`.

    `length`: labels of a sample; None where it is not known.
    """

    prefix: str
    contents: str
    documents: range
    num_documents: int
    weight: float
    packing: PackingName = "concatenate"
    length: int | None = None

    @property
    def identity(self) -> Identity:
        return self.contents, self.documents.start, self.documents.stop, self.packing


@dataclass(frozen=True)
class RecordedSource:
    """A source in the record.

    `contents` and `documents` (start, stop) are None if the record was made from a config, which does not have them.
    `weight` is 0 for a source that is no longer read. `start`: samples given before the current segment; `consumed`: in
    total. `packing`: runs from before there was a choice concatenated documents. `length`: labels of a sample,
    None in records from before it could change; `position`: where samples of that length began.
    """

    prefix: str
    contents: str | None
    documents: tuple[int, int] | None
    weight: float
    start: int
    consumed: int
    packing: PackingName = "concatenate"
    length: int | None = None
    position: SamplePosition = SamplePosition()  # noqa: RUF009 - immutable

    @property
    def identity(self) -> Identity:
        return self.contents or self.prefix, *(self.documents or (0, 0)), self.packing


@dataclass(frozen=True)
class Conflict:
    """A source that is not in the record although a similar one is.

    `packing`: the same contents and documents, packed otherwise. `split`: the same contents, other documents.
    `contents`: the same prefix, other contents. `unknown`: `recorded` has no contents and is no longer listed, so
    `source` may be the same data set under a new prefix.
    """

    kind: Literal["packing", "split", "contents", "unknown"]
    source: DataSource
    recorded: RecordedSource


@dataclass(frozen=True)
class Progress:
    """The record of a run: every source that it has read, those of the current segment first, in its order.

    `list_weights`: how a list of data sets without weights is weighted, "equal" in runs from before "tokens" became the
    rule. `first_sample`: the global sample at which the current segment starts.
    """

    list_weights: Literal["tokens", "equal"]
    first_sample: int
    sources: tuple[RecordedSource, ...]

    @classmethod
    def begin(cls, sources: Sequence[DataSource]) -> Progress:
        """The record of a new run. `sources` are combined."""
        return cls("tokens", 0, tuple(_listed(source, None) for source in sources))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """The inverse of `as_json`."""
        sources = []
        for entry in data["sources"]:
            documents, position = entry["documents"], entry.get("position")
            fields_of_entry = {**entry, "documents": documents and tuple(documents)}
            if position is not None:
                fields_of_entry["position"] = SamplePosition(
                    **position | {"given": tuple(map(tuple, position["given"]))}
                )
            sources.append(RecordedSource(**fields_of_entry))
        return cls(data["list_weights"], data["first_sample"], tuple(sources))

    @classmethod
    def from_config(cls, data: Mapping[str, Any], sources: Sequence[DataSource]) -> Progress:
        """The record of a run whose checkpoints have none, from the section `data` of its config.

        Such runs weighted a list of data sets equally. Contents are assumed to be those of `sources` now.
        """
        train, entries = data["train"], []
        by_path = {normalized(source.prefix): source for source in sources}
        weights = train if isinstance(train, Mapping) else dict.fromkeys(train, 1.0)
        for prefix, weight in weights.items():
            source, contents, documents = by_path.get(normalized(prefix)), None, None
            if source is not None:
                part = split_documents(source.num_documents, data["split"])[0]
                contents, documents = source.contents, (part.start, part.stop)
            entries.append(RecordedSource(prefix, contents, documents, weight, 0, 0))
        return cls("tokens" if isinstance(train, Mapping) else "equal", 0, tuple(entries))

    def as_json(self) -> dict[str, Any]:
        """The progress as metadata.json holds it."""
        return asdict(self)

    def with_length(self, length: int) -> Progress:
        """The same progress with `length` in entries that have none."""
        known = (replace(e, length=length) if e.length is None else e for e in self.sources)
        return replace(self, sources=tuple(known))

    def moved(self, positions: Mapping[Identity, SamplePosition], length: int) -> Progress:
        """The progress with samples of `length` in the sources of `positions`, from these positions on."""
        moved_sources = (
            replace(e, length=length, position=positions[e.identity]) if e.identity in positions else e
            for e in self.sources
        )
        return replace(self, sources=tuple(moved_sources))

    @property
    def active(self) -> list[RecordedSource]:
        """Sources of the current segment, in its order."""
        return [source for source in self.sources if source.weight]

    def segment(self, seed: int) -> Segment:
        """The blend of the active sources."""
        weights, starts = zip(*((source.weight, source.start) for source in self.active))
        return Segment(weights, seed, self.first_sample, starts)

    def after(self, samples: int, seed: int) -> Progress:
        """The progress with `consumed` counted up to global sample `samples` of the current segment."""
        counts = self.segment(seed).given(samples)
        read = [replace(source, consumed=count) for source, count in zip(self.active, counts)]
        return replace(self, sources=(*read, *(source for source in self.sources if not source.weight)))

    def conflicts(self, sources: Sequence[DataSource]) -> list[Conflict]:
        """The `sources` that would start with their first sample although a similar one is in the record."""
        recorded, found_conflicts = self._recognized(sources).sources, []
        known = {entry.identity for entry in recorded}
        for source in sources:
            if source.identity in known:
                continue
            prefix = normalized(source.prefix)
            alike = [Conflict("packing", source, e) for e in recorded if e.identity[:3] == source.identity[:3]]
            alike += [Conflict("split", source, entry) for entry in recorded if entry.contents == source.contents]
            alike += [Conflict("contents", source, e) for e in recorded if normalized(e.prefix) == prefix]
            alike += [Conflict("unknown", source, e) for e in recorded if e.contents is None and e.weight]
            found_conflicts += alike[:1]
        return found_conflicts

    def proceed(self, sources: Sequence[DataSource], samples: int, seed: int) -> tuple[Progress, list[str]]:
        """The record of a run that resumes after `samples` with `sources` (combined), and messages on what changed.

        Sources that are not in the record start with their first sample.
        """
        done = self._recognized(sources).after(samples, seed)
        now = {source.identity: source for source in sources}
        new = dict(zip(now, map(float, shares([source.weight for source in sources]))))
        old_shares = shares([entry.weight for entry in done.active])
        old = dict(zip((entry.identity for entry in done.active), map(float, old_shares)))
        if old.keys() == new.keys() and all(_equal(old[key], new[key]) for key in new):
            moved = (replace(e, prefix=now[e.identity].prefix) if e.weight else e for e in done.sources)
            return replace(done, sources=tuple(moved)), []
        # A run from before this record may have read one source under two names: the larger count is used.
        entries = {e.identity: e for e in sorted(done.sources, key=lambda entry: entry.consumed)}
        consumed = {key: entry.consumed for key, entry in entries.items()}
        changes = [
            f"{source.prefix} added with a share of {100 * new[key]:.4g}%, from its sample {consumed.get(key, 0):,} on"
            if key not in old
            else f"share of {source.prefix} {100 * old[key]:.4g}% -> {100 * new[key]:.4g}%"
            for key, source in now.items()
            if key not in old or not _equal(old[key], new[key])
        ]
        gone = [entry for entry in done.sources if entry.identity not in now]
        changes += [f"{e.prefix} removed after {e.consumed:,} of its samples" for e in gone if e.weight]
        removed = (replace(entry, weight=0.0, start=entry.consumed) for entry in gone)
        listed = (_listed(source, entries.get(key)) for key, source in now.items())
        return replace(done, first_sample=samples, sources=(*listed, *removed)), changes

    def _recognized(self, sources: Sequence[DataSource]) -> Progress:
        """The progress with entries that have no contents completed by the source of the same prefix."""
        by_path = {normalized(source.prefix): source for source in sources}

        def complete(entry: RecordedSource) -> RecordedSource:
            source = by_path.get(normalized(entry.prefix)) if entry.contents is None else None
            return entry if source is None else replace(entry, contents=source.contents, documents=source.identity[1:3])

        return replace(self, sources=tuple(map(complete, self.sources)))


class ListedFiles(NamedTuple):
    """Files of a listed data set, and the contents that they seem to have.

    `files` is empty if `contents` covers all that they have, so that others with the same contents are copies.
    """

    prefix: str
    contents: str
    files: tuple[str, ...]


def tell_apart(listed: Sequence[ListedFiles], recorded: Sequence[RecordedSource] = ()) -> list[str]:
    """Return the contents of each listed data set, numbered where other files seem to have the same.

    Entries that are the same files, or certainly copies, have the same contents. Pure.

    Args:
        recorded: Sources that the run has read, which keep their numbers.
    """
    result: dict[tuple[str, tuple[str, ...]], str] = {}
    for contents in dict.fromkeys(entry.contents for entry in listed):
        prefixes: dict[tuple[str, ...], str] = {}
        for entry in (entry for entry in listed if entry.contents == contents):
            prefixes.setdefault(entry.files, entry.prefix)
        known = [e for e in recorded if e.contents is not None and e.contents.partition(_NUMBER)[0] == contents]
        pairs = [(files, e, _common_end(prefixes[files], e.prefix)) for files in prefixes for e in known]
        names: dict[tuple[str, ...], str] = {}
        for files, source, _ in sorted(pairs, key=lambda pair: -pair[2]):
            if files not in names and source.contents not in names.values():
                names[files] = str(source.contents)
        for files in prefixes:
            numbered = (f"{contents}{_NUMBER}{i}" if i else contents for i in itertools.count())
            names.setdefault(files, next(name for name in numbered if name not in names.values()))
        result |= {(contents, files): name for files, name in names.items()}
    return [result[entry.contents, entry.files] for entry in listed]


def _common_end(path: str, other: str) -> int:
    """Return the number of parts that two paths have in common at their ends."""
    parts = zip(reversed(normalized(path).split("/")), reversed(normalized(other).split("/")))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], parts))


def combine(sources: Sequence[DataSource]) -> list[DataSource]:
    """`sources` with each identity once and its weights summed, in the order of first appearance."""
    combined: dict[Identity, DataSource] = {}
    for source in sources:
        same = combined.get(source.identity)
        combined[source.identity] = source if same is None else replace(same, weight=same.weight + source.weight)
    return list(combined.values())


def _listed(source: DataSource, before: RecordedSource | None) -> RecordedSource:
    """The entry of `source`, which continues after that of `before`."""
    documents = source.identity[1:3]
    recorded = RecordedSource(
        source.prefix, source.contents, documents, source.weight, 0, 0, source.packing, source.length
    )
    if before is None:
        return recorded
    count = before.consumed
    return replace(recorded, start=count, consumed=count, length=before.length, position=before.position)


def _equal(share: float, other: float) -> bool:
    return math.isclose(share, other, rel_tol=1e-9)


def normalized(path: str) -> str:
    """Return one spelling of a path or URL, for comparison."""
    return os.path.abspath(path)
