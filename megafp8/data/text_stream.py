"""Samples of text that is tokenized during training, and micro-batches of blends with such text.

Global sample i belongs to canonical stream i mod C, whichever data set it comes from. A stream concatenates the tokens
of its documents (`text_source`), each with an end-of-document token, and cuts samples of seq_length + 1 tokens that
overlap by one token. The content of sample i therefore depends only on the files, the seed and C. A data-parallel rank
runs the streams of its samples. These are always the same streams, because C is a multiple of
micro_batch_size · data-parallel size.

On each rank, a thread reads documents and makes micro-batches ahead of the training loop. `num_workers` processes
tokenize; with 0, that thread does. The positions of all streams (`StreamPositions`) are part of a checkpoint: each rank
saves the positions of its streams, and any layout can read them. Ranks that differ only in tensor, pipeline or context
parallelism run the same streams.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from numpy.typing import NDArray

from megafp8.batch import Batch
from megafp8.data import DataError
from megafp8.data.blend import Blend
from megafp8.data.preprocess import make_tokenize
from megafp8.data.sampler import Objective, collate, sample_indices
from megafp8.data.samples import PackedDataset
from megafp8.data.styles import Document, TokenizedRecord
from megafp8.data.styles.text import Texts
from megafp8.data.text_source import TextPosition, TextSource
from megafp8.data.tokenizers import TokenizerSettings
from megafp8.data.workers import map_in_order

logger = logging.getLogger(__name__)

_TASK_DOCUMENTS, _TASK_CHARACTERS = 32, 2**16  # limits of one task of a worker
_STEPS_AHEAD = 2
_CHARACTERS_OF_TOKEN = 4  # an estimate; it only affects which documents are tokenized first
_MAX_MESSAGES = 10
_CLOSE_SECONDS = 1.0


@dataclass
class StreamPositions:
    """Positions of the canonical streams of each text source before a global sample.

    Attributes:
        canonical_streams: Number of streams.
        samples: Global sample before which the streams have these positions.
        positions: Position of each stream, by the fingerprint of the source.
        streams: Streams that this process runs. It knows the current positions of only these streams.
    """

    canonical_streams: int
    samples: int = 0
    positions: dict[str, list[TextPosition]] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamPositions:
        """Return the positions that `as_json` wrote."""
        positions = {key: [TextPosition(*each) for each in listed] for key, listed in data["positions"].items()}
        return cls(data["canonical_streams"], data["samples"], positions)

    def as_json(self) -> dict[str, Any]:
        """Return the positions in a form for JSON, without `streams`."""
        positions = {key: [list(each) for each in listed] for key, listed in self.positions.items()}
        return {"canonical_streams": self.canonical_streams, "samples": self.samples, "positions": positions}

    def in_source(self, source: TextSource) -> list[TextPosition]:
        """Return the position of each stream of a source. A new source starts at its first document."""
        return self.positions.setdefault(source.fingerprint, [TextPosition()] * self.canonical_streams)

    def joined(self, parts: Iterable[StreamPositions]) -> StreamPositions:
        """Return these positions, updated from each of `parts` for the streams that it runs."""
        positions = {key: list(listed) for key, listed in self.positions.items()}
        for other in parts:
            for key, listed in other.positions.items():
                for stream in other.streams:
                    positions[key][stream] = listed[stream]
        return StreamPositions(self.canonical_streams, self.samples, positions, set(self.streams))


class _Task(NamedTuple):
    """Documents to tokenize, their positions, and the cutter that receives the tokens."""

    cutter: _Cutter
    positions: list[TextPosition]
    documents: list[Document]


class _SkippedDocuments:
    """Log of documents that are left out by `data.streams.skip_errors`: the first few, then only their number."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, origin: str, fault: str) -> None:
        """Count a document that is left out. Log the first ones, and then only the count at each power of ten."""
        self._count += 1
        if self._count <= _MAX_MESSAGES:
            logger.warning(f"left out: {origin}: {fault}")
        elif str(self._count).strip("0") == "1":
            logger.warning(f"left out {self._count:,} documents so far; the last: {origin}: {fault}")


