"""Text that is tokenized while a run trains: the order of samples in any layout, after any resumption, of any files."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megafp8.batch import Batch
from megafp8.data import DataError, text_source
from megafp8.data.blend import Blend, Segment
from megafp8.data.samples import PackedDataset
from megafp8.data.styles import Document
from megafp8.data.text_source import TextPosition, TextSource
from megafp8.data.text_stream import StreamPositions, batches
from megafp8.data.tokenizers import TokenizerSettings
from megafp8.objectives.next_token import NextToken
from megafp8.training.process import StoppedWaiting, answering_stop
from tests.data.datasets import write_dataset
from tests.hub_server import hub_server
from tests.training.test_process import asked_to_stop

S, STREAMS, SEED, END = 16, 8, 3, 256
TEXTS = [f"<{i}>" + "abc" * (i % 7) for i in range(200)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source, "WINDOW_RECORDS", 5)
    monkeypatch.setattr(text_source, "_SMALLEST_BLOCK", 100)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write(folder: Path, kind: str, texts: list[str] = TEXTS) -> str:
    """The texts in one file or several; the path for data.train."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "folder of txt":
        for i, text in enumerate(texts):
            (folder / f"{i:03d}.txt").write_text(text)
        return str(folder)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "x.parquet", row_group_size=9)
        return str(folder / "x.parquet")
    pack = {"jsonl": bytes, "gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}[kind.split()[-1]]
    name = "jsonl" if kind.endswith("jsonl") else f"jsonl.{kind.split()[-1]}"
    halves = [texts[:90], texts[90:]] if kind.startswith("two") else [texts]
    for i, half in enumerate(halves):
        (folder / f"x{i}.{name}").write_bytes(pack(lines(half)))
    return str(folder / f"x*.{name}")


KINDS = ["jsonl", "two jsonl", "gz", "two zst", "parquet", "folder of txt"]


def source(path: str, streams: int = STREAMS, seq_length: int = S) -> TextSource:
    return TextSource(path, text_key="text", seq_length=seq_length, seed=SEED, canonical_streams=streams)


def epoch_of(text: TextSource, stream: int, epoch: int = 0) -> list[str]:
    """The texts of a stream in one epoch."""
    documents = text.documents(stream, TextPosition(epoch))
    return [x.text or "" for _, x in itertools.takewhile(lambda pair: pair[0].epoch == epoch, documents)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_each_document_once(tmp_path: Path, kind: str) -> None:
    text = source(write(tmp_path, kind))
    epochs = [[epoch_of(text, stream, epoch) for stream in range(STREAMS)] for epoch in (0, 1)]
    for epoch in epochs:
        assert Counter(itertools.chain(*epoch)) == Counter(TEXTS)
        assert all(epoch), "a stream without text"
    assert epochs[0] != epochs[1], "epochs have the same order"
    every = [*itertools.islice(text.documents(3, TextPosition()), 100)]
    for position, document in every[::20]:
        assert next(text.documents(3, position)) == (position, document), "a position leads elsewhere"


def steps(
    blend: Blend,
    positions: StreamPositions | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    micro: int = 2,
    consumed: int = 0,
    workers: int = 0,
    **options: Any,
) -> Iterator[list[Batch]]:
    """Steps of 8 samples."""
    return batches(
        blend,
        positions or StreamPositions(STREAMS),
        tokenizer=TokenizerSettings("bytes"),
        skip_errors=options.pop("skip_errors", False),
        consumed_samples=consumed,
        global_batch_size=8,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        num_workers=workers,
        objective=NextToken(S, reset_at_documents=True),
        pin_memory=False,
        **options,
    )


def rows(step: list[Batch]) -> dict[int, list[int]]:
    """Tokens of each sample of a step, and the last label."""
    found = {}
    for batch in step:
        assert batch.samples is not None
        for index, tokens, labels in zip(batch.samples.tolist(), batch.tokens.tolist(), batch.labels.tolist()):
            found[index] = [*tokens, labels[-1]]
    return found


def alone(text: TextSource) -> Blend:
    return Blend([text], Segment.fresh([1.0], SEED))


@pytest.mark.parametrize("kind", ["two jsonl", "parquet"])
def test_samples_are_windows_of_their_stream(tmp_path: Path, kind: str) -> None:
    """Every document begins anew for attention, and ends with an end of document."""
    text = source(write(tmp_path, kind))
    first = next(whole := steps(alone(text)))
    documents = sum(batch.cu_seqlens.diff().count_nonzero() for batch in first if batch.cu_seqlens is not None)
    assert int(documents) == sum(row[:-1].count(END) + (row[-2] != END) for row in rows(first).values())
    found = [rows(first), *(rows(step) for step in itertools.islice(whole, 60))]
    for stream in range(STREAMS):
        documents_of_stream = itertools.islice(text.documents(stream, TextPosition()), 400)
        tokens = [[*(document.text or "").encode(), END] for _, document in documents_of_stream]
        joined = list(itertools.chain(*tokens))
        for number, step in enumerate(found):
            assert step[number * 8 + stream] == joined[number * S : number * S + S + 1]


def test_layouts_workers_and_resumption_change_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "two jsonl")
    expected = [rows(step) for step in itertools.islice(steps(alone(source(path))), 12)]
    positions = [StreamPositions(STREAMS) for _ in range(4)]
    running = [steps(alone(source(path)), positions[rank], rank=rank, ranks=4) for rank in range(4)]
    for step in range(7):
        assert {key: row for one in running for key, row in rows(next(one)).items()} == expected[step]
    saved = json.loads(json.dumps(positions[0].joined(positions).as_json()))
    assert saved["samples"] == 56
    for ranks, micro, workers in ((1, 1, 1), (2, 4, 0), (1, 8, 0)):
        resumed = [
            steps(
                alone(source(path)), StreamPositions.from_json(saved),
                rank=rank, ranks=ranks, micro=micro, consumed=56, workers=workers,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for step in range(7, 12):
            assert {key: row for one in resumed for key, row in rows(next(one)).items()} == expected[step]


def test_samples_that_are_left_out_are_not_given_later(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")
    expected = [rows(step) for step in itertools.islice(steps(alone(source(path))), 8)]
    leave_out = steps(alone(source(path)), position_of=lambda samples: samples + (24 if samples >= 16 else 0))
    assert [rows(step) for step in itertools.islice(leave_out, 4)] == [*expected[:2], *expected[5:7]]


def test_a_blend_of_text_and_token_files(tmp_path: Path) -> None:
    """Each gives its share; those of files are its samples in order, those of text go on in each stream."""
    packed = PackedDataset(write_dataset(tmp_path / "t", [range(300, 340)] * 20), range(20), S, SEED, tmp_path)
    text = source(write(tmp_path / "in", "jsonl"))
    blend = Blend([packed, text], Segment.fresh([1.0, 3.0], SEED))
    positions = StreamPositions(STREAMS)
    running = steps(blend, positions)
    found = {key: row for step in itertools.islice(running, 10) for key, row in rows(step).items()}
    tokens = {stream: list[int]() for stream in range(STREAMS)}
    for index, row in found.items():
        k, number = blend.segment.locate(index)
        if k == 0:
            assert row == packed[number].tolist()
        else:
            assert tokens[index % STREAMS][-1:] in ([], row[:1]), "a stream did not go on"
            tokens[index % STREAMS] += row[bool(tokens[index % STREAMS]) :]
    assert Counter(blend.segment.locate(i)[0] for i in found)[1] == blend.segment.given(80)[1] > 50
    again = steps(blend, StreamPositions.from_json(positions.as_json()), consumed=80, ranks=2, rank=1)
    later = rows(next(running))
    assert rows(next(again)) == {key: row for key, row in later.items() if key % 4 in (2, 3)}


def test_a_bad_record_is_named_in_the_step_that_uses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS) + b"{nonsense\n" + lines(TEXTS))
    place = len(lines(TEXTS))
    text = source(str(tmp_path / "x.jsonl"))
    running = steps(alone(text))
    with pytest.raises(
        DataError, match=rf"x\.jsonl, line at byte {place}: not JSON: .*; data.streams.skip_errors=true"
    ):
        list(running)
    assert len(list(itertools.islice(steps(alone(text), skip_errors=True), 100))) == 100
    assert f"left out: {tmp_path}/x.jsonl, line at byte {place}: not JSON" in caplog.text


@pytest.mark.parametrize(("fault", "workers"), [("not JSON", 1), ("cannot be tokenized: no bytes", 0)])
def test_a_stream_of_bad_records_alone_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str, workers: int
) -> None:
    """With one error and few messages, whether records cannot be read or cannot be tokenized."""
    if fault.startswith("cannot"):
        monkeypatch.setattr("megafp8.data.text_stream.make_tokenize", _refuse_all)
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS * 10) if fault.startswith("cannot") else b"{nonsense\n" * 2000)
    running = steps(alone(source(str(tmp_path / "x.jsonl"))), skip_errors=True, workers=workers)
    with pytest.raises(DataError, match=rf"there is no text for canonical stream \d of 8: .* such as .*{fault}"):
        next(running)
    messages = [record.getMessage() for record in caplog.records]
    assert [x.startswith("left out: ") for x in messages[:11]] == [True] * 10 + [False]
    assert messages[10].startswith("left out 100 documents so far; the last: ")
    assert len(messages) <= 13


