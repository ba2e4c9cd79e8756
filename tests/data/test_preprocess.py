"""Preprocessing: every format gives the same documents, in an order that does not depend on the workers."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megafp8.data.documents import Document
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.preprocess import preprocess
from megafp8.data.tokenizers import Tokenizer, TokenizerSettings, build_tokenizer
from tests.data.datasets import all_documents, write_dataset
from tools import inspect_data, preprocess_data

TEXTS = [f"document {i}\n" * (i % 5 + 1) for i in range(60)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()

NOISE = "".join(json.dumps({"text": hashlib.sha256(bytes([i])).hexdigest()}) + "\n" for i in range(200)).encode()

PACK: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": bytes,
    "jsonl.gz": gzip.compress,
    "jsonl.zst": zstandard.ZstdCompressor().compress,
}


def run(prefix: Path, *arguments: str) -> int:
    return preprocess_data.main([*arguments, "--tokenizer", "bytes", "--output-prefix", str(prefix)])


def texts(prefix: Path) -> list[str]:
    documents = all_documents(prefix)
    assert all(document[-1] == 256 for document in documents), "no end of document"
    return [bytes(document[:-1]).decode() for document in documents]


def make_input(folder: Path, kind: str) -> list[str]:
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:03d}.txt").write_text(text)
        return [str(folder)]
    path = folder / f"data.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": list(range(60))}), path, row_group_size=7)
    else:
        path.write_bytes(PACK[kind](LINES))
    return [str(path)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_every_format(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    assert run(tmp_path / "out", "--input", *make_input(tmp_path / "in", kind), "--workers", "2") == 0
    assert texts(tmp_path / "out") == TEXTS
    about = json.loads((tmp_path / "out.json").read_text())
    assert (about["documents"], about["vocab_size"], about["max_token_id"]) == (60, 257, 256)
    assert about["tokens"] == IndexedDataset(tmp_path / "out").num_tokens


def test_text_files_and_overwriting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "empty.py").write_text("")
    assert run(tmp_path / "out", "--text-files", "--input", str(tmp_path / "*.py")) == 0
    bare = ["--text-files", "--input", str(tmp_path / "a.py"), "--no-append-eod"]
    assert run(tmp_path / "out", *bare) == 2
    assert "out.bin exists; choose another output prefix" in capsys.readouterr().err
    assert texts(tmp_path / "out") == ["print(1)\n"]
    assert run(tmp_path / "out", *bare, "--overwrite") == 0
    assert all_documents(tmp_path / "out") == [list(b"print(1)\n")]


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    run(tmp_path / "out", "--input", *make_input(tmp_path / "in", "jsonl"))
    capsys.readouterr()
    png = tmp_path / "lengths.png"
    options = ["--tokenizer", "bytes", "--documents", "1", "--samples", "1", "--seq-length", "32", "--png", str(png)]
    assert inspect_data.main([str(tmp_path / "out"), *options]) == 0
    shown = capsys.readouterr().out
    assert "60 documents" in shown
    assert "--- document 0\ndocument 0\n" in shown
    assert "--- sample 0 of" in shown
    assert png.stat().st_size > 1000
    assert inspect_data.main([str(tmp_path / "absent")]) == 2
    assert "error: " in capsys.readouterr().err


def test_inspect_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert inspect_data.main(list(arguments)) == 2
        return capsys.readouterr().err

    prefix = str(tmp_path / "out")
    (tmp_path / "a.txt").write_text("a" * 100)
    assert run(tmp_path / "out", "--input", str(tmp_path / "a.txt")) == 0
    assert "too few for one sample" in refused(prefix, "--samples", "1", "--seq-length", "500")
    assert f"there is no folder {tmp_path}/absent; make it" in refused(prefix, "--png", f"{tmp_path}/absent/x.png")
    (tmp_path / "out.json").write_text(json.dumps({"tokenizer_fingerprint": "f" * 64}))
    assert "was written with the tokenizer ffffffffffff…" in refused(prefix, "--tokenizer", "bytes")
    large = write_dataset(tmp_path / "large", [[300]]).prefix
    assert "the data contain token 300" in refused(large, "--documents", "1", "--tokenizer", "bytes")
    assert inspect_data.main([large, "--documents", "1"]) == 0
    assert "--- document 0\n300\n" in capsys.readouterr().out
    assert "nothing to plot" in refused(write_dataset(tmp_path / "none", []).prefix, "--png", str(tmp_path / "x.png"))


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = make_input(tmp_path / "in", "jsonl")
    (tmp_path / "in" / "noise.jsonl").write_bytes(NOISE * 10)
    for workers in ("0", "3"):
        assert run(tmp_path / workers, "--input", *source, str(tmp_path / "in"), "--workers", workers) == 0
        for suffix in ("bin", "idx", "json"):
            assert (tmp_path / f"{workers}.{suffix}").read_bytes() == (tmp_path / f"0.{suffix}").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"text": "one"}\n{\n\n{"text": "two"}\n', "bad.jsonl, line 2: not JSON"),
        ("cut.jsonl.gz", gzip.compress(NOISE, mtime=0)[:3000], "cut.jsonl.gz: cannot be read: Compressed file ended"),
        ("cut.jsonl.zst", PACK["jsonl.zst"](NOISE)[:3000], "cut.jsonl.zst: cannot be read: compressed file ended"),
        ("no.jsonl.gz", b"not compressed", "no.jsonl.gz: cannot be read: Not a gzipped file"),
        ("no.jsonl.zst", b"not compressed", "no.jsonl.zst: cannot be read: zstd decompress"),
        ("no.parquet", b"not parquet at all", "no.parquet: cannot be read: Parquet magic bytes not found"),
        ("latin.txt", "Größe".encode("latin-1"), "latin.txt: not UTF-8 text"),
    ],
)
def test_a_broken_file_is_named_or_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "whole.txt").write_text("whole")
    inputs = ["--input", str(tmp_path / name), str(tmp_path / "whole.txt")]
    assert run(tmp_path / "out", *inputs) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "whole.txt"], "files were left"
    assert run(tmp_path / "out", *inputs, "--skip-errors") == 0
    assert texts(tmp_path / "out")[-1] == "whole"
    assert "1 unreadable documents skipped" in capsys.readouterr().out


def test_all_frames_of_a_zst_file_are_read(tmp_path: Path) -> None:
    """Parallel compressors write many; some are larger than one read."""
    large = json.dumps({"text": NOISE.decode() * 50}).encode() + b"\n"
    (tmp_path / "x.jsonl.zst").write_bytes(b"".join(map(PACK["jsonl.zst"], (LINES, large, LINES, NOISE))))
    assert run(tmp_path / "out", "--input", str(tmp_path / "x.jsonl.zst")) == 0
    noise = [json.loads(line)["text"] for line in NOISE.splitlines()]
    assert texts(tmp_path / "out") == [*TEXTS, NOISE.decode() * 50, *TEXTS, *noise]


def test_a_bad_tokenization_is_one_bad_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*settings: Any) -> Tokenizer:
        tokenizer = build_tokenizer(*settings)

        def encode(text: str) -> list[int]:
            if text == TEXTS[7]:
                raise RuntimeError("too long")
            return tokenizer.encode(text)

        return replace(tokenizer, encode=encode)

    monkeypatch.setattr("megafp8.data.preprocess.build_tokenizer", failing)
    source = make_input(tmp_path, "jsonl")
    assert run(tmp_path / "out", "--input", *source) == 2
    assert "data.jsonl, line 8: cannot be tokenized: RuntimeError: too long" in capsys.readouterr().err
    assert run(tmp_path / "out", "--input", *source, "--skip-errors") == 0
    assert texts(tmp_path / "out") == TEXTS[:7] + TEXTS[8:]


class Interruption:
    """Documents that after `after` of them interrupt the reading process or kill one of its workers."""

    def __init__(self, after: int, kill: bool, size: int) -> None:
        self.after, self.kill, self.size = after, kill, size
        self.workers: list[int] = []
        self._others = {process.pid for process in multiprocessing.active_children()}  # ranks of other tests

    def __iter__(self) -> Iterator[Document]:
        for number in range(100):
            if number == self.after:
                children = {process.pid for process in multiprocessing.active_children()}
                self.workers = [pid for pid in children - self._others if pid is not None]
                if not self.kill:
                    raise KeyboardInterrupt
                os.kill(self.workers[0], signal.SIGKILL)
            yield Document(f"document {number}", "x" * self.size)


@pytest.mark.parametrize(
    ("kill", "after", "size"),
    [
        (True, 20, 300_000),
        (False, 0, 10),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, 0, 10), (False, 20, 300_000))),
    ],
)
def test_killed_workers_and_interrupts_leave_no_files(tmp_path: Path, kill: bool, after: int, size: int) -> None:
    """While workers start, and while they send results larger than a pipe's buffer."""
    documents = Interruption(after, kill, size)
    settings = TokenizerSettings("bytes")
    start = time.monotonic()
    with pytest.raises(ChildProcessError if kill else KeyboardInterrupt) as raised:
        preprocess(documents, str(tmp_path / "x"), tokenizer=settings, workers=2, progress=False)
    assert time.monotonic() - start < 20
    assert list(tmp_path.iterdir()) == []
    assert len(documents.workers) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in documents.workers)
    if kill:
        assert f"worker process {documents.workers[0]} was killed by SIGKILL at document" in str(raised.value)


