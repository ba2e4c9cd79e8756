"""Preprocessing: every input format gives the same documents, in an order that does not depend on the workers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megafp8.data.indexed_dataset import IndexedDataset
from tools import inspect_data, preprocess_data

TEXTS = [f"document {i}\n" * (i % 5 + 1) for i in range(60)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def run(prefix: Path, *arguments: str) -> int:
    return preprocess_data.main([*arguments, "--tokenizer", "bytes", "--output-prefix", str(prefix)])


def texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
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
        pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}[kind]
        path.write_bytes(pack(LINES))
    return [str(path)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_every_format(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    assert run(tmp_path / "out", "--input", *make_input(tmp_path / "in", kind), "--workers", "2") == 0
    assert texts(tmp_path / "out") == TEXTS
    about = json.loads((tmp_path / "out.json").read_text())
    assert (about["documents"], about["vocab_size"], about["max_token_id"]) == (60, 257, 256)
    assert about["tokens"] == IndexedDataset(tmp_path / "out").num_tokens


def test_any_file_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "empty.py").write_text("")
    assert run(tmp_path / "out", "--text-files", "--input", str(tmp_path / "*.py")) == 0
    assert texts(tmp_path / "out") == ["print(1)\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "data.jsonl, line 2: not JSON"),
        ('{"body": "x"}', "data.jsonl, line 2: has no key 'text' (it has body)"),
        ('{"text": 5}', "data.jsonl, line 2: 'text' is not a string"),
    ],
)
def test_a_bad_line_is_named_or_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n\n{{"text": "two"}}\n')
    assert run(tmp_path / "out", "--input", str(path)) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl"], "something was left behind"
    assert run(tmp_path / "out", "--input", str(path), "--skip-errors") == 0
    assert texts(tmp_path / "out") == ["one", "two"]
    assert "1 unreadable documents left out" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    assert run(tmp_path / "out", "--input", str(tmp_path / "a.txt")) == 0
    assert run(tmp_path / "out", "--input", str(tmp_path / "b.txt")) == 2
    assert "is there already" in capsys.readouterr().err
    assert texts(tmp_path / "out") == ["a"]
    assert run(tmp_path / "out", "--input", str(tmp_path / "b.txt"), "--overwrite") == 0
    assert texts(tmp_path / "out") == ["b"]


def test_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", "--input", str(tmp_path / "*.jsonl")) == 2
    assert "no such file, and no pattern that matches one" in capsys.readouterr().err


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
