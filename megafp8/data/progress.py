"""The record of how many samples a run has read from each data set, and how a resumed run continues.

A *source* is a data set as training reads it. The identity of a source consists of everything that determines its
sequence of samples: the contents (`IndexedDataset.fingerprint`), the documents that data.split selects, and the
packing. The seed belongs to the run. Paths, and the order in the config, make no difference.

Contents are identified by a part of them, so different files may appear to have the same contents. A number
distinguishes such data sets (`tell_apart`). A resumed run recognizes each of them by its path or, if files were moved,
by the most similar path, and then by their order.

A run that resumes with the same sources and weights continues the recorded `Segment` of the blend. If sources or
weights differ, it starts a new segment at its current sample, and each source continues with its first unread sample. A
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
"""Separator before the number of a data set in its contents. The first of several equal data sets has no number."""


@dataclass(frozen=True)
class DataSource:
    """A data set of the config, with `weight` > 0.

    `documents` are the training documents among all `num_documents`. `length` is the number of labels of a sample, or
    None if it is unknown.
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
        """Contents, documents and packing, which determine the sequence of samples."""
        return self.contents, self.documents.start, self.documents.stop, self.packing


@dataclass(frozen=True)
class RecordedSource:
    """A source in the record of a run.

    Attributes:
        prefix: Path or URL of the data set.
        contents: Identity of the contents; None if the record was made from a config, which does not have it.
        documents: Start and stop of the documents; None like `contents`.
        weight: Weight in the blend; 0 if the source is no longer read.
        start: Number of samples read before the current segment.
        consumed: Number of samples read in total.
        packing: Packing of the documents. Old runs, which had no choice, concatenated documents.
        length: Number of labels of a sample; None in records of runs that could not change it.
        position: First sample of that length.
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
        """Contents, documents and packing, or the path while the contents are unknown."""
        return self.contents or self.prefix, *(self.documents or (0, 0)), self.packing


@dataclass(frozen=True)
class Conflict:
    """A source that is not in the record, although a similar source is.

    The kinds are:

    - `packing`: same contents and documents, different packing.
    - `split`: same contents, different documents.
    - `contents`: same prefix, different contents.
    - `unknown`: `recorded` has no contents and is no longer listed, so `source` may be the same data set under a new
      prefix.
    """

    kind: Literal["packing", "split", "contents", "unknown"]
    source: DataSource
    recorded: RecordedSource


@dataclass(frozen=True)
class Progress:
    """Record of every source that a run has read.

    Attributes:
        list_weights: Weighting of a list of data sets without weights: "tokens", or "equal" in older runs.
        first_sample: Global sample at which the current segment starts.
        sources: All sources; the sources of the current segment come first, in the segment's order.
    """

    list_weights: Literal["tokens", "equal"]
    first_sample: int
    sources: tuple[RecordedSource, ...]

    @classmethod
    def begin(cls, sources: Sequence[DataSource]) -> Progress:
        """Return the record of a new run. `sources` are already combined (`combine`)."""
        return cls("tokens", 0, tuple(_listed(source, None) for source in sources))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Return the record that `as_json` wrote."""
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
        """Return the record of a run from the section `data` of its config, for checkpoints without a record.

        Such runs weighted a list of data sets equally. Contents are assumed to equal the current contents of `sources`.
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
        """Return the record in the form in which metadata.json stores it."""
        return asdict(self)

    def with_length(self, length: int) -> Progress:
        """Return this record with `length` in entries without a length."""
        known = (replace(e, length=length) if e.length is None else e for e in self.sources)
        return replace(self, sources=tuple(known))

    def moved(self, positions: Mapping[Identity, SamplePosition], length: int) -> Progress:
        """Return this record with sample length `length` for the sources in `positions`, from these positions on."""
        moved_sources = (
            replace(e, length=length, position=positions[e.identity]) if e.identity in positions else e
            for e in self.sources
        )
        return replace(self, sources=tuple(moved_sources))

    @property
    def active(self) -> list[RecordedSource]:
        """Sources of the current segment, in the segment's order."""
        return [source for source in self.sources if source.weight]

    def segment(self, seed: int) -> Segment:
        """Return the segment that blends the active sources."""
        weights, starts = zip(*((source.weight, source.start) for source in self.active))
        return Segment(weights, seed, self.first_sample, starts)

    def after(self, samples: int, seed: int) -> Progress:
        """Return this record with `consumed` counted up to global sample `samples` of the current segment."""
        counts = self.segment(seed).given(samples)
        read = [replace(source, consumed=count) for source, count in zip(self.active, counts)]
        return replace(self, sources=(*read, *(source for source in self.sources if not source.weight)))

    def conflicts(self, sources: Sequence[DataSource]) -> list[Conflict]:
        """Return the `sources` that would start with their first sample although the record has a similar source."""
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
        """Return the record of a run that resumes after `samples` samples, and messages about changed sources.

        `sources` are already combined. Sources that are not in the record start with their first sample.
        """
        done = self._recognized(sources).after(samples, seed)
        now = {source.identity: source for source in sources}
        new = dict(zip(now, map(float, shares([source.weight for source in sources]))))
        old_shares = shares([entry.weight for entry in done.active])
        old = dict(zip((entry.identity for entry in done.active), map(float, old_shares)))
        if old.keys() == new.keys() and all(_equal(old[key], new[key]) for key in new):
            moved = (replace(e, prefix=now[e.identity].prefix) if e.weight else e for e in done.sources)
            return replace(done, sources=tuple(moved)), []
        # An old run without a record may have read one source under two names. The larger count is used.
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
        """Return this record with missing contents filled in from the sources with the same prefix."""
        by_path = {normalized(source.prefix): source for source in sources}

        def complete(entry: RecordedSource) -> RecordedSource:
            source = by_path.get(normalized(entry.prefix)) if entry.contents is None else None
            return entry if source is None else replace(entry, contents=source.contents, documents=source.identity[1:3])

        return replace(self, sources=tuple(map(complete, self.sources)))


class ListedFiles(NamedTuple):
    """Files of a listed data set, and the contents that they appear to have.

    `files` is empty if `contents` covers the files completely; other files with the same contents are then copies.
    """

    prefix: str
    contents: str
    files: tuple[str, ...]


def tell_apart(listed: Sequence[ListedFiles], recorded: Sequence[RecordedSource] = ()) -> list[str]:
    """Return the contents of each listed data set, with a number if other files appear to have the same contents.

    Entries that name the same files, or that are certainly copies, get the same contents. Pure.

    Args:
        listed: Data sets of the config.
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
    """Return the number of trailing components that two paths have in common."""
    parts = zip(reversed(normalized(path).split("/")), reversed(normalized(other).split("/")))
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], parts))


def combine(sources: Sequence[DataSource]) -> list[DataSource]:
    """Merge sources of the same identity and add their weights. The result is in the order of first appearance."""
    combined: dict[Identity, DataSource] = {}
    for source in sources:
        same = combined.get(source.identity)
        combined[source.identity] = source if same is None else replace(same, weight=same.weight + source.weight)
    return list(combined.values())


def _listed(source: DataSource, before: RecordedSource | None) -> RecordedSource:
    """Return the record's entry for `source`, which continues after the entry `before`, if there is one."""
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
    """Return a path or URL in a normal form, for comparison."""
    return os.path.abspath(path)