def _refuse_all(*settings: object) -> Callable[[Sequence[Document]], list[str]]:
    return lambda documents: ["no bytes"] * len(documents)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_ends_reading_in_the_middle_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A stream that goes on without text for a sample, which no error ends."""

    def without_end(self: TextSource, stream: int, at: TextPosition) -> Iterator[tuple[TextPosition, Document]]:
        while True:
            yield at, Document("x", "")

    monkeypatch.setattr(TextSource, "documents", without_end)
    with pytest.raises(StoppedWaiting), asked_to_stop(0.5):
        next(answering_stop(steps(alone(source(write(tmp_path, "jsonl"))), workers=workers)))
    deadline = time.monotonic() + 10
    while any(thread.name == "text streams" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread reads on"
        time.sleep(0.05)


def test_a_file_that_changes_or_has_no_text_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(TEXTS))
    running = steps(alone(source(str(path))))
    next(running)
    path.write_bytes(lines(TEXTS[1:]))
    with pytest.raises(DataError, match=r"x\.jsonl has changed since the run opened it; restore it"):
        list(running)
    path.write_bytes(lines([""] * 50))
    with pytest.raises(DataError, match="there is no text for canonical stream"):
        next(steps(alone(source(str(path)))))


def test_identity_is_content_and_not_place(tmp_path: Path) -> None:
    one, other = source(write(tmp_path / "a", "two jsonl")), source(write(tmp_path / "b", "two jsonl"))
    assert one.fingerprint == other.fingerprint
    changed = source(write(tmp_path / "c", "two jsonl", [*TEXTS[:-1], TEXTS[-1][::-1]]))
    assert changed.bytes == one.bytes
    assert changed.fingerprint != one.fingerprint
    assert one.in_streams(4).in_streams(STREAMS).parts == one.parts


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through fsspec, and the Hugging Face Hub as huggingface_hub reads it."""
    local = [rows(step) for step in itertools.islice(steps(alone(source(write(tmp_path / "data", "parquet")))), 4)]
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/corpus/x.parquet", (tmp_path / "data" / "x.parquet").read_bytes())
    remote = source("memory://bucket/corpus/*.parquet")
    assert [rows(step) for step in itertools.islice(steps(alone(remote)), 4)] == local
    with hub_server(monkeypatch, tmp_path / "cache") as hub:
        (tmp_path / "README.md").write_text("not read")
        hub.repositories["org/name"] = tmp_path
        named = source("hf://datasets/org/name")
        assert [file.path.name for file in named.files] == ["x.parquet"]
        assert [rows(step) for step in itertools.islice(steps(alone(named)), 4)] == local
        web = source(f"{hub.url}/org/name/resolve/main/data/x.parquet")
        assert [rows(step) for step in itertools.islice(steps(alone(web)), 4)] == local
        with pytest.raises(
            ValueError, match=r"^data.train, hf://datasets/org/absent: no such file, .*; gated and private data sets"
        ):
            source("hf://datasets/org/absent")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data.train, .*absent.jsonl: no such file"):
        source(str(tmp_path / "absent.jsonl"))
    (tmp_path / "x.arrow").write_text("")
    with pytest.raises(ValueError, match=r"no file in this folder can be read; it contains .*x.arrow"):
        source(str(tmp_path))