def test_publishing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at any rename or removal, all new files replace the old; killed there, no mixture is readable."""

    def write(text: str, **options: bool) -> None:
        documents = [Document("a", text)]
        preprocess(documents, prefix, tokenizer=TokenizerSettings("bytes"), progress=False, **options)

    prefix = str(tmp_path / "x")
    calls = [0]
    real = {"replace": os.replace, "unlink": Path.unlink}
    ends: list[BaseException] = [KeyboardInterrupt(), SystemError("stands for a kill")]

    def stopping(name: str, at: int, end: BaseException) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            calls[0] += 1
            if calls[0] == at:
                raise end
            real[name](*arguments, **options)  # type: ignore[operator]

        return call

    for end in ends:
        at = 0
        while True:
            at += 1
            write("old", overwrite=True)
            calls[0] = 0
            with monkeypatch.context() as patched:
                patched.setattr(os, "replace", stopping("replace", at, end))
                patched.setattr(Path, "unlink", stopping("unlink", at, end))
                try:
                    write("new!", overwrite=True)
                except type(end):
                    pass
                else:
                    break
            if isinstance(end, KeyboardInterrupt):
                assert texts(tmp_path / "x") == ["new!"]
                assert json.loads((tmp_path / "x.json").read_text())["tokens"] == 5
            elif (tmp_path / "x.idx").exists():
                assert texts(tmp_path / "x") in (["old"], ["new!"])
                assert (tmp_path / "x.json").exists()
            assert not list(tmp_path.glob("*incomplete*")) or not isinstance(end, KeyboardInterrupt)
        assert at > 5


def test_outputs_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and no file is left or lost."""
    source = tmp_path / "in.json"
    source.write_bytes(LINES)

    assert run(tmp_path / "out", "--input", str(tmp_path / "*.jsonl")) == 2
    assert "no such file, and no file matches it as a pattern" in capsys.readouterr().err

    def refused(prefix: Path, *arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert run(prefix, "--input", str(source), *arguments) == 2
        assert sorted(tmp_path.rglob("*")) == before
        said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert len(said) == 1
        return said[0]

    (tmp_path / "file").write_text("")
    assert "file/x.bin cannot be written: " in refused(tmp_path / "file" / "x")
    (tmp_path / "old.json").write_text("")
    assert "old.json exists; choose another output prefix, or replace it with --overwrite" in refused(tmp_path / "old")
    assert "in.json is an input, and --output-prefix would replace it" in refused(tmp_path / "in", "--overwrite")
    assert source.read_bytes() == LINES
    (tmp_path / "folder.idx").mkdir()
    (tmp_path / "data").mkdir()
    source_and_slash = ["--tokenizer", "bytes", "--input", str(source), "--output-prefix", f"{tmp_path}/data/"]
    assert preprocess_data.main(source_and_slash) == 2
    assert "data/ is a folder; add the name of the data set, as in" in capsys.readouterr().err
    assert list((tmp_path / "data").iterdir()) == []
    assert "folder.idx is a folder" in refused(tmp_path / "folder", "--overwrite")
    source = tmp_path / "noise.jsonl"
    source.write_bytes(NOISE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # like a disk that is full
    try:
        assert re.search(r"error: \[Errno 27\] File too large: '.*x\.bin\.incomplete-", refused(tmp_path / "x"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