class _Cutter:
    """Samples of one stream of a text source, in order, cut from documents that are tokenized elsewhere.

    `skipped` is the log of documents that cannot be used; None if such a document is an error.
    """

    def __init__(
        self, source: TextSource, stream: int, position: TextPosition, skipped: _SkippedDocuments | None
    ) -> None:
        self.position, self.length, self._skipped = position, source.seq_length, skipped
        self._source, self._stream, self._fault = source, stream, ""
        at_start = position == TextPosition(position.epoch)
        self._epoch_with_text = position.epoch - at_start  # the last epoch with text, or that was begun before
        self._documents = source.documents(stream, position)
        self._pieces: deque[tuple[TextPosition, NDArray[Any] | DataError]] = deque()
        self._tokens, self._expected = 0, 0.0
        self.ended = False  # True after an error, which is the last piece or document

    @property
    def supply(self) -> float:
        """Approximate number of tokens available, including documents that are being tokenized."""
        return self._tokens + self._expected

    @property
    def is_ready(self) -> bool:
        """Whether `take` can be called: there are enough tokens for a sample, or there is an error."""
        return self._tokens > self.length or self._has_failed

    @property
    def _has_failed(self) -> bool:
        """Whether the last piece is an error. Documents after an error are not used."""
        return bool(self._pieces) and isinstance(self._pieces[-1][1], DataError)

    def _fail(self, position: TextPosition, error: DataError) -> None:
        self._pieces.append((position, error))
        self.ended = True

    def task(self) -> _Task:
        """Return the next documents to tokenize."""
        positions, documents, characters = list[TextPosition](), list[Document](), 0
        while len(documents) < _TASK_DOCUMENTS and characters < _TASK_CHARACTERS:
            try:
                position, document = next(self._documents)
            except DataError as error:
                position, document = self.position, Document("", None, str(error))
                self.ended = True
            positions.append(position)
            documents.append(document)
            characters += len(document.text or "")
            if document.error is not None:
                break
        self._expected += 1 + characters / _CHARACTERS_OF_TOKEN
        return _Task(self, positions, documents)

    def add(self, task: _Task, results: Sequence[TokenizedRecord | str | None]) -> None:
        """Add the tokens of the oldest task. A stream without usable text in a whole epoch ends with an error."""
        self._expected -= 1 + sum(len(x.text or "") for x in task.documents) / _CHARACTERS_OF_TOKEN
        for position, document, result in zip(task.positions, task.documents, results):
            if self._has_failed:
                return
            fault = document.error if not isinstance(result, str) else f"cannot be tokenized: {result}"
            if isinstance(result, TokenizedRecord):
                self._epoch_with_text = position.epoch
                skip = self.position.token if position == self.position._replace(token=0) else 0
                self._pieces.append((position._replace(token=skip), result.ids[skip:]))
                self._tokens += len(result.ids) - skip
            elif fault is not None and (self._skipped is None or not document.origin):
                origin = f"{document.origin}: " if document.origin else ""
                works = "; data.streams.skip_errors=true leaves such documents out" if document.origin else ""
                self._fail(position, DataError(f"{origin}{fault}{works}"))
            elif position.epoch > self._epoch_with_text + 1:
                self._fail(position, self._source.no_text(self._stream, self._fault))
            elif fault is not None and self._skipped is not None:
                self._fault = f": skip_errors leaves out all its documents, such as {document.origin}: {fault}"
                self._skipped.add(document.origin, fault)

    def take(self) -> list[NDArray[Any]]:
        """Return the parts of documents that make up the next sample. Raises DataError if one cannot be used."""
        parts, missing = list[NDArray[Any]](), self.length + 1
        while True:
            position, ids = self._pieces.popleft()
            if isinstance(ids, DataError):
                raise ids
            parts.append(ids[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        # Samples overlap: the last token of this sample is the first token of the next.
        kept = len(parts[-1]) - 1
        self.position = position._replace(token=position.token + kept)
        self._pieces.appendleft((self.position, ids[kept:]))
        self._tokens -= self.length
        return parts


class _Rows:
    """Reader of global samples: streams in any order, the samples of each stream in order. Used by one thread."""

    def __init__(
        self,
        blend: Blend,
        begin: StreamPositions,
        tokenizer: TokenizerSettings,
        workers: int,
        skip_errors: bool,
        ended: threading.Event,
    ) -> None:
        """Create a reader without open streams. Setting `ended` stops it, even in the middle of a sample."""
        self._blend, self._begin = blend, begin
        self._skipped = _SkippedDocuments() if skip_errors else None
        self._cutters: dict[tuple[int, int], _Cutter] = {}
        self._next: dict[int, int] = {}
        self._waiting: deque[_Task] = deque()
        self._ended = ended
        make = partial(make_tokenize, tokenizer, Texts())
        self._results = map_in_order(make, self._tasks(), workers=workers, describe=lambda task: task[0].origin)

    def close(self) -> None:
        """End the worker processes."""
        self._results.close()

    def open(self, samples: Iterable[int]) -> None:
        """Open the streams that contain `samples`."""
        count, first = self._begin.canonical_streams, self._begin.samples
        for stream in sorted({i % count for i in samples}):
            self._next[stream] = first + (stream - first) % count
            for k, source in enumerate(self._blend.datasets):
                if isinstance(source, TextSource):
                    position = self._begin.in_source(source)[stream]
                    self._cutters[k, stream] = _Cutter(source, stream, position, self._skipped)

    def parts(self, index: int) -> Sequence[NDArray[Any]]:
        """Return the parts of global sample `index`. Earlier samples of the stream that were not read are skipped."""
        count = self._begin.canonical_streams
        stream = index % count
        for i in range(self._next[stream], index + 1, count):
            k, number = self._blend.segment.locate(i)
            source = self._blend.datasets[k]
            if isinstance(source, TextSource):
                cutter = self._cutters[k, stream]
                while not cutter.is_ready:
                    _, results = next(self._results)
                    task = self._waiting.popleft()
                    task.cutter.add(task, results)
                parts: Sequence[NDArray[Any]] = cutter.take()
            elif i == index and isinstance(source, PackedDataset):
                parts = source.parts(number)
        self._next[stream] = index + count
        return parts

    def positions(self) -> dict[str, dict[int, TextPosition]]:
        """Return the position of each open stream, by the fingerprint of the source."""
        by_source: dict[str, dict[int, TextPosition]] = {}
        for (k, stream), cutter in self._cutters.items():
            source = self._blend.datasets[k]
            assert isinstance(source, TextSource)
            by_source.setdefault(source.fingerprint, {})[stream] = cutter.position
        return by_source

    def _tasks(self) -> Iterator[list[Document]]:
        """Yield documents of the stream with the fewest tokens, until all streams or the reader have ended."""
        while (cutters := [x for x in self._cutters.values() if not x.ended]) and not self._ended.is_set():
            task = min(cutters, key=lambda cutter: cutter.supply).task()
            self._waiting.append(task)
            yield task.documents


class _Step(NamedTuple):
    """Micro-batches of a step, and the positions of all streams after them."""

    batches: list[Batch]
    samples: int
    positions: dict[str, dict[int, TextPosition]]


def batches(
    blend: Blend,
    positions: StreamPositions,
    *,
    tokenizer: TokenizerSettings,
    skip_errors: bool,
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int,
    objective: Objective,
    pin_memory: bool,
    position_of: Callable[[int], int] = lambda samples: samples,
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of a blend with text sources, one list per step, like `sampler.batches`.

    `positions` is updated before each step is yielded. Unless `skip_errors`, raises DataError in the step that would
    use a document that cannot be read.
    """
    place = (micro_batch_size, data_parallel_rank, data_parallel_size)
    assert positions.canonical_streams % (micro_batch_size * data_parallel_size) == 0, "config.checks"
    ready: queue.Queue[_Step | BaseException] = queue.Queue(_STEPS_AHEAD)
    ended = threading.Event()
    begin = StreamPositions.from_json(positions.as_json())
    rows_of_step = (
        (position_of(consumed), sample_indices(position_of(consumed), global_batch_size, *place))
        for consumed in itertools.count(consumed_samples, global_batch_size)
    )
    first, rows = next(rows_of_step)
    streams = [i for micro_batch in rows for i in micro_batch]

    def put(item: _Step | BaseException) -> None:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def make_steps() -> None:
        made = _Rows(blend, begin, tokenizer, num_workers, skip_errors, ended)
        with contextlib.closing(made):
            made.open(streams)
            for start, step in itertools.chain([(first, rows)], rows_of_step):
                steps = []
                for micro_batch in step:
                    batch = collate([(i, objective.row(made.parts(i), i)) for i in micro_batch], objective=objective)
                    assert isinstance(batch, Batch)
                    steps.append(batch.pin_memory() if pin_memory else batch)
                    if ended.is_set():
                        return
                put(_Step(steps, start + global_batch_size, made.positions()))
                if ended.is_set():
                    return

    def run() -> None:
        try:
            make_steps()
        except BaseException as error:
            put(error)

    for source in blend.datasets:
        if isinstance(source, TextSource):
            positions.in_source(source)
    thread = threading.Thread(target=run, name="text streams", daemon=True)
    thread.start()
    positions.streams = {i % positions.canonical_streams for i in streams}
    try:
        while True:
            step = ready.get()
            if isinstance(step, BaseException):
                raise step
            positions.samples = step.samples
            for key, listed in step.positions.items():
                for stream, position in listed.items():
                    positions.positions[key][stream] = position
            yield step.batches
    finally:
        ended.set()
        thread.join(_CLOSE_SECONDS)  # with a time limit: the thread may wait for a file system that does not answer
