"""Reading text files: damage costs the smallest unit, and files that are not read are reported."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megafp8.data import documents
from megafp8.data.documents import Document, find_files, read_documents, read_part
from megafp8.data.tokenizers import build_tokenizer
from tests.object_server import ObjectServer
from tools import preprocess_data, train_tokenizer

TEXTS = [f"line {i}: Größe, 日本語, 🙂\n" * (i % 4 + 1) for i in range(200)]
LINES = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0).encode() for i, text in enumerate(TEXTS)]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
DAMAGE: dict[str, tuple[bytes, str]] = {
    "a byte that is not UTF-8": (LINES[71][:25] + b"\xff" + LINES[71][25:], "not UTF-8 text: byte 0xff at position 25"),
    "Latin-1": ('{"text": "Größe"}'.encode("latin-1"), "not UTF-8 text: byte 0xf6"),
    "half a character": (b'{"text": "\xe6\x97"}', "not UTF-8 text: byte 0xe6"),
    "UTF-16": ('{"text": "x"}'.encode("utf-16-le"), "not JSON: .*; it contains zero bytes, as UTF-16 and UTF-32 do"),
    "UTF-16 with a mark": ('{"text": "x"}'.encode("utf-16"), "not UTF-8 text: .*; it contains zero bytes, as UTF-16"),
    "cut": (LINES[71][:30], "not JSON"),
    "two objects": (LINES[71] * 2, "not JSON: Extra data"),
    "zeros": (bytes(300), "not JSON: .*; it contains zero bytes"),
    "noise": (bytes(b for b in random.Random(0).randbytes(400) if b != 10), "not UTF-8 text"),
    "a number too long for Python": (b'{"text": "x", "n": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
    "nested too deep": (b'{"text": "x", "n": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "not JSON: it is nested"),
    "a list": (b'["text"]', r"has no key 'text' \(it has a list\)"),
    "a string": (b'"text"', r"has no key 'text' \(it has a str\)"),
    "another key": (b'{"body": "x"}', r"has no key 'text' \(it has body\)"),
    "a number": (b'{"text": 5}', "'text' is not a string"),
    "null": (b'{"text": null}', "'text' is not a string"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "'text' is not valid Unicode"),
}


def read(*inputs: Path, json_keys: tuple[str, ...] = ("text",)) -> tuple[list[str], list[Document]]:
    """Good texts and bad documents of the inputs."""
    records = list(read_documents(find_files(list(map(str, inputs)), json_keys=json_keys)[0]))
    return [d.text for d in records if d.text is not None], [d for d in records if d.error is not None]


def test_a_damaged_line_costs_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of damage in the first, a middle and the last of 200 lines; the reference is json on the others."""
    path = tmp_path / "data.jsonl"
    for name, (line, message) in DAMAGE.items():
        for at in (0, 71, 199):
            path.write_bytes(b"\n".join([*LINES[:at], line, *LINES[at + 1 :]]))
            good, bad = read(path)
            assert good == [json.loads(kept)["text"] for kept in LINES[:at] + LINES[at + 1 :]], name
            assert [d.origin for d in bad] == [f"{path}, line {at + 1}"], name
            assert re.search(message, str(bad[0].error)), (name, bad[0].error)
    arguments = ["--input", str(path), "--tokenizer", "bytes", "--output-prefix", str(tmp_path / "out")]
    assert preprocess_data.main(arguments) == 2
    assert f"error: {path}, line 200: " in capsys.readouterr().err
    assert preprocess_data.main([*arguments, "--skip-errors"]) == 0
    shown = capsys.readouterr().out
    assert "199 documents" in shown
    assert "1 unreadable documents skipped" in shown
    assert f"skipped: {path}, line 200: 'text' is not valid Unicode" in shown


@pytest.mark.slow
@pytest.mark.parametrize("suffix", PACK)
def test_a_line_that_is_too_long_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """It is never in memory as a whole; lines up to the limit are read. The same for whole texts."""
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(documents, "_PIECE_BYTES", 100)
    longest = json.dumps({"text": "x" * 989}).encode()
    bomb = b'{"text": "' + b"x" * 10**6 + b'"}'
    assert len(longest) == 1000
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b"\n".join([LINES[0], longest, bomb, LINES[1], longest + b" ", bomb])))
    good, bad = read(path)
    assert good == [TEXTS[0], "x" * 989, TEXTS[1]]
    assert [d.origin for d in bad] == [f"{path}, line {number}" for number in (3, 5, 6)]
    assert all(d.error is not None and d.error.startswith("has more than 1,000 bytes, the most that") for d in bad)
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(PACK[suffix](b"x" * 10**6))
    good, bad = read(path)
    assert (len(good), len(bad)) == ((0, 1) if suffix else (1, 0)), "a text may be as large as it is on disk"


def test_blocks_of_a_file_with_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is in one block, and no block reads far beyond its end."""
    monkeypatch.setattr(documents, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(documents, "_PIECE_BYTES", 100)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([LINES[0], b"x" * 50_000, *LINES[1:20], b"y" * 3000, *LINES[20:40]]))
    (file,), size = find_files([str(path)])[0], path.stat().st_size
    for block in (700, 3001, size):
        parts = [list(read_part(file, start, min(start + block, size))) for start in range(0, size, block)]
        texts = [d.text for part in parts for d in part if d.text is not None]
        assert texts == TEXTS[:40]
        assert sum(d.error is not None for part in parts for d in part) == 2


def test_random_damage(tmp_path: Path) -> None:
    """500 files of 200 lines with flipped, deleted and inserted bytes, against json on each line."""
    draw = random.Random(1)
    path = tmp_path / "data.jsonl"
    lost = 0
    for _ in range(500):
        content = bytearray(b"\n".join(LINES) + b"\n")
        for _ in range(draw.choice([1, 3, 30])):
            at = draw.randrange(len(content))
            kind = draw.choice(["flip", "delete", "insert"])
            if kind == "flip":
                content[at] ^= 1 << draw.randrange(8)
            elif kind == "delete":
                del content[at : at + draw.randrange(1, 9)]
            else:
                content[at:at] = draw.randbytes(draw.randrange(1, 9))
        path.write_bytes(content)
        good, bad = read(path)
        expected, faults = [], []
        for number, line in enumerate(bytes(content).split(b"\n"), 1):
            try:
                text = json.loads(line.decode())["text"] if line.strip() else None
                if text is not None:
                    expected.append(text.encode().decode())
            except (ValueError, KeyError, TypeError, AttributeError):
                faults.append(f"{path}, line {number}")
        assert good == expected
        assert [d.origin for d in bad] == faults
        lost += len(bad)
    print(f"500 files, {lost} damaged lines, 0 good lines lost")
    assert lost > 1000


def test_encodings_of_files(tmp_path: Path) -> None:
    """A byte order mark is not part of the text; UTF-16 and UTF-32 are named errors, with or without a mark."""
    path = tmp_path / "data.jsonl"
    marked = codecs.BOM_UTF8 + b"\n".join(LINES) + b"\n"
    path.write_bytes(marked + marked)  # two files joined
    assert read(path) == (TEXTS * 2, [])
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "Größe".encode())
    assert read(tmp_path / "a.txt") == (["Größe"], [])
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        path.write_bytes(b"\n".join(LINES).decode().encode(encoding))
        good, bad = read(path)
        assert (good, len(bad)) == ([], 200), encoding
        assert all("contains zero bytes, as UTF-16 and UTF-32 do" in str(document.error) for document in bad), encoding
        (tmp_path / "a.txt").write_bytes("A text\n".encode(encoding))
        good, bad = read(tmp_path / "a.txt")
        assert (good, len(bad)) == ([], 1), encoding
        assert f"not UTF-8 text but {encoding[:6].upper()}: " in str(bad[0].error)
    (tmp_path / "a.txt").write_bytes("日本語".encode("utf-16"))
    assert "but UTF-16" in str(read(tmp_path / "a.txt")[1][0].error)


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every known name is read, in the order of names; every other file is named with the reason."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    expected: dict[Path, list[str]] = {}
    for suffix, pack in PACK.items():
        for kind in ("json", "jsonl", "ndjson", "txt", "JSONL"):
            path = folder / ("deep" if suffix == ".gz" else "") / f"{kind}{suffix}.{kind}{suffix}"
            text = f"{kind} in {suffix or 'plain'}"
            path.write_bytes(pack(text.encode() if kind == "txt" else json.dumps({"text": text}).encode()))
            expected[path] = [text]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row 1", "row 2"]}), folder / "table.parquet")
    expected[folder / "table.parquet"] = ["row 1", "row 2"]
    assert read(folder) == ([text for path in sorted(expected) for text in expected[path]], [])

    (folder / "notes.csv").write_text("x")
    (folder / "_SUCCESS").write_text("")
    (folder / "t.parquet.gz").write_text("")
    (folder / "link").symlink_to(tmp_path)
    (folder / "gone.jsonl").symlink_to(tmp_path / "absent")
    skipped = {file.path.name: file.reason for file in find_files([str(folder)])[1]}
    assert skipped.keys() == {"notes.csv", "_SUCCESS", "t.parquet.gz", "link", "gone.jsonl"}
    assert skipped["notes.csv"].startswith("its suffix is not one of .json/.jsonl/.ndjson/.txt/.parquet")
    assert skipped["link"] == "links to folders are not followed"
    arguments = ["--tokenizer", "bytes", "--output-prefix", str(tmp_path / "out"), "--input"]
    assert preprocess_data.main([*arguments, str(folder)]) == 0
    shown = capsys.readouterr().err
    for name, reason in skipped.items():
        assert re.search(rf"warning: not read \({re.escape(reason)}\): .*{folder / name}", shown), name

    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.csv").write_text("x")
    with pytest.raises(
        ValueError, match=r"none: no file in this folder can be read; it contains .*notes\.csv \(its suffix is not one"
    ):
        find_files([str(tmp_path / "none")])
    with pytest.raises(ValueError, match=r"t\.parquet\.gz: parquet files are compressed internally"):
        find_files([str(folder / "t.parquet.gz")])


def test_a_key_for_each_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "title": "A"}\n')
    (tmp_path / "b.jsonl").write_text('{"content": "b"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"body": ["c"]}), tmp_path / "c.parquet")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.*", tmp_path / "a.jsonl"]
    assert read(*inputs, json_keys=("text", "content", "body", "title")) == (["a", "b", "c", "A"], [])
    with pytest.raises(ValueError, match="--json-key has 2 keys for 4 inputs"):
        find_files(list(map(str, inputs)), json_keys=("text", "content"))


def test_damaged_parquet(tmp_path: Path) -> None:
    """A value that is not UTF-8 costs its row; a damaged page its row group."""
    path = tmp_path / "data.parquet"
    texts = [f"{i} ".encode() * 200 for i in range(60)]
    values = [b"\xff" if i == 31 else text for i, text in enumerate(texts)]
    column = pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())
    for table in (pyarrow.table({"text": column}), pyarrow.table({"text": column.cast("binary").dictionary_encode()})):
        if pyarrow.types.is_dictionary(table["text"].type):  # as categories are stored
            encoded = table["text"].chunk(0)
            strings = encoded.dictionary.view(pyarrow.string())
            table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(encoded.indices, strings)})
        pyarrow.parquet.write_table(table, path, row_group_size=20)
        good, bad = read(path)
        assert good == [text.decode() for i, text in enumerate(texts) if i != 31]
        assert [(d.origin, d.error) for d in bad] == [
            (f"{path}, row 32", "not UTF-8 text: byte 0xff at position 0 (invalid start byte)")
        ]
    table = pyarrow.table({"text": [text.decode() for text in texts]})
    pyarrow.parquet.write_table(table, path, row_group_size=20, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    page = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = page.data_page_offset
    content[start + 40 : start + page.total_compressed_size] = bytes(page.total_compressed_size - 40)
    path.write_bytes(content)
    good, bad = read(path)
    assert good == [texts[i].decode() for i in [*range(20), *range(40, 60)]]
    assert [d.origin for d in bad] == [f"{path}, rows 21 to 40"]


def test_a_truncated_file_costs_its_end(tmp_path: Path) -> None:
    noise = [json.dumps({"text": random.Random(i).randbytes(400).hex()}).encode() for i in range(500)]
    whole = [json.loads(line)["text"] for line in noise]
    for suffix, pack in PACK.items():
        path = tmp_path / f"cut.jsonl{suffix}"
        packed = pack(b"\n".join(noise))
        path.write_bytes(packed[: len(packed) // 2 + 7])
        good, bad = read(path)
        assert good == whole[: len(good)], suffix
        assert len(bad) == 1, (suffix, len(good))
        if suffix:
            said = re.search(
                r"cannot be read: .* \(after line (\d+); the rest of the file is not read\)", str(bad[0].error)
            )
            assert said is None or int(said[1]) == len(good), suffix
        else:
            assert (bad[0].origin, len(good)) == (f"{path}, line {len(good) + 1}", pytest.approx(250, abs=2))
        if suffix in ("", ".gz", ".zst"):  # the others decompress in blocks larger than this file
            assert len(good) > 100, suffix


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("zstandard", "reading .zst files needs the package zstandard, which is not installed: pip install zstandard"),
        ("pyarrow", "reading .parquet files needs the package pyarrow, .*: pip install .*\\[data\\]'"),
        ("tokenizers", "a huggingface tokenizer needs the package tokenizers, .*pip install .*\\[hf\\]'"),
        ("tiktoken", "a tiktoken tokenizer needs the package tiktoken, .*pip install .*\\[data\\]'"),
    ],
)
def test_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, command: str
) -> None:
    """One line with the command that installs it, even with --skip-errors, and no output."""
    monkeypatch.setitem(sys.modules, package, None)
    if package in ("tokenizers", "tiktoken"):
        with pytest.raises(ValueError, match=command):
            build_tokenizer("huggingface" if package == "tokenizers" else "tiktoken", __file__)
        return
    path = tmp_path / ("a.jsonl.zst" if package == "zstandard" else "a.parquet")
    path.write_bytes(b"")
    rest, out = ["--input", str(path), "--skip-errors"], str(tmp_path / "out")
    for tool in (
        lambda: preprocess_data.main([*rest, "--tokenizer", "bytes", "--output-prefix", out]),
        lambda: train_tokenizer.main([*rest, "--output", out]),
    ):
        assert tool() == 2
        assert re.fullmatch(f"error: {command}.*\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [path]


def test_objects_are_read_as_files_are(s3: ObjectServer, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p", "q"]}), tmp_path / "c.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n{"text": "y"}\nbroken\n'))
    (tmp_path / "b.txt").write_text("z")
    (tmp_path / "d.bin").write_text("z")
    (tmp_path / "e.jsonl").write_bytes(b"\n".join(LINES[:9]))
    folder = s3.folder()
    for file in tmp_path.iterdir():
        (folder / "deep" / file.name).write_bytes(file.read_bytes())
    for item, local in (("", ""), ("/deep/*.jsonl.gz", "/*.jsonl.gz"), ("/deep/b.txt", "/b.txt")):
        there, here = find_files([f"{folder}{item}"]), find_files([f"{tmp_path}{local}"])
        assert [file.path.name for file in there[1]] == [file.path.name for file in here[1]]
        found, expected = ([document.text for document in read_documents(files)] for files, _ in (there, here))
        assert found == expected
        assert found
    (file,) = find_files([f"{folder}/deep/e.jsonl"])[0]
    blocks = [read_part(file, start, start + 100) for start in range(0, sum(map(len, LINES[:9])) + 9, 100)]
    assert [document.text for block in blocks for document in block] == TEXTS[:9]
    with pytest.raises(ValueError, match=f"--input {folder}/none: no such file"):
        find_files([f"{folder}/none"])
